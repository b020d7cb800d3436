"""A lora-server as a real process, and an engine's side of its door, for the tests that speak to it."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from infinilora.link.engine_end import EngineEnd
from infinilora.link.frame import PlanSegment
from infinilora.link.open import LinkSettings, Offers, attach
from infinilora.lora_server.leases import SERVICE
from infinilora.protocol import lora_pb2
from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import WireError, from_wire
from infinilora.protocol.ids import PROTOCOL_VERSION, Digest
from infinilora.protocol.sites import site_mask
from infinilora.runtime.rpc import Channels, Duplex
from support.procs import Server

ANSWER_S = 10.0


class LoraServerProcess(Server):
    """`python -m infinilora.lora_server` with settings of the test's choice on top of loopback defaults."""

    name = "lora-server"
    ready_s = 60.0

    def __init__(self, home: Path, **settings: object) -> None:
        super().__init__(home)
        (home / "link").mkdir(exist_ok=True)
        self.settings = {
            "LISTEN": f"127.0.0.1:{self.port}",
            "LINK_DIR": home / "link",
            "VAR_DIR": home / "var",
            "GROUP": "lora-0",
            "THREADS": 1,
            "POOL_BYTES": 8 << 20,
            "NUM_SLOTS": 8,
            "LINK_BUFFER_BYTES": 16 << 10,
            "LINK_BUFFERS": 4,
            "BEAT_MS": 100,
            **settings,
        }

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @override
    def command(self) -> list[str]:
        return [sys.executable, "-m", "infinilora.lora_server"]

    @override
    def environment(self) -> dict[str, str]:
        return {f"INFINILORA_{key}": str(value) for key, value in self.settings.items()} | {"OMP_NUM_THREADS": "1"}

    def wait_end(self) -> int:
        """The exit status, once the process has ended by itself."""
        assert self._process is not None
        return self._process.wait(ANSWER_S)


class Granted:
    """A lease as the engine was told of it."""

    def __init__(self, message: lora_pb2.LeaseGranted) -> None:
        self.digest = Digest(message.digest)
        self.slot = message.slot
        self.slot_generation = message.slot_generation
        self.layer_sites = tuple(message.layer_sites)
        self.layers_ready = 0

    def rows(self, start: int, count: int) -> PlanSegment:
        return PlanSegment(start, count, self.slot, self.slot_generation)


class LinkedEngine:
    """An open link: leases over the stream, steps over the ring."""

    def __init__(
        self, stream: Duplex, replies: AsyncIterator[lora_pb2.ServerMessage], end: EngineEnd, backend: str
    ) -> None:
        self.end = end
        self.backend = backend
        self._stream = stream
        self._replies = replies
        self.leases: dict[Digest, Granted] = {}
        self.scales: dict[tuple[Digest, int, int], NDArray[np.float32]] = {}
        """(digest, layer, site) -> factors, as they came."""
        self._step = 0

    async def ask(self, digest: Digest) -> None:
        await self._stream.send(lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest=digest)))

    async def release(self, digest: Digest) -> None:
        await self._stream.send(lora_pb2.EngineMessage(release=lora_pb2.LeaseRelease(digest=digest)))
        self.leases.pop(digest, None)

    async def lease(self, digest: Digest) -> Granted:
        """Ask, and wait until every layer is ready. Raises what the server said."""
        await self.ask(digest)
        return await self.resident(digest)

    async def resident(self, digest: Digest) -> Granted:
        while True:
            await self.hear()
            lease = self.leases.get(digest)
            if lease and lease.layers_ready == len(lease.layer_sites):
                return lease

    async def hear(self) -> lora_pb2.ServerMessage:
        """The next message, noted down. Raises what a failed lease carries, StopAsyncIteration at the end."""
        async with asyncio.timeout(ANSWER_S):
            message: lora_pb2.ServerMessage = await anext(self._replies)
        match message.WhichOneof("message"):
            case "granted":
                self.leases[Digest(message.granted.digest)] = Granted(message.granted)
            case "layers":
                lease = self.leases[Digest(message.layers.digest)]
                assert (lease.slot, lease.slot_generation) == (message.layers.slot, message.layers.slot_generation)
                lease.layers_ready = message.layers.count
            case "scale":
                place = Digest(message.scale.digest), message.scale.layer, message.scale.site
                self.scales[place] = np.frombuffer(message.scale.factors, "<f4").astype(np.float32)
            case "failed":
                raise from_wire(WireError(code=message.failed.code, message=message.failed.message))
        return message

    def plan(self, *segments: PlanSegment, trace: bytes = bytes(24)) -> int:
        self._step += 1
        self.end.send_plan(self._step, list(segments), trace=trace)
        return self._step

    def site(
        self,
        layer: int,
        site: int,
        x: Tensor,
        out_shape: Sequence[int],
        *,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> Tensor:
        """The delta of x under the latest plan. Blocking."""
        out = torch.full((x.shape[0], *out_shape), torch.nan)
        cols = out[0].numel()
        ticket = self.end.submit(self._step, layer, site, x, cols, topk_ids=topk_ids, topk_weights=topk_weights)
        self.end.wait(ticket, out, deadline_s=ANSWER_S, add=False)
        return out


@asynccontextmanager
async def linked_engine(
    server: LoraServerProcess,
    card: BaseCard,
    *,
    engine_id: str = "engine-0",
    backends: Sequence[str] = ("shm", "tcp"),
    fingerprint: str | None = None,
    protocol_version: int = PROTOCOL_VERSION,
    sites: int = site_mask(Site),
    scales_columns: bool = True,
    opens_shards: bool = False,
) -> AsyncIterator[LinkedEngine]:
    """Open a link to the server as an engine of `card` would, and close it at the end."""
    settings = LinkSettings(
        directory=Path(str(server.settings["LINK_DIR"])) if "shm" in backends else None,
        tcp_host="127.0.0.1" if "tcp" in backends else None,
    )
    async with Channels() as channels, channels.client(SERVICE, server.address).duplex("OpenLink") as stream:
        with closing(Offers(settings)) as offers:
            hello = lora_pb2.Hello(
                protocol_version=protocol_version,
                engine_id=engine_id,
                incarnation="1",
                base_fingerprint=fingerprint or card.fingerprint,
                dtype="F32",
                max_rows=512,
                offers=[_offer(offer) for offer in offers.wire],
                sites=sites,
                scales_columns=scales_columns,
                opens_shards=opens_shards,
            )
            await stream.send(lora_pb2.EngineMessage(hello=hello))
            replies = aiter(stream)
            welcome = (await anext(replies)).welcome
        chosen = {"backend": welcome.chosen.backend, **welcome.chosen.details}
        end = await asyncio.to_thread(attach, chosen, welcome.secret, settings)
        try:
            await stream.send(lora_pb2.EngineMessage(ready=lora_pb2.Ready()))
            yield LinkedEngine(stream, replies, end, welcome.chosen.backend)
        finally:
            end.close()


def _offer(offer: dict[str, str]) -> lora_pb2.Offer:
    details = {key: value for key, value in offer.items() if key != "backend"}
    return lora_pb2.Offer(backend=offer["backend"], details=details)
