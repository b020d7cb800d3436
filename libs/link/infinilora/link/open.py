"""How two processes agree on a back-end and open it. No gRPC here: services carry the dictionaries.

engine   offers = make_offers(settings)          nonce file in the link directory; Hello carries offers.wire
server   opening = Opener.choose(offers.wire)    reads the nonce in *its* link directory: shared, so `shm`
                                                 makes the ring file (or expects a socket); Welcome carries
                                                 opening.chosen and opening.secret
engine   end = attach(chosen, secret, settings)  maps and unlinks, or connects; then says Ready
server   end = opening.wait(timeout_s)
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infinilora.link import shm, tcp
from infinilora.link.engine_end import NARROW_LIMIT_BYTES, EngineEnd
from infinilora.link.frame import MAX_RUNS
from infinilora.link.hosted import HostedEnd
from infinilora.link.layout import SECRET_BYTES, RingFile, attach_ring_file, create_ring_file
from infinilora.link.listener import TcpListener
from infinilora.link.narrow import Narrowing
from infinilora.link.server_end import ServerEnd
from infinilora.protocol.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from infinilora.link.cuda_driver import Regions  # and triton with it: only where a link uses a GPU
    from infinilora.link.rdma import Fabric

logger = logging.getLogger(__name__)

STALE_S = 120.0

I8 = "i8"
"""What an engine that narrows asks for, to cross a network. A server that can says it again; an older one is silent."""

RUNS = "runs"
"""How many runs of columns a call may ask for: what a server says of itself. An older one is silent: one."""

Offer = dict[str, str]
"""`backend`, and what that back-end needs to be found: all strings, as the wire carries them."""

_FILE_NAME = re.compile(r"(?:nonce|ring)-[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What one process allows its links. A shm link takes 2 x num_buffers x buffer_bytes of `directory`.

    `directory`: shared by processes of this host (a tmpfs, such as /dev/shm); None: no shm. `tcp_host`: what a
    server binds and tells engines to connect to; where it is a wildcard they are told `tcp_reach`, or this machine's
    name if that is empty. None: no tcp. `cuda`: the device memory
    that this process lends to links; None: no cuda. `rdma`: the memory that a network card may write; None: no rdma.
    Both need `tcp_host` too, for what goes beside the payloads. `narrowing`, of an engine: which calls go narrow
    over tcp and rdma (narrow.py).
    """

    directory: Path | None
    tcp_host: str | None = "127.0.0.1"
    tcp_port: int = 0
    tcp_reach: str = ""
    num_buffers: int = 16
    buffer_bytes: int = 256 * 1024
    spin_s: float = shm.SPIN_S
    narrowing: Narrowing = "never"
    narrow_limit_bytes: int = NARROW_LIMIT_BYTES
    cuda: "Regions | None" = None
    rdma: "Fabric | None" = None
    is_on_device: bool = False
    """Of an engine: its activations are not in host memory, and are carried there for links that have nothing else."""


def checked(settings: LinkSettings) -> LinkSettings:
    """The settings of a process that is to have links; InvalidRequest where none can come of them.

    Asked when a process starts: later each opening would fail, and requests would wait for adapters in vain.
    """
    if all(one is None for one in (settings.directory, settings.tcp_host, settings.cuda, settings.rdma)):
        raise InvalidRequest(
            "INFINILORA_LINK_BACKENDS names no link that this process can open; wanted one or more of tcp, shm (with "
            "INFINILORA_LINK_DIR), cuda (where INFINILORA_DEVICE is one) and rdma (with the package nixl)"
        )
    directory = settings.directory
    if directory is not None and not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        raise InvalidRequest(f"INFINILORA_LINK_DIR is {directory}; wanted a directory that this process may write to")
    return settings


class Offers:
    """What an engine offers a server. The nonce file proves a shared directory; `close` removes it."""

    def __init__(self, settings: LinkSettings) -> None:
        self.wire: list[Offer] = []
        self._nonce: Path | None = None
        if settings.cuda is not None:
            from infinilora.link import cuda_open

            self.wire.append(cuda_open.offer(settings.cuda))
        if settings.directory is not None and shm.is_available():
            self._nonce = settings.directory / f"nonce-{secrets.token_hex(16)}"
            proof = secrets.token_bytes(32)
            self._nonce.touch(mode=0o600)
            self._nonce.write_bytes(proof)
            self.wire.append({"backend": "shm", "nonce": self._nonce.name, "sha256": hashlib.sha256(proof).hexdigest()})
        asks = {} if settings.narrowing == "never" else {"narrow": I8}
        if settings.rdma is not None:
            self.wire.append({"backend": "rdma"} | asks)
        if settings.tcp_host is not None:
            self.wire.append({"backend": "tcp"} | asks)

    def close(self) -> None:
        if self._nonce is not None:
            self._nonce.unlink(missing_ok=True)


