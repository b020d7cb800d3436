"""Gateways in virtual time: the gateway's own filter, scores and pick, over heartbeats and what each has in flight."""

from collections import Counter
from collections.abc import Callable, Mapping

from infinilora.gateway.prefixes import Chain, PrefixMemory, chain_of
from infinilora.gateway.scores import EngineView, Wanted, pick
from infinilora.planner.simulate.engine import SimEngine
from infinilora.planner.simulate.fleet import Routing
from infinilora.protocol.ids import Digest, Fingerprint

BASE = Fingerprint("simulated")
NOTHING: frozenset[Digest] = frozenset()


class Beat:
    """An engine as its last heartbeat told it."""

    def __init__(self) -> None:
        self.is_alive, self.running, self.waiting, self.kv_free, self.digests = True, 0, 0, 1.0, NOTHING

    def take(self, engine: SimEngine, digests: frozenset[Digest]) -> None:
        self.running, self.waiting, self.kv_free, self.digests = engine.running, engine.waiting, engine.kv_free, digests


class SimGateway:
    """One gateway. `homes(digest)`: the engines that may have it, empty for all."""

    def __init__(self, routing: Routing, beats: Mapping[str, Beat], homes: Callable[[Digest], frozenset[str]]) -> None:
        self.in_flight: Counter[str] = Counter()
        self._routing, self._beats, self._homes = routing, beats, homes
        self._memory = PrefixMemory()
        self._chains: dict[Digest, Chain] = {}

    def route(self, digest: Digest | None) -> str | None:
        """Which engine takes it; None: there is none now."""
        chosen = pick(self._views(), self._wanted(digest))
        if chosen is None:
            return None
        self.in_flight[chosen.key] += 1
        if digest is not None and self._routing == "warm":
            self._memory.note(self._chains[digest], chosen.key)
        return chosen.key

    def ended(self, engine: str) -> None:
        self.in_flight[engine] -= 1

    def _views(self) -> list[EngineView]:
        knows = self._routing == "warm"
        return [
            EngineView(
                key,
                BASE,
                beat.is_alive,
                is_draining=False,
                is_suspect=False,
                is_open=False,
                running=beat.running,
                waiting=beat.waiting,
                in_flight=self.in_flight[key],
                kv_free=beat.kv_free,
                digests=beat.digests if knows else NOTHING,
            )
            for key, beat in self._beats.items()
        ]

    def _wanted(self, digest: Digest | None) -> Wanted:
        if digest is None or self._routing == "load":
            return Wanted(BASE, digest)
        if self._routing == "home":
            homes = frozenset(key for key in self._homes(digest) if self._beats[key].is_alive)
            return Wanted(BASE, digest, avoid=self._beats.keys() - homes if homes else ())
        chain = self._chains.get(digest)
        if chain is None:
            chain = self._chains[digest] = chain_of(digest, ())
        return Wanted(BASE, digest, self._memory.matches(chain))
