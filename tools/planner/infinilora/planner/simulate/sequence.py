"""A sequence whose tokens are counted, not kept, and which decodes by a clock that all of an engine's share.

    num_known = known + (steps of the clock since it began to decode)        one misses: it is always the last

So a step that only decodes moves one number, however many sequences take part in it. The scheduler cannot tell.
"""

from typing_extensions import override

from infinilora.engine.sched.urgency import due_s
from infinilora.engine.sequence import Sequence
from infinilora.planner.simulate.load import Request
from infinilora.protocol.ids import Digest


class StepClock:
    """Steps of one engine that all its decoding sequences took part in, and what these are together.

    `num_decoding` of them, `digests` with how many decode with each, `num_known` tokens of them all.
    """

    __slots__ = ("_known", "digests", "num_decoding", "steps")

    def __init__(self) -> None:
        self.steps = self.num_decoding = self._known = 0
        self.digests: dict[Digest, int] = {}

    @property
    def num_known(self) -> int:
        return self._known + self.num_decoding * self.steps

    def join(self, digest: Digest | None, known: int) -> None:
        """A sequence of so many tokens decodes from now on."""
        self.num_decoding += 1
        self._known += known - self.steps
        if digest is not None:
            self.digests[digest] = self.digests.get(digest, 0) + 1

    def leave(self, digest: Digest | None, known: int) -> None:
        """One that has so many now decodes no more."""
        self.num_decoding -= 1
        self._known -= known - self.steps
        if digest is not None:
            self.digests[digest] -= 1
            if not self.digests[digest]:
                del self.digests[digest]


class CountedSequence(Sequence):
    """A request in an engine. `known`, `computed` hold while it does not decode by the clock."""

    __slots__ = ("_clock", "_computed", "_known", "_prefilled", "_since", "first_s", "request")

    def __init__(self, request: Request, digest: Digest | None, *, now: float, produced: int = 0) -> None:
        self._clock: StepClock | None = None
        self._since = self._computed = 0
        self._known = request.prompt + produced
        self._prefilled = request.prompt - 1 if request.is_prefilled and not produced else 0
        super().__init__(
            str(request.id),
            [],
            request.prompt,
            digest,
            due_s=due_s("standard", now, is_continued=produced > 0),
        )
        self.request = request
        self.first_s: float | None = None

    @property
    @override
    def num_known(self) -> int:
        return self._known if self._clock is None else self._known + self._clock.steps - self._since

    @property  # type: ignore[explicit-override]  # not seen where there is a setter
    @override
    def num_computed(self) -> int:
        """What came prefilled counts from the start; a preempted sequence computes it itself."""
        if self._clock is not None:
            return self._known + self._clock.steps - self._since - 1
        return max(self._computed, 0 if self.num_preemptions else self._prefilled)

    @num_computed.setter
    @override
    def num_computed(self, value: int) -> None:
        self.freeze()
        self._computed = value

    @property
    @override
    def num_missing(self) -> int:
        return 1 if self._clock is not None else self._known - self.num_computed

    @property
    @override
    def num_produced(self) -> int:
        return self.num_known - self.request.prompt

    @property
    @override
    def reads_prefix_cache(self) -> bool:
        """No two simulated prompts begin alike."""
        return False

    @property
    def num_left(self) -> int:
        """Tokens until it ends."""
        return self.request.output - self.num_produced

    @property
    def is_decoding(self) -> bool:
        return self._clock is not None

    def decode(self, clock: StepClock) -> None:
        """From now on each step of the clock is a token."""
        self._clock, self._since = clock, clock.steps
        clock.join(self.digest, self._known)

    def freeze(self) -> None:
        """Stop: what it has is written down."""
        if self._clock is not None:
            self._known = self.num_known
            self._clock.leave(self.digest, self._known)
            self._clock = None
            self._computed = self._known - 1

    def append(self) -> None:
        """One more token is known."""
        self._known += 1
