"""What is said of a missed SLO, by which coordinator, and what is shown of it."""

from prometheus_client import CollectorRegistry

from infinilora.coordinator.alerts import SloControl
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.slo import Alarms, Objective, Window
from infinilora.coordinator.traffic import Watched
from infinilora.protocol import subjects
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.traffic import SloAlert, Tally
from infinilora.runtime.members import Members
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.metrics import CoordinatorMetrics, new_registry

BASE, OTHER = Fingerprint(digest_of(b"base")), Fingerprint(digest_of(b"other"))
OBJECTIVE = Objective(ttft_s={"interactive": 0.25}, tpot_s=0.1, target=0.9)
ATTAINED = {"slo_class": "interactive", "metric": "ttft"}


class Coordinator:
    """One that hears of requests, and leads or stands by."""

    def __init__(self, name: str, bus: MemoryBus, store: MemoryStore) -> None:
        self.leadership = Leadership(store, f"{name}/x", lease_s=60)
        self.watched = Watched(bus, Members(bus), lead_s=60, season_s=86_400)
        self.registry: CollectorRegistry = new_registry()
        self.control = SloControl(
            bus=bus,
            leadership=self.leadership,
            watched=self.watched,
            objective=OBJECTIVE,
            alarms=Alarms(),
            can_grow=lambda _: True,
            metrics=CoordinatorMetrics(self.registry),
        )

    def hear(self, base: Fingerprint, *, good: int = 0, bad: int = 0) -> None:
        tally = Tally(base, "interactive")
        for seconds in [0.05] * good + [5.0] * bad:
            tally.ttft.add(seconds)
        self.watched.window.add([tally])

    def attained(self) -> float | None:
        return self.registry.get_sample_value("infinilora_slo_attainment", ATTAINED)


async def test_the_leader_alone_says_it_and_a_new_one_says_again_what_lasts() -> None:
    bus, store = MemoryBus(), MemoryStore()
    alerts = bus.subscribe(subjects.SLO_ALERTS, SloAlert)
    first, second = (Coordinator(name, bus, store) for name in ("c1", "c2"))

    def said() -> list[tuple[int, bool]]:
        return [(alert.epoch, alert.is_firing) for alert in alerts.pop_all()]

    for one in (first, second):
        await one.leadership.step()
        one.hear(BASE, bad=40)
        await one.control.round()
    await first.control.round()
    assert said() == [(1, True)]
    await first.leadership.resign()
    await second.leadership.step()
    for _ in range(2):
        await second.control.round()
    assert said() == [(2, True)]
    second.watched.window = Window(2, 1)
    await second.control.round()
    assert said() == [(2, False)]


async def test_what_is_shown_is_of_the_worst_base_and_of_what_is_asked_for() -> None:
    one = Coordinator("c1", MemoryBus(), MemoryStore())
    one.hear(BASE, good=3, bad=1)
    one.hear(OTHER, good=4)
    await one.control.round()
    assert one.attained() == 0.75
    shown = [(a["base"], a["metric"], a["attainment"], a["budget_left"]) for a in one.control.show() if a["requests"]]
    assert shown == [(BASE, "ttft", 0.75, -1.5), (OTHER, "ttft", 1.0, 1.0)], "a tenth may be late"
    one.watched.window = Window(2, 1)
    await one.control.round()
    assert one.attained() is None
