"""The LoRA server groups of an engine: a link to each, and the leases that are asked for over it.

`run` keeps the links and belongs to the asyncio loop, as does all that comes in over them. Other threads want
and drop leases in the book, and the loop sends what follows from it. A link that dies takes its leases with it: they go
back to WAITING and are asked of another group, or of the same one when it is back.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from infinilora.engine.lora.book import LeaseBook
from infinilora.engine.lora.choose import Group, choose_group
from infinilora.engine.lora.grouplink import GroupLink, Identity, open_link
from infinilora.engine.lora.interface import Lease, LeaseView, OnChange
from infinilora.engine.lora.offers import GroupOffers
from infinilora.engine.lora.scales import column_scales, read_scale
from infinilora.link.errors import LinkNotOpened
from infinilora.link.open import LinkSettings
from infinilora.protocol import lora_pb2
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import InfiniLoraError, Internal, WireError, from_wire
from infinilora.protocol.ids import Digest
from infinilora.runtime.rpc import Channels, Message

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 0.5


class LoraGroups:
    """`_known`: the groups that may be used, or whose link is still open. `_links`: those that are open, by group."""

    def __init__(
        self,
        card: BaseCard,
        identity: Identity,
        *,
        channels: Channels,
        link: LinkSettings,
        on_change: OnChange,
        on_loss: Callable[[], None],
    ) -> None:
        """`on_loss`: a link is gone; whoever holds it lets go. Called from any thread, under a lock: be quick."""
        self._card = card
        self._geometry = card.geometry()
        self._identity = identity
        self._channels = channels
        self._offers = GroupOffers(link)
        self._on_change = on_change
        self._on_loss = on_loss
        self._book = LeaseBook()
        self._lock = threading.Lock()
        self._links: dict[str, GroupLink] = {}
        self._known: dict[str, Group] = {}
        self.placed: Mapping[Digest, Collection[str]] = {}
        """The groups that are to hold an adapter; read on the asyncio loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fleet_changed = asyncio.Event()
        self._has_narrowed = False

    # Any thread: leases, and links -----------------------------------------------------------------

    def want(self, digest: Digest) -> None:
        if self._book.want(digest):
            self._wake_loop()

    def drop(self, digest: Digest) -> None:
        if self._book.drop(digest):
            self._wake_loop()

    def view(self, digest: Digest) -> LeaseView:
        return self._book.view(digest)

    def ask_again(self, group: str, digests: frozenset[Digest]) -> None:
        """The group does not (or not yet) grant what was taken for granted: have the leases told anew."""
        self._book.ask_again(group, digests)
        self._wake_loop()

    def links_to(self, groups: Iterable[str]) -> tuple[GroupLink | None, ...]:
        """The links of now; None where there is none."""
        with self._lock:
            return tuple(self._links.get(group) for group in groups)

    def backends(self) -> dict[str, str]:
        """Group -> back-end, of the links that are open."""
        with self._lock:
            return {name: link.backend for name, link in self._links.items() if link.is_alive}

    def forget(self, link: GroupLink, reason: str) -> None:
        """The link is dead, and every lease it carried. Harmless when repeated."""
        with self._lock:
            if self._links.get(link.group) is not link:
                return
            del self._links[link.group]
            self._on_loss()
            self._book.group_lost(link.group)
        link.die(reason)
        self._wake_loop()
        self._on_change()

    def close(self) -> None:
        """End every link. `run` is cancelled by whoever spawned it."""
        self._known = {}
        with self._lock:
            links = list(self._links.values())
        for link in links:
            self.forget(link, "this engine closes")

    def check(self) -> None:
        """Raise AssertionError if a lease is held or a site call is under way."""
        assert not self._book.num_holders(), f"{self._book.num_holders()} adapters are still held"
        with self._lock:
            waiting = {name: sum(e.num_outstanding for e in link.ends) for name, link in self._links.items()}
        assert not any(waiting.values()), f"site calls were never waited for: {waiting}"

    def _wake_loop(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._reconcile)

    # The asyncio loop: fleet and links -------------------------------------------------------------

    async def run(self) -> None:
        """Keep a link to every group until cancelled."""
        self._loop = asyncio.get_running_loop()
        keepers: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._fleet_changed.clear()
                for name in self._known.keys() - keepers.keys():
                    keepers[name] = tasks.create_task(self._keep(name), name=f"link to {name}")
                for name in keepers.keys() - self._known.keys():
                    keepers.pop(name).cancel()
                await self._fleet_changed.wait()

    def update(self, groups: Sequence[Group]) -> None:
        """The groups of this engine's base that may be used now. An open link outlives its group's silence."""
        known = {group.name: group for group in groups}
        with self._lock:
            open_links = set(self._links)
        self._known = {
            name: known.get(name) or self._known[name] for name in known.keys() | (open_links & self._known.keys())
        }
        self._fleet_changed.set()

    async def _keep(self, name: str) -> None:
        backoff_s = FIRST_BACKOFF_S
        while name in self._known:
            group = self._known[name]
            try:
                offers = self._offers.to(group)
                opening = open_link(self._channels, name, group.address, self._identity, offers, card=self._card)
                async with opening as link:
                    backoff_s = FIRST_BACKOFF_S
                    await self._live(link)
                    logger.warning("link ended", extra={"group": name, "reason": link.reason})
                    if name in self._known:
                        self._offers.failed(group, link.backend, link.reason, was_open=True)
            except (InfiniLoraError, OSError) as error:
                logger.warning("no link", extra={"group": name, "reason": str(error)})
                if isinstance(error, LinkNotOpened):
                    self._offers.failed(group, error.backend, error.message)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _live(self, link: GroupLink) -> None:
        with self._lock:
            self._links[link.group] = link
        self._reconcile()
        try:
            await link.run(partial(self._take, link))
        finally:
            self.forget(link, link.reason)

    # The asyncio loop: lease messages -------------------------------------------------------------

    def _take(self, link: GroupLink, message: Message) -> None:
        match message.WhichOneof("message"):
            case "granted":
                news = message.granted
                self._has_narrowed |= link.narrows
                self._book.grant(
                    Lease(
                        Digest(news.digest),
                        link.group,
                        news.slot,
                        news.slot_generation,
                        tuple(news.layer_sites),
                        column_scales(news.layer_sites, news.scaled_sites),
                        self._has_narrowed,
                    )
                )
            case "scale":
                self._take_scale(link.group, message.scale)
            case "layers":
                ready = message.layers
                self._book.layers_ready(
                    link.group,
                    Digest(ready.digest),
                    slot=ready.slot,
                    slot_generation=ready.slot_generation,
                    count=ready.count,
                )
            case "failed":
                self._refused(link.group, message.failed)
            case other:
                raise Internal(f"group {link.group} sent {other!r} after its welcome")
        self._on_change()

    def _take_scale(self, group: str, news: Message) -> None:
        scale = read_scale(news, self._geometry)
        digest = Digest(news.digest)
        self._book.put_scale(group, digest, scale, slot=news.slot, slot_generation=news.slot_generation)

    def _refused(self, group: str, failed: Message) -> None:
        """A failure that another group may not share is tried there; one of the adapter itself is final."""
        digest = Digest(failed.digest)
        error = from_wire(WireError(code=failed.code, message=failed.message))
        elsewhere = self._choose(digest, self._book.refused_by(digest) | {group})
        is_final = not error.retryable or elsewhere is None
        extra = {"adapter_id": digest, "group": group, "code": failed.code, "reason": failed.message}
        logger.warning("lease refused", extra=extra)
        self._book.refuse(group, digest, error, is_final=is_final)
        if not is_final:
            self._reconcile()

    def _reconcile(self) -> None:
        """Tell the groups what the book says: give up what nobody wants, ask for what nobody was asked for."""
        with self._lock:
            for digest, group in self._book.take_unwanted():
                self._send(group, lora_pb2.EngineMessage(release=lora_pb2.LeaseRelease(digest=digest)))
            for digest, refused_by in self._book.unasked():
                chosen = self._choose(digest, refused_by)
                if chosen is not None:
                    self._book.ask(digest, chosen)
                    self._send(chosen, lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest=digest)))

    def _choose(self, digest: Digest, refused_by: Collection[str]) -> str | None:
        placed = self.placed.get(digest, ()) if self.placed else None
        return choose_group(digest, self._candidates(), placed, refused_by)

    def _candidates(self) -> list[Group]:
        """Groups with a link that is open now."""
        return [self._known[n] for n, link in self._links.items() if link.is_alive and n in self._known]

    def _send(self, group: str, message: Message) -> None:
        link = self._links.get(group)
        if link is not None:
            link.send(message)
