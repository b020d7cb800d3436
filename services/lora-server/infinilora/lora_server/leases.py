"""One engine's stream: it opens the link, carries leases and readiness, and its end is the end of both.

engine                              server
  Hello(base, offers)         ->      checks, prepares a back-end
                              <-      Welcome(chosen, secret)
  (attaches) Ready            ->      takes its end, starts the serving thread
  LeaseRequest / LeaseRelease ->      the pool
                              <-      LeaseGranted, ColumnScale ..., LayersReady ..., or LeaseFailed

The Hello says what the engine computes; an adapter that needs more is refused (outbox.py). The Welcome of a head names
the other shards of its group: the engine opens a link to each, which carries no leases.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from infinilora.link.open import Opener, Opening
from infinilora.link.server_end import ServerEnd
from infinilora.lora_server.carried import CarryingKernels
from infinilora.lora_server.outbox import Outbox
from infinilora.lora_server.serve import LinkThread
from infinilora.pool.device import Device
from infinilora.pool.execute import Grants, SiteKernels
from infinilora.pool.pool import AdapterPool
from infinilora.protocol import lora_pb2
from infinilora.protocol.errors import Conflict, DeadlineExceeded, InvalidRequest, Unavailable
from infinilora.protocol.ids import PROTOCOL_VERSION, Digest, Fingerprint, parse_digest
from infinilora.protocol.shards import ONE, Shape
from infinilora.protocol.sites import UNNAMED_SITES
from infinilora.runtime.metrics import LoraServerMetrics
from infinilora.runtime.rpc import Call
from infinilora.runtime.service import Service
from infinilora.runtime.telemetry import Telemetry
from infinilora.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

SERVICE = lora_pb2.DESCRIPTOR.services_by_name["LoraServer"]
HELLO_S = 5.0
READY_S = 10.0
LINK_DTYPES = frozenset({"F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this server is to engines."""

    group: str
    base: Fingerprint
    shape: Shape = ONE


class LinkedPool(Protocol):
    """What a link computes with: an AdapterPool by its leases, a FollowerPool by what the head has put there."""

    @property
    def kernels(self) -> SiteKernels: ...
    @property
    def device(self) -> Device: ...
    def grants(self, holder: str) -> Grants: ...
    def drop(self, holder: str) -> None: ...


def _nowhere() -> list[lora_pb2.Shard]:
    return []


