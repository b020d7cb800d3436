"""How two processes of one host agree on a `cuda` link: what open.py does for `shm` and `tcp`, with GPU memory.

    offer    boot id of the host, id of the engine's device
    chosen   where to connect the control stream, the shape, the handle of the server's region, who signals
    engine   connects with the secret, maps the server's region, sends the handle of its own

Mapping proves that the memory is shared: where the driver refuses it, opening fails with the driver's own words.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infinilora.link import tcp
from infinilora.link.cuda import CudaEngineEnd, Shape, engine_end, lend, server_end
from infinilora.link.cuda_driver import HANDLE_BYTES, Region, Regions
from infinilora.link.errors import LinkTimeout
from infinilora.link.listener import TcpListener
from infinilora.link.server_end import ServerEnd
from infinilora.protocol.errors import InvalidRequest, Unavailable

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SIGNALS = {"device": False, "host": True}


def offer(regions: Regions) -> dict[str, str]:
    """What an engine that computes on this device offers."""
    return {"backend": "cuda", "boot": _boot_id(), "device": regions.memory.uuid}


def is_near(offered: Mapping[str, str]) -> bool:
    """Whether the engine runs on this host: the same boot of the same kernel, containers of it included."""
    return offered.get("boot") == _boot_id()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server's half of an opening: its region is lent once the engine came, and kept if it never does."""

    regions: Regions
    region: Region
    shape: Shape
    listener: TcpListener
    secret: bytes

    @classmethod
    def of(
        cls, regions: Regions, shape: Shape, listener: TcpListener, secret: bytes, offered: Mapping[str, str]
    ) -> "Prepared":
        """`shape` says the sizes; who signals depends on whether the two take turns on one device."""
        takes_turns = offered.get("device") == regions.memory.uuid and not regions.memory.has_mps
        agreed = Shape(num_buffers=shape.num_buffers, buffer_bytes=shape.buffer_bytes, is_host_signalled=takes_turns)
        region = lend(regions, agreed)
        listener.expect(secret)
        return cls(regions, region, agreed, listener, secret)

    def chosen(self, host: str) -> dict[str, str]:
        return {
            "backend": "cuda",
            "host": host,
            "port": str(self.listener.port),
            "num_buffers": str(self.shape.num_buffers),
            "buffer_bytes": str(self.shape.buffer_bytes),
            "signal": "host" if self.shape.is_host_signalled else "device",
            "region": self.region.handle.hex(),
        }

    def take(self, timeout_s: float) -> ServerEnd:
        try:
            sock = self.listener.take(self.secret, timeout_s)
        except LinkTimeout:
            self.regions.withdraw(self.region)
            raise
        return server_end(self.regions, self.region, sock, self.shape, timeout_s=timeout_s)

    def cancel(self) -> None:
        """Nobody showed the secret, so nobody can have mapped the region."""
        self.listener.forget(self.secret)
        self.regions.withdraw(self.region)


def attach(chosen: Mapping[str, str], secret: bytes, regions: Regions | None, *, timeout_s: float) -> CudaEngineEnd:
    """Open the engine's end of what the server chose. InvalidRequest for what no server of ours says."""
    if regions is None:
        raise InvalidRequest("the LoRA server chose the link back-end 'cuda', which this engine did not offer")
    handle = b""
    with suppress(ValueError):
        handle = bytes.fromhex(chosen.get("region", ""))
    if len(handle) != HANDLE_BYTES or chosen.get("signal") not in _SIGNALS:
        raise InvalidRequest(
            f"the LoRA server chose a cuda link with a handle of {len(handle)} bytes and signal "
            f"{chosen.get('signal')!r}; wanted {HANDLE_BYTES} bytes and one of {', '.join(_SIGNALS)}"
        )
    shape = Shape(
        num_buffers=int(chosen["num_buffers"]),
        buffer_bytes=int(chosen["buffer_bytes"]),
        is_host_signalled=_SIGNALS[chosen["signal"]],
    )
    sock = tcp.connect(chosen["host"], int(chosen["port"]), secret, timeout_s=timeout_s)
    return engine_end(regions, sock, handle, shape)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        raise Unavailable(f"no cuda link: {_BOOT_ID} cannot be read: {error}") from error
