"""A hundred thousand adapters on two hundred groups: how long one core takes to plan where they are.

Heat is Zipf's, sizes and speeds are drawn, the planned bytes hold about two thirds of what there is. Four plans are
made, each after the one before: of an empty fleet, after every heat has swung by a tenth, after a thousand cold
adapters became hot, and after a group died. CPU seconds of this process count, so that a neighbour does not; wall
seconds are printed beside them. Each plan is checked for what no plan may do.
"""

import argparse
import gc
import hashlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from harness import report

from infinilora.coordinator.heat import copies
from infinilora.coordinator.placement import Adapter, Group, Plan, Table, by_group, copies_of, place
from infinilora.protocol.ids import Digest

PLAN_S = 2.0
HOT_RPS = 2.0
FILL = 0.9
RPS_A_GROUP = 20.0
MB = 1_000_000


class Situation(NamedTuple):
    """What one plan is made from."""

    name: str
    groups: list[Group]
    adapters: list[Adapter]


def fleet(num_adapters: int, num_groups: int, dice: random.Random) -> Situation:
    weights = [1 / (rank + 1) for rank in range(num_adapters)]
    total, total_rps = sum(weights), RPS_A_GROUP * num_groups
    adapters = [
        Adapter(
            Digest("sha256:" + hashlib.sha256(str(rank).encode()).hexdigest()),
            dice.choice((5, 10, 10, 20, 40)) * MB,
            total_rps * weight / total,
        )
        for rank, weight in enumerate(weights)
    ]
    needed = sum(adapter.num_bytes for adapter in adapters) * 2 / 3 / FILL
    groups = [
        Group(
            f"group-{number:03}",
            int(needed / num_groups * dice.uniform(0.7, 1.3)),
            speed=dice.choice((0.5, 1.0, 1.0, 2.0)),
            host=f"host-{number // 4:03}",
        )
        for number in range(num_groups)
    ]
    return Situation("empty fleet", groups, adapters)


def after(begin: Situation, dice: random.Random) -> list[Situation]:
    swung = [replace(a, rps=a.rps * dice.uniform(0.9, 1.1)) for a in begin.adapters]
    risen = set(dice.sample(range(len(swung) // 2, len(swung)), max(len(swung) // 100, 1)))
    changed = [replace(a, rps=dice.uniform(0.1, 5)) if i in risen else a for i, a in enumerate(swung)]
    fewer = [replace(begin.groups[0], state="dead"), *begin.groups[1:]]
    return [
        Situation("heat swung", begin.groups, swung),
        Situation("new hot ones", begin.groups, changed),
        Situation("a group died", fewer, changed),
    ]


def with_copies(adapters: list[Adapter], current: Table) -> list[Adapter]:
    had = copies_of(current)
    return [replace(a, copies=copies(a.rps, HOT_RPS, had.get(a.digest, 0))) for a in adapters]


def timed(make: Callable[[], Plan]) -> tuple[Plan, float, float]:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    plan = make()
    return plan, time.process_time() - cpu, time.perf_counter() - wall


def check(situation: Situation, table: Table) -> None:
    sizes = {adapter.digest: adapter.num_bytes for adapter in situation.adapters}
    room = {group.id: int(group.bytes_total * FILL) for group in situation.groups if group.state == "ready"}
    for group, held in table.items():
        if sum(sizes[digest] for digest in held) > room[group] or len(set(held)) != len(held):
            raise SystemExit(f"{situation.name}: {group} is overfull or holds an adapter twice")


def show(situation: Situation, plan: Plan, table: Table, before: Table, cpu_s: float, wall_s: float) -> None:
    total = sum(adapter.rps for adapter in situation.adapters)
    there = sum(adapter.rps for adapter in situation.adapters if plan[adapter.digest].groups)
    speed = sum(group.speed for group in situation.groups if group.state == "ready")
    load = dict.fromkeys(table, 0.0)
    for adapter in situation.adapters:
        for group in plan[adapter.digest].groups:
            load[group] += adapter.rps / len(plan[adapter.digest].groups)
    busiest = max(load[g.id] / (there * g.speed / speed) for g in situation.groups if g.id in load)
    new = sum(len(set(held) - set(before.get(group, ()))) for group, held in table.items())
    print(
        f"{situation.name:13} {cpu_s:5.2f} s CPU, {wall_s:5.2f} s wall; {100 * there / total:6.2f}% of requests have a"
        f" place, busiest group {busiest:4.2f} of its share, {new:6} copies to load of {sum(map(len, table.values()))}"
    )


def run_once(num_adapters: int, num_groups: int, seed: int) -> list[float]:
    dice = random.Random(seed)
    begin = fleet(num_adapters, num_groups, dice)
    current: Table = {}
    spent: list[float] = []
    for situation in (begin, *after(begin, dice)):
        adapters = with_copies(situation.adapters, current)
        dice.shuffle(adapters)
        plan, cpu_s, wall_s = timed(partial(place, situation.groups, adapters, current, fill=FILL))
        table = by_group(plan, situation.groups)
        check(situation, table)
        show(situation, plan, table, current, cpu_s, wall_s)
        current, spent = table, [*spent, cpu_s]
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--n", type=int, default=3)
    options = parser.parse_args()
    rounds = [run_once(options.adapters, options.groups, seed) for seed in range(options.n)]
    worst = max(statistics.median(times) for times in zip(*rounds, strict=True))
    report(
        "bench-placement",
        worst,
        PLAN_S,
        met=worst <= PLAN_S,
        unit="CPU seconds of one core, median of the slowest of four situations; smaller is better",
        adapters=options.adapters,
        groups=options.groups,
        n=options.n,
        each_s=[[round(s, 2) for s in times] for times in rounds],
    )


if __name__ == "__main__":
    main()
