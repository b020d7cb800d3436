"""Which base model this group serves: from a fingerprint or a served name to its card.

A name is what an engine that beats now says it is; with no such engine, the one card of that name in the store. Both
may come later than this process: it waits.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

import msgspec

from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.control import Beat
from infinilora.protocol.errors import Conflict, Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime.blobs import BlobStore
from infinilora.runtime.members import Members

logger = logging.getLogger(__name__)

POLL_S, MAX_POLL_S = 0.1, 2.0
"""Between two looks: each may be a list of the store's objects, which somebody pays for."""
HEAR_ENGINES_S = 1.5
"""Three beats: an engine that lives has been heard by then, and knows better than the store."""


async def find_card(wanted: str, blobs: BlobStore, members: Members) -> BaseCard:
    """Wait for the card of `wanted`, however long it takes; say once what is missing."""
    started = time.monotonic()
    has_said = False
    while True:
        fingerprint = _fingerprint(wanted, engine_beats(members))
        waited_s = time.monotonic() - started
        may_guess = waited_s > HEAR_ENGINES_S
        try:
            if card := await asyncio.to_thread(_read, blobs, wanted, fingerprint, may_guess=may_guess):
                return card
            reason = "no engine of it beats and the store has no card that can be read, or several, of that name"
        except Unavailable as error:
            reason = error.message
        if may_guess and not has_said:
            logger.warning("waiting for the base model's card", extra={"base": wanted, "reason": reason})
            has_said = True
        await asyncio.sleep(pause_s(waited_s))


def pause_s(waited_s: float) -> float:
    """Until the next look: a tenth of the time that was waited already, within bounds."""
    return min(MAX_POLL_S, max(POLL_S, waited_s / 10))


async def watch_base(wanted: str, card: BaseCard, members: Members) -> None:
    """Raise Conflict once engines of this name beat with another fingerprint and none with ours: we are useless."""
    if wanted == card.fingerprint:
        return
    async for _ in members.changes():
        serving = {beat.base for beat in engine_beats(members) if beat.model == wanted and beat.base}
        if serving and card.fingerprint not in serving:
            raise Conflict(f"engines of {wanted!r} now serve base {sorted(serving)}; this group {card.fingerprint}")


def engine_beats(members: Members) -> list[Beat]:
    return [member.beat for member in members.alive("engine")]


def _fingerprint(wanted: str, beats: Iterable[Beat]) -> Fingerprint | None:
    if wanted.startswith("sha256:"):
        return Fingerprint(wanted)
    return next((beat.base for beat in beats if beat.model == wanted and beat.base), None)


def _read(blobs: BlobStore, wanted: str, fingerprint: Fingerprint | None, *, may_guess: bool) -> BaseCard | None:
    if fingerprint:
        return _card(blobs, keys.base_card(fingerprint))
    if not may_guess:
        return None
    names = [name for name in blobs.list("bases/") if name.endswith("/card.json")]
    cards = [card for card in (_card(blobs, name) for name in names) if card and card.name == wanted]
    return cards[0] if len(cards) == 1 else None


def _card(blobs: BlobStore, name: str) -> BaseCard | None:
    try:
        return msgspec.json.decode(blobs.get(name), type=BaseCard)
    except (FileNotFoundError, msgspec.DecodeError):
        return None  # `find_card` says what is missing; a broken card of another base is in nobody's way