class LoraServer:
    """The rpc. `open_links`: what each is still to be told, by holder name; each has its serving thread."""

    def __init__(  # noqa: PLR0913 - what a door is made of
        self,
        identity: Identity,
        pool: AdapterPool | LinkedPool,
        opener: Opener,
        service: Service,
        *,
        watchdog: Watchdog,
        traces: Telemetry,
        metrics: LoraServerMetrics | None = None,
        others: Callable[[], list[lora_pb2.Shard]] = _nowhere,
        owns: Callable[[int, int], bool] | None = None,
    ) -> None:
        """`others`: where a head's other shards are. `owns`: whether this one computes (layer, site); None: all."""
        self._identity = identity
        self._pool = pool
        self._leases = pool if isinstance(pool, AdapterPool) else None
        self._others = others
        self._owns = owns
        self._kernels = pool.kernels if pool.device.is_host else CarryingKernels(pool.kernels, pool.device)
        self._opener = opener
        self._service = service
        self._watchdog = watchdog
        self._traces = traces
        self._metrics = metrics
        self._numbers = count(1)
        self.open_links: dict[str, Outbox] = {}

    async def open_link(
        self, requests: AsyncIterator[lora_pb2.EngineMessage], _call: Call
    ) -> AsyncIterator[lora_pb2.ServerMessage]:
        hello = await self._hello(requests)
        opening = self._opener.choose([{"backend": offer.backend, **offer.details} for offer in hello.offers])
        holder = f"{hello.engine_id}/{hello.incarnation}/{next(self._numbers)}"
        try:
            yield self._welcome(opening)
            await _next(requests, "ready", READY_S)
            end = await asyncio.to_thread(opening.wait, READY_S)
        except BaseException:
            opening.cancel()
            raise
        thread, outbox = self._start(end, holder, hello)
        logger.info("link open", extra={"engine_id": holder, "backend": opening.chosen["backend"]})
        reader = self._service.spawn(self._read(requests, holder, outbox), f"leases of {holder}")
        try:
            while messages := await outbox.take():
                for digest in outbox.take_refused():
                    self._give_up(holder, digest, outbox)
                for message in messages:
                    yield message
        finally:
            reader.cancel()
            await self._end(thread, holder)

    def close_idle(self) -> None:
        """End the streams of links that hold no lease."""
        for holder, outbox in list(self.open_links.items()):
            if self._leases is None or not self._leases.holds(holder):
                outbox.close()

    def close(self) -> None:
        """End every stream; engines run their rows elsewhere."""
        for outbox in self.open_links.values():
            outbox.close()

    async def _hello(self, requests: AsyncIterator[lora_pb2.EngineMessage]) -> lora_pb2.Hello:
        first = await _next(requests, "hello", HELLO_S)
        hello = first.hello
        if hello.protocol_version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
            raise InvalidRequest(f"hello of protocol {hello.protocol_version}; this server speaks {PROTOCOL_VERSION}")
        if hello.base_fingerprint != self._identity.base:
            raise Conflict(f"engine of base {hello.base_fingerprint}; this group serves {self._identity.base}")
        if hello.dtype not in LINK_DTYPES:
            raise InvalidRequest(
                f"activations of dtype {hello.dtype!r}; a link carries {', '.join(sorted(LINK_DTYPES))}"
            )
        if self._service.draining.is_set():
            raise Unavailable("this LoRA server is draining; ask another", retry_after_s=1.0)
        if self._identity.shape.num_shards > 1 and not hello.opens_shards:
            raise InvalidRequest(
                f"group {self._identity.group} has {self._identity.shape.num_shards} shards; "
                "this engine is older than such groups and would be served a part"
            )
        return hello

    def _welcome(self, opening: Opening) -> lora_pb2.ServerMessage:
        details = {key: value for key, value in opening.chosen.items() if key != "backend"}
        return lora_pb2.ServerMessage(
            welcome=lora_pb2.Welcome(
                protocol_version=PROTOCOL_VERSION,
                group=self._identity.group,
                incarnation=self._service.incarnation,
                chosen=lora_pb2.Offer(backend=opening.chosen["backend"], details=details),
                secret=opening.secret,
                shape=str(self._identity.shape),
                shards=self._others(),
            )
        )

    def _start(self, end: ServerEnd, holder: str, hello: lora_pb2.Hello) -> tuple[LinkThread, Outbox]:
        computed_sites = hello.sites or UNNAMED_SITES
        outbox = Outbox(asyncio.get_running_loop(), computed_sites, scales_columns=hello.scales_columns)
        thread = LinkThread(
            end,
            self._kernels,
            self._pool.grants(holder),
            name=f"link {holder}",
            traces=self._traces,
            metrics=self._metrics,
            owns=self._owns,
            on_end=outbox.close,
            on_death=self._service.fail_threadsafe,
        )
        thread.start()
        self._watchdog.watch(thread.name, lambda: thread.progress)
        self.open_links[holder] = outbox
        return thread, outbox

    async def _read(self, requests: AsyncIterator[lora_pb2.EngineMessage], holder: str, outbox: Outbox) -> None:
        """Carry the engine's words to the pool until it has no more; then the stream ends."""
        try:
            async for message in requests:
                self._take(message, holder, outbox)
        except InvalidRequest as error:
            logger.warning("link broken by its engine", extra={"engine_id": holder, "reason": error.message})
        finally:
            outbox.close()

    def _take(self, message: lora_pb2.EngineMessage, holder: str, outbox: Outbox) -> None:
        if self._leases is None:
            raise InvalidRequest("leases are the head's alone; this is another shard of its group")
        match message.WhichOneof("message"):
            case "lease":
                digest = parse_digest(message.lease.digest)
                outbox.forget(digest)
                self._leases.lease(holder, digest, outbox.put)
            case "release":
                self._give_up(holder, parse_digest(message.release.digest), outbox)
            case other:
                raise InvalidRequest(f"an open link carries leases and releases; found {other}")

    def _give_up(self, holder: str, digest: Digest, outbox: Outbox) -> None:
        if self._leases is not None:
            self._leases.release(holder, digest)
        outbox.forget(digest)

    async def _end(self, thread: LinkThread, holder: str) -> None:
        """The stream is over: leases fall at once, then the link."""
        self.open_links.pop(holder, None)
        self._pool.drop(holder)
        await asyncio.to_thread(thread.stop)
        self._watchdog.forget(thread.name)
        logger.info("link gone", extra={"engine_id": holder})


async def _next(
    requests: AsyncIterator[lora_pb2.EngineMessage], wanted: str, timeout_s: float
) -> lora_pb2.EngineMessage:
    try:
        async with asyncio.timeout(timeout_s):
            message = await anext(requests)
    except TimeoutError:
        raise DeadlineExceeded(f"no {wanted} from the engine within {timeout_s:g} s") from None
    except StopAsyncIteration:
        raise InvalidRequest(f"the stream ended before {wanted}") from None
    if message.WhichOneof("message") != wanted:
        raise InvalidRequest(f"found {message.WhichOneof('message')}; wanted {wanted}")
    return message
