"""LoRA server groups by script: the real stream and the real link, deltas by rule, and every way to misbehave."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from infinilora.link.errors import LinkClosed
from infinilora.link.frame import Kind
from infinilora.link.open import LinkSettings, Opener
from infinilora.link.server_end import Call, ServerEnd
from infinilora.protocol import lora_pb2
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError
from infinilora.protocol.ids import PROTOCOL_VERSION
from infinilora.runtime import rpc

SERVICE = lora_pb2.DESCRIPTOR.services_by_name["LoraServer"]


def factor_of(generation: int, layer: int) -> float:
    """What a tenancy multiplies every column of a site by, where a group scales."""
    return 2.0 + generation + layer / 8


def delta_of(slot: int, generation: int, layer: int, site: int) -> float:
    """What this tenancy adds to every column: no two tenancies, layers or sites add the same."""
    return slot * 1000 + generation * 100 + layer * 10 + site


def echo_of(x: Tensor, ids: Tensor | None, weights: Tensor | None, columns: Sequence[int]) -> Tensor:
    """What a group that echoes adds besides: a number for each row, of all that came with it, and each column's own."""
    rows = x.flatten(1).float().sum(1)
    for part, factor in ((ids, 2), (weights, 3)):
        if part is not None:
            rows = rows + factor * part.float().sum(1)
    return rows[:, None] + torch.tensor(columns, dtype=torch.float32)


class ScriptedGroup:
    """Grants every lease at once, all layers ready. Slots are numbered as digests come; generations by `generation`."""

    def __init__(self, name: str, settings: LinkSettings, *, num_layers: int, layer_sites: list[int]) -> None:
        self.name = name
        self.scaled: dict[tuple[int, int], int] = {}
        """(layer, site) -> columns, where every adapter has a column scale; `forget_scales` are never sent."""
        self.forget_scales: set[tuple[int, int]] = set()
        self.generation = 1
        self.refuse_leases: InfiniLoraError | None = None
        self.refuse_calls = 0
        self.echoes = False
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []
        self.released: list[str] = []
        self.hellos: list[Any] = []
        self.closed_ends: list[ServerEnd] = []
        self.calls: list[Call] = []
        self.address = ""
        self._num_layers = num_layers
        self._layer_sites = layer_sites
        self._slots: dict[str, int] = {}
        self._opener = Opener(settings)
        self._outboxes: list[asyncio.Queue[Any]] = []

    async def open_link(self, requests: AsyncIterator[Any], _call: rpc.Call) -> AsyncIterator[Any]:
        hello = (await anext(requests)).hello
        self.hellos.append(hello)
        opening = self._opener.choose([{"backend": o.backend, **o.details} for o in hello.offers])
        details = {k: v for k, v in opening.chosen.items() if k != "backend"}
        chosen = lora_pb2.Offer(backend=opening.chosen["backend"], details=details)
        yield lora_pb2.ServerMessage(
            welcome=lora_pb2.Welcome(
                protocol_version=PROTOCOL_VERSION,
                group=self.name,
                incarnation="i",
                chosen=chosen,
                secret=opening.secret,
            )
        )
        try:
            assert (await anext(requests)).WhichOneof("message") == "ready"
            end = await asyncio.to_thread(opening.wait, 5)
        except BaseException:
            opening.cancel()
            raise
        serving = threading.Thread(target=self._serve, args=(end,), daemon=True)
        serving.start()
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._outboxes.append(outbox)
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(requests, outbox))
            try:
                while (message := await outbox.get()) is not None:
                    yield message
            finally:
                reader.cancel()
                self._outboxes.remove(outbox)
                end.close()
                self.gate.set()
                await asyncio.to_thread(serving.join, 10)
                self.closed_ends.append(end)

    def end_streams(self) -> None:
        """What a dying server does."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    def say(self, message: Any) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(message)

    async def _read(self, requests: AsyncIterator[Any], outbox: "asyncio.Queue[Any]") -> None:
        async for message in requests:
            if message.WhichOneof("message") == "release":
                self.released.append(message.release.digest)
                continue
            digest = message.lease.digest
            self.asked.append(digest)
            if self.refuse_leases is not None:
                error = self.refuse_leases
                failed = lora_pb2.LeaseFailed(digest=digest, code=error.code, message=error.message)
                outbox.put_nowait(lora_pb2.ServerMessage(failed=failed))
                continue
            slot = self._slots.setdefault(digest, len(self._slots))
            tenancy = {"digest": digest, "slot": slot, "slot_generation": self.generation}
            granted = lora_pb2.LeaseGranted(**tenancy, layer_sites=self._layer_sites, scaled_sites=self._scaled_sites())
            outbox.put_nowait(lora_pb2.ServerMessage(granted=granted))
            for layer, site in self.scaled.keys() - self.forget_scales:
                factors = torch.full((self.scaled[layer, site],), factor_of(self.generation, layer))
                scale = lora_pb2.ColumnScale(**tenancy, layer=layer, site=site, factors=factors.numpy().tobytes())
                outbox.put_nowait(lora_pb2.ServerMessage(scale=scale))
            ready = lora_pb2.LayersReady(**tenancy, count=len(self._layer_sites))
            outbox.put_nowait(lora_pb2.ServerMessage(layers=ready))
        outbox.put_nowait(None)

    def _scaled_sites(self) -> list[int]:
        masks = [sum(1 << s for at, s in self.scaled if at == layer) for layer in range(len(self._layer_sites))]
        return masks if self.scaled else []

    def _serve(self, end: ServerEnd) -> None:
        plan: list[list[int]] = []
        try:
            while True:
                call = end.recv(0.2)
                if call is None:
                    continue
                self.calls.append(Call(call.header, call.segments))
                if call.segments is not None:
                    plan = call.segments.tolist()
                    continue
                self.gate.wait(10)
                if not end.is_alive:
                    return  # a dead server answers nothing, though it could while its memory lasts
                self._answer(end, call, plan)
        except LinkClosed:
            return

    def _answer(self, end: ServerEnd, call: Call, plan: list[list[int]]) -> None:
        header = call.header
        if self.refuse_calls:
            self.refuse_calls -= 1
            end.refuse(call, AdapterFailed("this tenancy is not granted, as the test wants it"))
            return
        out = torch.zeros(header.rows, header.out_cols)
        for start, rows, slot, generation in plan:
            first, last = max(start, header.row_start), min(start + rows, header.row_start + header.rows)
            if first < last:
                delta = delta_of(slot, generation, header.layer, header.site)
                out[first - header.row_start : last - header.row_start] = delta
        if self.echoes:
            assert call.x is not None
            columns = [c for run in header.runs or ((0, header.out_cols),) for c in range(*run)]
            out += echo_of(call.x, call.topk_ids, call.topk_weights, columns)
        end.reply_buffer(call).copy_(out)
        end.reply(call)

    @property
    def site_calls(self) -> list[Call]:
        return [c for c in self.calls if c.header.kind == Kind.SITE]

    def close(self) -> None:
        self._opener.close()


@asynccontextmanager
async def serving(group: ScriptedGroup, address: str = "127.0.0.1:0") -> AsyncIterator[ScriptedGroup]:
    """The group's gRPC door, open for the length of the block."""
    torch.set_num_threads(1)
    async with rpc.serving(address, [(SERVICE, group)], grace_s=0.2) as server:
        group.address = server.address
        yield group
        group.end_streams()
