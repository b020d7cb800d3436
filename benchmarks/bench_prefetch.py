"""make bench-prefetch: cold starts that staging by yesterday's clock avoids, on made days of a full pool.

The coordinator's own policies (heat, placement, hints, prefetch) and the pool's own slot table, minute by minute in
virtual time, twice over the same requests: with the calendar, and without. A pool has room for a tenth of the
adapters. Of these

    timers    come once a day, at a minute of their own give or take four, and then some times within ten minutes
    office    come now and then in two hours of the day
    any       come at random, some a hundred times as often as others

The first day is not counted. The value is the share of cold starts (requests whose adapter is not resident) that the
calendar avoids; what one costs on a machine is bench-cold's. Nothing in it is timed.
"""

import random
from collections import Counter
from collections.abc import Iterator

from harness import median, report

from infinilora.coordinator.heat import Heat
from infinilora.coordinator.hints import Hint, hints, over
from infinilora.coordinator.placement import Adapter, Group, Table, by_group, place
from infinilora.coordinator.prefetch import Calendar, Prefetched, Room, prefetch
from infinilora.pool.slots import SlotTable
from infinilora.pool.tenancy import Drain, Place, SlotState
from infinilora.protocol.ids import Digest, digest_of

ADAPTERS, ROOM, MB = 600, 60, 10**6
MINUTES, DAYS, ROUND, LEAD = 1440, 3, 2, 2
"""Of a day; rounds of the coordinator are so many minutes apart, and it looks two ahead, as by default."""
HALF_LIVES_S = (10, 60, 600)
FORGOTTEN = 1e-3
"""Of a request: less heat than that is none, as in the store."""
SEEDS, TARGET = range(3), 0.1
GROUP, DAY_S, FILL, BYTES_PER_S = "g1", 86_400.0, 0.9, 100e6
SIZE = 10 * MB

Day = dict[int, list[Digest]]
"""Minute -> who is asked for, in order."""


def main() -> None:
    runs = [compared(random.Random(seed)) for seed in SEEDS]
    for kind in ("timers", "office", "any"):
        without, with_calendar = (median([float(run[is_on].cold[kind]) for run in runs]) for is_on in (False, True))
        a_day = [cold / (DAYS - 1) for cold in (without, with_calendar)]
        print(f"{kind:7} cold starts a day: {a_day[0]:.0f}, with the calendar {a_day[1]:.0f}")
    avoided = [1 - run[True].cold.total() / run[False].cold.total() for run in runs]
    outcomes = Counter[str]()
    for run in runs:
        outcomes.update(run[True].outcomes)
    report(
        "bench-prefetch",
        median(avoided),
        TARGET,
        unit="share of cold starts that the calendar avoids, a full pool",
        of_each_seed=[round(share, 3) for share in avoided],
        cold_starts_a_day={kind: [runs[0][on].cold[kind] / (DAYS - 1) for on in (False, True)] for kind in KINDS},
        staged_over_without=round(median([run[True].staged / run[False].staged for run in runs]), 3),
        outcomes=outcomes,
        requests=runs[0][True].requests,
        n=len(SEEDS),
    )


KINDS = ("timers", "office", "any")


def kind_of(number: int) -> str:
    return KINDS[(0, 0, 1, 2, 2)[number % 5]]


DIGESTS = [digest_of(f"adapter {number}".encode()) for number in range(ADAPTERS)]
KIND = {digest: kind_of(number) for number, digest in enumerate(DIGESTS)}


def made_days(dice: random.Random) -> list[Day]:
    habits = {digest: (dice.randrange(MINUTES), 0.3 * 100 ** dice.random()) for digest in DIGESTS}
    return [one_day(dice, habits) for _ in range(DAYS)]


def one_day(dice: random.Random, habits: dict[Digest, tuple[int, float]]) -> Day:
    day: Day = {}
    for digest, (minute, times) in habits.items():
        for came in minutes_of(dice, KIND[digest], minute, times):
            day.setdefault(int(came) % MINUTES, []).append(digest)
    for asked in day.values():
        dice.shuffle(asked)
    return day


def minutes_of(dice: random.Random, kind: str, minute: int, times: float) -> Iterator[float]:
    match kind:
        case "timers":
            begin = minute + dice.uniform(-4, 4)
            yield begin
            yield from (begin + dice.uniform(0, 10) for _ in range(dice.randrange(6)))
        case "office":
            yield from (minute + dice.uniform(0, 120) for _ in range(dice.randrange(1, 8)))
        case _:
            yield from (dice.uniform(0, MINUTES) for _ in range(int(times + dice.random())))