class Opening:
    """A link that a server has prepared and an engine may now attach to."""

    def __init__(
        self, chosen: Offer, secret: bytes, take: Callable[[float], ServerEnd], cancel: Callable[[], None]
    ) -> None:
        self.chosen = chosen | {RUNS: str(MAX_RUNS)}
        self.secret = secret
        self._take = take
        self._cancel = cancel

    def wait(self, timeout_s: float) -> ServerEnd:
        """The server's end. Blocks (tcp) until the engine has connected."""
        return self._take(timeout_s)

    def cancel(self) -> None:
        """Give the preparations up: the engine did not come."""
        self._cancel()


class Opener:
    """A server's side of opening links. Owns the tcp listener."""

    def __init__(self, settings: LinkSettings) -> None:
        """InvalidRequest where the settings' address cannot be bound."""
        self._settings = settings
        self._listener = None if settings.tcp_host is None else _listen(settings.tcp_host, settings.tcp_port)
        if settings.directory is not None:
            _sweep(settings.directory)

    def choose(self, offers: Sequence[Mapping[str, str]]) -> Opening:
        """Prepare the first offer that works here; InvalidRequest when none does."""
        for offer in offers:
            try:
                return self._open(offer)
            except Unavailable as error:
                extra = {"backend": offer.get("backend"), "reason": error.message}
                logger.info("link not possible, trying the next offer", extra=extra)
        raise InvalidRequest(
            f"none of the offered links {[offer.get('backend') for offer in offers]} works here: shm needs a directory "
            "that both processes mount, tcp an address to bind, cuda a GPU on the engine's host, rdma a fabric"
        )

    def _open(self, offer: Mapping[str, str]) -> Opening:
        """Unavailable, with the reason, where this offer does not work here."""
        match offer.get("backend"):
            case "cuda":
                return self._open_cuda(offer)
            case "shm":
                return self._open_shm(offer)
            case "tcp" | "rdma":
                return self._open_socket(offer)
            case other:
                raise Unavailable(f"this server knows no link {str(other)[:40]!r}")

    def _open_cuda(self, offer: Mapping[str, str]) -> Opening:
        regions, listener = self._settings.cuda, self._listener
        if regions is None or listener is None:
            raise Unavailable("no cuda link: this process lends no device memory, or binds no address for its headers")
        from infinilora.link import cuda, cuda_open

        if not cuda_open.is_near(offer):
            raise Unavailable("no cuda link: the engine runs on another host")
        shape = cuda.Shape(num_buffers=self._settings.num_buffers, buffer_bytes=self._settings.buffer_bytes)
        secret = secrets.token_bytes(SECRET_BYTES)
        prepared = cuda_open.Prepared.of(regions, shape, listener, secret, offer)
        return Opening(prepared.chosen(_reachable(self._settings)), secret, prepared.take, prepared.cancel)

    def _is_shared(self, offer: Mapping[str, str]) -> bool:
        """Whether the engine's nonce lies in our own directory. No path from a peer is opened."""
        directory, name = self._settings.directory, offer.get("nonce", "")
        if directory is None or not shm.is_available() or not _FILE_NAME.match(name):
            return False
        try:
            proof = (directory / name).read_bytes()
        except OSError:
            return False
        return hmac.compare_digest(hashlib.sha256(proof).hexdigest(), offer.get("sha256", ""))

    def _open_shm(self, offer: Mapping[str, str]) -> Opening:
        settings = self._settings
        if not self._is_shared(offer):
            raise Unavailable("no shm link: the engine's nonce is not in a directory of this process")
        assert settings.directory is not None  # noqa: S101 - _is_shared saw it
        secret = secrets.token_bytes(SECRET_BYTES)
        name = f"ring-{secrets.token_hex(16)}"
        ring = create_ring_file(
            settings.directory / name, secret, num_buffers=settings.num_buffers, buffer_bytes=settings.buffer_bytes
        )
        return Opening(
            {"backend": "shm", "file": name},
            secret,
            lambda _timeout_s: shm.server_end(ring, spin_s=settings.spin_s),
            ring.unlink,
        )

    def _open_socket(self, offer: Mapping[str, str]) -> Opening:
        """`tcp`, or `rdma`, whose headers go over a socket too."""
        settings, backend = self._settings, offer["backend"]
        listener, fabric = self._listener, settings.rdma
        if listener is None:
            raise Unavailable(f"no {backend} link: this process binds no address for it")
        if backend == "rdma" and fabric is None:
            raise Unavailable("no rdma link: this process has no fabric")
        secret = secrets.token_bytes(SECRET_BYTES)
        listener.expect(secret)
        chosen = {
            "backend": backend,
            "host": _reachable(settings),
            "port": str(listener.port),
            "num_buffers": str(settings.num_buffers),
            "buffer_bytes": str(settings.buffer_bytes),
        }
        if offer.get("narrow") == I8:
            chosen["narrow"] = I8

        def take(timeout_s: float) -> ServerEnd:
            sock = listener.take(secret, timeout_s)
            if backend == "tcp" or fabric is None:
                return ServerEnd(tcp.TcpServerPort(sock, buffer_bytes=settings.buffer_bytes))
            from infinilora.link import rdma

            sizes = rdma.Sizes(num_buffers=settings.num_buffers, buffer_bytes=settings.buffer_bytes)
            return rdma.server_end(fabric, sock, sizes, timeout_s=timeout_s)

        return Opening(chosen, secret, take, lambda: listener.forget(secret))

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def attach(chosen: Mapping[str, str], secret: bytes, settings: LinkSettings, *, timeout_s: float = 5.0) -> EngineEnd:
    """Open the engine's end of what the server chose. Blocking, at most `timeout_s`."""
    end = _attach(chosen, secret, settings, timeout_s)
    end.takes_runs = chosen.get(RUNS) == str(MAX_RUNS)
    return end


