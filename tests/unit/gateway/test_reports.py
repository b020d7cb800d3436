"""What a gateway says of its traffic, and what it does with advice."""

import pytest

from infinilora.gateway.answer import Pace
from infinilora.gateway.plan import Target
from infinilora.gateway.reports import MOST_ADAPTERS, Advised, Reports
from infinilora.protocol.errors import Overloaded
from infinilora.protocol.ids import Fingerprint, SloClass, digest_of
from infinilora.protocol.traffic import ADVICE_S, Advice
from infinilora.runtime.memory import MemoryBus

BASE, OTHER = Fingerprint(digest_of(b"base")), Fingerprint(digest_of(b"other"))
A, B = digest_of(b"a"), digest_of(b"b")
TO_BASE, TO_A = Target(requested="m", base=BASE), Target(requested="a", base=BASE, digest=A)


def reports() -> Reports:
    return Reports(MemoryBus(), gateway="g", incarnation="i")


def test_arrivals_are_counted_since_the_start_and_adapters_since_the_report_before() -> None:
    made = reports()
    for target in (TO_BASE, TO_A, TO_A):
        made.arrived(target)
    first = made.report()
    made.arrived(TO_BASE)
    second = made.report()
    assert (first.arrivals, first.by_adapter) == ({BASE: 3}, {A: 2})
    assert (second.arrivals, second.by_adapter) == ({BASE: 4}, {})


def test_times_are_those_from_receipt_to_first_token_and_between_tokens() -> None:
    made = reports()
    paces = [Pace(first_s=10.5, last_s=11.5, num_tokens=11), Pace(first_s=10.2, last_s=10.2, num_tokens=1)]
    made.ended(TO_A, "interactive", paces, started_s=10.0)
    tallies = {tally.digest: tally for tally in made.report().tallies}
    assert set(tallies) == {None, A}
    for tally in tallies.values():
        assert (tally.base, tally.slo_class) == (BASE, "interactive")
        assert (tally.ttft.count, tally.tpot.count) == (1, 1)
        assert tally.ttft.quantile(0.5) == pytest.approx(0.2, rel=0.02)
        assert tally.tpot.quantile(0.5) == pytest.approx(0.1, rel=0.02)
    assert not made.report().tallies


def test_what_failed_before_its_first_token_is_later_than_any_objective() -> None:
    made = reports()
    made.failed(TO_A, "standard")
    tallies = {tally.digest: tally for tally in made.report().tallies}
    assert set(tallies) == {None, A}
    for tally in tallies.values():
        assert (tally.slo_class, tally.ttft.count, tally.ttft.within(1000.0), tally.tpot.count) == ("standard", 1, 0, 0)


def test_a_report_has_the_busiest_adapters_and_every_class() -> None:
    made = reports()
    pace = [Pace(first_s=1.0, last_s=1.0, num_tokens=1)]
    for number in range(MOST_ADAPTERS + 10):
        target = Target(requested="a", base=BASE, digest=digest_of(str(number).encode()))
        for _ in range(2 if number == MOST_ADAPTERS + 9 else 1):
            made.arrived(target)
            made.ended(target, "standard", pace, 0.0)
    report = made.report()
    busiest = digest_of(str(MOST_ADAPTERS + 9).encode())
    assert len(report.by_adapter) == MOST_ADAPTERS
    assert report.by_adapter[busiest] == 2
    assert len(report.tallies) == 1 + MOST_ADAPTERS
    assert report.tallies[0].ttft.count == MOST_ADAPTERS + 11
    assert report.tallies[1].digest == busiest


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def advised(advice: Advice | None) -> tuple[Advised, Clock]:
    clock = Clock()
    made = Advised(MemoryBus(), clock=clock)
    if advice:
        made.hear(advice)
    return made, clock


@pytest.mark.parametrize(
    ("asked", "target", "wanted"),
    [
        ("batch", TO_A, "standard"),
        ("standard", TO_A, "interactive"),
        ("interactive", TO_A, "interactive"),
        ("standard", TO_BASE, "standard"),
        ("standard", Target(requested="b", base=BASE, digest=B), "standard"),
    ],
)
def test_an_adapter_in_a_hurry_goes_one_class_up(asked: SloClass, target: Target, wanted: SloClass) -> None:
    made, _ = advised(Advice(epoch=1, hurried=(A,)))
    assert made.slo_class(asked, target) == wanted


def test_batch_requests_of_a_base_at_its_limit_are_to_come_later() -> None:
    made, _ = advised(Advice(epoch=1, shed=(BASE,)))
    with pytest.raises(Overloaded, match="batch requests are to come later") as refused:
        made.slo_class("batch", TO_BASE)
    assert refused.value.retry_after_s == ADVICE_S
    assert made.slo_class("standard", TO_BASE) == "standard"
    assert made.slo_class("batch", Target(requested="o", base=OTHER)) == "batch"


def test_advice_that_is_not_renewed_ends() -> None:
    made, clock = advised(Advice(epoch=1, shed=(BASE,)))
    clock.now = ADVICE_S + 0.1
    assert made.slo_class("batch", TO_BASE) == "batch"


def test_advice_of_an_earlier_leader_is_not_taken() -> None:
    made, _ = advised(Advice(epoch=2))
    made.hear(Advice(epoch=1, shed=(BASE,)))
    assert made.slo_class("batch", TO_BASE) == "batch"
