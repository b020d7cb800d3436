"""A pool of slots, request by request on virtual time: what a formula about it must agree with.

Shares no code with the provisioning model. Requests arrive as a Poisson process, choose an adapter, and hold its slot
until they are done; an adapter keeps its slot as long as one of its requests runs. Who finds no slot waits.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass
class Gate:
    """`bypass`: a waiting request delays nobody whose adapter has a slot or finds one; else strictly in order."""

    slots: int
    bypass: bool
    running: Counter[int] = field(default_factory=Counter)
    waiting: deque[tuple[int, float]] = field(default_factory=deque)

    def admit(self) -> list[tuple[int, float]]:
        """Take from the queue what fits now, in order; without bypass, only up to the first that does not."""
        admitted, left = [], deque[tuple[int, float]]()
        used = sum(1 for count in self.running.values() if count)
        while self.waiting:
            adapter, length = self.waiting.popleft()
            if self.running[adapter] or used < self.slots:
                used += not self.running[adapter]
                self.running[adapter] += 1
                admitted.append((adapter, length))
                continue
            left.append((adapter, length))
            if not self.bypass:
                break
        self.waiting = left + self.waiting
        return admitted


def share_admitted_at_once(
    weights: Sequence[float], *, in_flight: float, slots: int, bypass: bool, seed: int, num_requests: int
) -> float:
    """Of the later requests (a fifth is for warming up). Residences are exponential, one second on average."""
    dice = random.Random(seed)
    gate = Gate(slots, bypass)
    bounds, adapters = list(accumulate(weights)), range(len(weights))
    ends: list[tuple[float, int]] = []
    now, at_once, counted = 0.0, 0, 0
    for number in range(num_requests):
        now += dice.expovariate(in_flight)
        while ends and ends[0][0] <= now:
            end, adapter = heapq.heappop(ends)
            gate.running[adapter] -= 1
            if not gate.running[adapter]:
                for woken, length in gate.admit():
                    heapq.heappush(ends, (end + length, woken))
        (adapter,) = dice.choices(adapters, cum_weights=bounds)
        must_wait = not gate.bypass and len(gate.waiting) > 0
        gate.waiting.append((adapter, dice.expovariate(1.0)))
        admitted = [] if must_wait else gate.admit()
        for woken, length in admitted:
            heapq.heappush(ends, (now + length, woken))
        if number >= num_requests // 5:
            counted += 1
            at_once += bool(admitted)
    return at_once / counted


def share_with_room(
    weights: Sequence[float],
    sizes: Sequence[int],
    *,
    in_flight: float,
    capacity: int,
    residence: Callable[[random.Random], float],
    seed: int,
    num_requests: int,
) -> float:
    """The same without a gate: all are admitted, and it is counted who would have found room in `capacity`.

    `residence` draws seconds, one on average.
    """
    dice = random.Random(seed)
    bounds, adapters = list(accumulate(weights)), range(len(weights))
    running: Counter[int] = Counter()
    ends: list[tuple[float, int]] = []
    now, used, with_room = 0.0, 0, 0
    warm = num_requests // 5
    for number in range(num_requests):
        now += dice.expovariate(in_flight)
        while ends and ends[0][0] <= now:
            _, adapter = heapq.heappop(ends)
            running[adapter] -= 1
            used -= 0 if running[adapter] else sizes[adapter]
        (adapter,) = dice.choices(adapters, cum_weights=bounds)
        if number >= warm:
            with_room += running[adapter] > 0 or used + sizes[adapter] <= capacity
        used += 0 if running[adapter] else sizes[adapter]
        running[adapter] += 1
        heapq.heappush(ends, (now + residence(dice), adapter))
    return with_room / (num_requests - warm)