def _attach(chosen: Mapping[str, str], secret: bytes, settings: LinkSettings, timeout_s: float) -> EngineEnd:
    end_type = HostedEnd if settings.is_on_device else EngineEnd
    match chosen.get("backend"):
        case "shm":
            return shm.engine_end(_ring_file(chosen, secret, settings), spin_s=settings.spin_s, make=end_type)
        case "tcp":
            sock = tcp.connect(chosen["host"], int(chosen["port"]), secret, timeout_s=timeout_s)
            num_buffers, buffer_bytes = int(chosen["num_buffers"]), int(chosen["buffer_bytes"])
            port = tcp.TcpEnginePort(sock, num_buffers=num_buffers, buffer_bytes=buffer_bytes)
            return end_type(port, narrowing=_granted(chosen, settings), narrow_limit_bytes=settings.narrow_limit_bytes)
        case "cuda":
            from infinilora.link import cuda_open

            return cuda_open.attach(chosen, secret, settings.cuda, timeout_s=timeout_s)
        case "rdma" if settings.rdma is not None:
            from infinilora.link import rdma

            sizes = rdma.Sizes(num_buffers=int(chosen["num_buffers"]), buffer_bytes=int(chosen["buffer_bytes"]))
            sock = tcp.connect(chosen["host"], int(chosen["port"]), secret, timeout_s=timeout_s)
            return rdma.engine_end(
                settings.rdma,
                sock,
                sizes,
                timeout_s=timeout_s,
                narrowing=_granted(chosen, settings),
                narrow_limit_bytes=settings.narrow_limit_bytes,
            )
        case other:
            raise InvalidRequest(
                f"the LoRA server chose the link {other!r}; wanted one that was offered of shm, tcp, cuda, rdma"
            )


def _granted(chosen: Mapping[str, str], settings: LinkSettings) -> Narrowing:
    """Which calls go narrow, now that the server has answered."""
    is_granted = chosen.get("narrow") == I8
    if settings.narrowing != "never":
        logger.info("link opened narrow", extra={"asked": settings.narrowing, "granted": is_granted})
    return settings.narrowing if is_granted else "never"


def fabric_of(backends: Collection[str], device: torch.device) -> "Fabric | None":
    """What a process lends to rdma links where its back-ends name them; None, and why in the log, without a library."""
    if "rdma" not in backends:
        return None
    from infinilora.link import rdma_nixl

    try:
        return rdma_nixl.nixl_fabric(device)
    except Unavailable as error:
        logger.warning("rdma links are not offered", extra={"reason": error.message})
        return None


def regions_of(backends: Collection[str], device: torch.device) -> "Regions | None":
    """What a process lends to cuda links where it computes on CUDA and names them; None, and why in the log, else."""
    if "cuda" not in backends or device.type != "cuda":
        return None
    from infinilora.link.cuda_driver import CudaMemory, Regions

    try:
        return Regions(CudaMemory(device))
    except Unavailable as error:
        logger.warning("cuda links are not offered", extra={"reason": error.message})
        return None


def _listen(host: str, port: int) -> TcpListener:
    try:
        return TcpListener(host, port)
    except OSError as error:
        raise InvalidRequest(
            f"tcp links cannot be bound to {host}, port {port}: {error}; wanted an address of this machine in "
            "INFINILORA_LINK_HOST, and a free port, or 0, in INFINILORA_LINK_PORT"
        ) from error


def _reachable(settings: LinkSettings) -> str:
    """What an engine connects to."""
    host = settings.tcp_host or ""
    is_wildcard = host in ("0.0.0.0", "::")  # noqa: S104 - not bound here
    return settings.tcp_reach or socket.gethostname() if is_wildcard else host


def _ring_file(chosen: Mapping[str, str], secret: bytes, settings: LinkSettings) -> RingFile:
    name = chosen.get("file", "")
    if settings.directory is None or not _FILE_NAME.match(name):
        raise InvalidRequest(f"the LoRA server chose the link file {name[:80]!r}; wanted a ring-* file of ours")
    return attach_ring_file(settings.directory / name, secret)


def _sweep(directory: Path) -> None:
    """Remove files of openings that a kill cut short. Those that succeed are unlinked within seconds."""
    oldest = datetime.now(UTC).timestamp() - STALE_S
    for path in directory.glob("*-*"):
        with suppress(FileNotFoundError):  # another process sweeps too
            if _FILE_NAME.match(path.name) and path.stat().st_mtime < oldest:
                path.unlink()
                logger.info("stale link file removed", extra={"path": str(path)})
