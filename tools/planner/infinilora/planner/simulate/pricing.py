"""The costs of steps in one fleet: who computes which deltas, and how busy that keeps the groups."""

from collections.abc import Callable, Mapping

from infinilora.planner.simulate.costs import Costs, wait_s
from infinilora.planner.simulate.engine import Work
from infinilora.protocol.ids import Digest

OWN = ""
"""The engine's own pool, where a group is asked for."""


class Pricing:
    """Prices steps. `homes_of(engine)`: the group that computes a digest's deltas; who is not there has OWN."""

    def __init__(
        self, costs: Costs, sizes: Mapping[Digest, int], homes_of: Callable[[str], Mapping[Digest, str]]
    ) -> None:
        self._costs, self._sizes, self._homes_of = costs, sizes, homes_of
        self._busy: dict[str, dict[str, float]] = {}

    def context_s(self) -> float:
        return self._costs.base.context_s.value

    def is_over(self, engine: str) -> None:
        for busy in self._busy.values():
            busy.pop(engine, None)

    def step_s(self, engine: str, work: Work) -> float:
        base_s = self._costs.base.step_s(work.rows, work.tokens, work.context, is_joined=work.is_joined)
        if not work.digests:
            self.is_over(engine)
            return base_s
        local_s, remote_s, services = 0.0, 0.0, dict[str, float]()
        for group, (rows, distinct, num_bytes) in self._shares(engine, work.digests).items():
            read = self._costs.read_bytes(rows, num_bytes, distinct)
            if group == OWN:
                local_s = self._costs.local.step_s(rows, read, is_joined=work.is_joined)
                continue
            service_s = services[group] = self._costs.service.step_s(rows, read, is_joined=work.is_joined)
            waited_s = wait_s(service_s, self._others(group, engine))
            remote_s = max(remote_s, self._costs.remote.step_s(rows, read, is_joined=work.is_joined) + waited_s)
        seconds = base_s + local_s + max(0.0, remote_s - self._costs.hidden.value * base_s)
        self.is_over(engine)
        for group, service_s in services.items():
            self._busy.setdefault(group, {})[engine] = service_s / seconds
        return seconds

    def _others(self, group: str, engine: str) -> float:
        busy = self._busy.get(group, {})
        return sum(busy.values()) - busy.get(engine, 0.0)

    def _shares(self, engine: str, digests: Mapping[Digest, int]) -> dict[str, tuple[int, int, int]]:
        """For each group its rows, adapters and bytes."""
        homes, sizes = self._homes_of(engine), self._sizes
        by_group: dict[str, list[Digest]] = {}
        for digest in digests:
            by_group.setdefault(homes.get(digest, OWN), []).append(digest)
        return {
            group: (sum([digests[d] for d in found]), len(found), sum([sizes[d] for d in found]))
            for group, found in by_group.items()
        }