class Played:
    """One pool and its coordinator through all days."""

    def __init__(self, *, has_calendar: bool) -> None:
        self.cold = Counter[str]()
        self.outcomes = Counter[str]()
        self.staged = self.requests = 0
        self._has_calendar = has_calendar
        self._pool = SlotTable(num_slots=ADAPTERS, capacity_bytes=ROOM * SIZE)
        self._calendar = Calendar(DAY_S)
        self._prefetched = Prefetched()
        self._heat: dict[int, dict[Digest, float]] = {half_life_s: {} for half_life_s in HALF_LIVES_S}
        self._told: Table = {}

    def play(self, days: list[Day]) -> "Played":
        for number in range(DAYS * MINUTES):
            day, minute = divmod(number, MINUTES)
            now = 60.0 * number
            for view, half_life_s in ((self._heat[h], h) for h in HALF_LIVES_S):
                faded = ((digest, level * 0.5 ** (60 / half_life_s)) for digest, level in view.items())
                self._heat[half_life_s] = {digest: level for digest, level in faded if level > FORGOTTEN}
            for digest in days[day].get(minute, ()):
                self._ask(digest, now, is_counted=day > 0)
            self._calendar.note(Counter(days[day].get(minute, ())), now)
            if number % ROUND == 0:
                self._round(now, is_counted=day > 0)
        return self

    def _ask(self, digest: Digest, now: float, *, is_counted: bool) -> None:
        for view in self._heat.values():
            view[digest] = view.get(digest, 0.0) + 1.0
        self.requests += is_counted
        if self._pool.lease("engine", digest, now) is None:
            self.cold[KIND[digest]] += is_counted
            self._load(digest, now, is_counted=is_counted)
        self._pool.release("engine", digest, now)

    def _round(self, now: float, *, is_counted: bool) -> None:
        heat = Heat({h: self._rates(h) for h in HALF_LIVES_S})
        expected = self._calendar.expected(now, 60.0 * LEAD) if self._has_calendar else {}
        rates = {**expected, **heat.to_plan_with()}
        adapters = [Adapter(digest, SIZE, rps=rates.get(digest, 0.0)) for digest in DIGESTS]
        groups = [Group(GROUP, ROOM * SIZE)]
        self._told = by_group(place(groups, adapters, self._told, fill=FILL), groups)
        resident = {GROUP: frozenset(self._pool.resident())}
        sizes = dict.fromkeys(DIGESTS, SIZE)
        asked_for = heat.asked_for()
        wanted = hints(self._told, resident, {digest: rates[digest] for digest in asked_for}, set(DIGESTS))
        new = {digest: rps for digest, rps in expected.items() if digest not in asked_for}
        rooms = {GROUP: Room(self._pool.free_bytes, self._pool.capacity_bytes)}
        under_way = {(hint.group, hint.digest) for hint in wanted}
        early = prefetch(new, self._told, resident, rooms, sizes, under_way, BYTES_PER_S, rates)
        seen = self._prefetched.look(resident, asked_for, set())
        self.outcomes.update(seen if is_counted else {})
        for hint in wanted + early:
            self._stage(hint, over(GROUP, hint.digest, self._told, resident, rates), now, is_counted=is_counted)
        self._prefetched.begun({(hint.group, hint.digest) for hint in early})
        self._prefetched.look({GROUP: frozenset(self._pool.resident())}, frozenset(), set())

    def _rates(self, half_life_s: int) -> dict[Digest, float]:
        rates = {digest: level * 0.693 / half_life_s for digest, level in self._heat[half_life_s].items()}
        return dict(sorted(rates.items(), key=lambda pair: (-pair[1], pair[0])))

    def _stage(self, hint: Hint, beyond: tuple[Digest, ...], now: float, *, is_counted: bool) -> None:
        for earlier in beyond:
            self._pool.unhint(earlier)
        self._pool.stage(hint.digest)
        self._load(hint.digest, now, is_counted=is_counted)

    def _load(self, digest: Digest, now: float, *, is_counted: bool) -> None:
        """At once: what is asked is who is there, not how long it takes."""
        self._pool.sized(digest, num_bytes=SIZE, num_layers=1, now=now)
        while decision := self._pool.decide(now):
            match decision:
                case Drain(slot=index, slot_generation=generation):
                    self._pool.emptied(index, generation)
                case Place(digest=placed):
                    self._pool.place(placed, now)
                case _:
                    self._pool.refuse(decision.digest)
        slot = self._pool.slot_of(digest)
        if slot and slot.state is SlotState.STAGING:
            self.staged += is_counted
            self._pool.layers_ready(slot.index, slot.slot_generation, 1, now)


def compared(dice: random.Random) -> dict[bool, Played]:
    days = made_days(dice)
    return {is_on: Played(has_calendar=is_on).play(days) for is_on in (False, True)}


if __name__ == "__main__":
    main()
