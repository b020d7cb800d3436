"""Attainment, budgets and alerts, by table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.slo import MIN_REQUESTS, Alarms, Attainment, Judged, Objective, Subject, Window, judge
from infinilora.protocol.ids import Digest, Fingerprint, SloClass, digest_of
from infinilora.protocol.traffic import Tally, merged

BASE, OTHER = Fingerprint(digest_of(b"base")), Fingerprint(digest_of(b"other"))
A = digest_of(b"a")
OBJECTIVE = Objective(ttft_s={"interactive": 0.25, "standard": 2.0}, tpot_s=0.1, target=0.9)
FIRST = Subject(BASE, "interactive", None, "ttft")


def tally(slo_class: SloClass, good: int, bad: int) -> Tally:
    made = Tally(BASE, slo_class)
    for seconds, count in ((0.05, good), (5.0, bad)):
        for _ in range(count):
            made.ttft.add(seconds)
    return made


def judged(long: float, short: float, requests: int = 100) -> Judged:
    return Judged(FIRST, Attainment(1000, 0.0, long), Attainment(requests, 0.0, short))


def test_what_is_missed_burns_the_budget_that_the_target_leaves() -> None:
    window = Window(3, 1)
    window.add([tally("interactive", 8, 2)])
    found = {one.subject: one for one in judge(window, OBJECTIVE)}
    assert found[FIRST].long.requests == 10
    assert found[FIRST].long.share == pytest.approx(0.8)
    assert found[FIRST].long.burn_rate == pytest.approx(2.0)


def test_whoever_gives_up_after_what_was_promised_has_missed_it_and_whoever_leaves_sooner_has_not() -> None:
    window, made = Window(3, 1), tally("interactive", 3, 0)
    for waited_s in (0.1, 0.1, 4.0):
        made.left.add(waited_s)
    window.add([made])
    found = {one.subject: one for one in judge(window, OBJECTIVE)}
    assert found[FIRST].long[:2] == (4, 0.75)
    assert found[FIRST._replace(metric="tpot")].long.requests == 0


def test_a_class_without_an_objective_is_not_judged() -> None:
    window = Window(3, 1)
    window.add([tally("batch", 0, 9)])
    assert not list(judge(window, OBJECTIVE))


def test_what_is_older_than_the_window_is_forgotten() -> None:
    window = Window(2, 1)
    window.add([tally("standard", 0, 5)])
    window.turn()
    window.add([tally("standard", 5, 0)])
    (one,) = [one for one in judge(window, OBJECTIVE) if one.subject.metric == "ttft"]
    assert (one.long.share, one.short.share) == (0.5, 1.0)
    window.turn()
    (one,) = [one for one in judge(window, OBJECTIVE) if one.subject.metric == "ttft"]
    assert (one.long.share, one.short.requests) == (1.0, 0)
    window.turn()
    assert not list(judge(window, OBJECTIVE))


SPANS = st.lists(st.lists(st.tuples(st.sampled_from((None, A)), st.floats(1e-3, 1e2)), max_size=4), max_size=9)


@given(SPANS, st.integers(1, 3), st.integers(1, 3))
def test_what_a_window_holds_is_the_sum_of_its_spans(
    spans: list[list[tuple[Digest | None, float]]], short: int, more: int
) -> None:
    window, parts = Window(short + more, short), list[list[Tally]]()
    for span in spans:
        parts.append([timed(digest, seconds) for digest, seconds in span])
        window.turn()
        for one in parts[-1]:
            window.add([one])
        assert window.long == merged(one for part in parts[-(short + more) :] for one in part)
        assert window.short == merged(one for part in parts[-short:] for one in part)


def timed(digest: Digest | None, seconds: float) -> Tally:
    made = Tally(BASE, "standard", digest)
    (made.left if seconds > 1 else made.ttft).add(seconds)
    if digest is not None:
        made.tpot.add(seconds / 10)
    return made


@pytest.mark.parametrize(
    ("one", "begins"),
    [
        (judged(2.0, 2.0), True),
        (judged(1.9, 9.0), False),  # a hiccup
        (judged(9.0, 1.9), False),  # over already
        (judged(9.0, 9.0, requests=MIN_REQUESTS - 1), False),  # too few to say
    ],
)
def test_an_alert_begins_when_both_windows_burn(one: Judged, *, begins: bool) -> None:
    assert bool(Alarms().look([one])) == begins


def test_an_alert_lasts_until_the_short_window_keeps_the_budget() -> None:
    alarms = Alarms()
    looks = (judged(3, 3), judged(3, 1.5), judged(3, 3), judged(3, 1.0), judged(3, 1.0))
    said = [[begins for _, begins in alarms.look([one])] for one in looks]
    assert said == [[True], [], [], [False], []]


def test_an_alert_of_what_is_not_asked_for_any_more_ends() -> None:
    alarms = Alarms()
    alarms.look([judged(3, 3)])
    assert [begins for _, begins in alarms.look([])] == [False]
    assert not alarms.firing


def test_first_tokens_of_a_whole_class_call_for_engines_and_nothing_else_does() -> None:
    alarms = Alarms()
    alarms.look(
        [
            judged(3, 3)._replace(subject=FIRST._replace(digest=A)),
            judged(3, 3)._replace(subject=FIRST._replace(metric="tpot")),
        ]
    )
    assert not alarms.misses_first_tokens(BASE)
    alarms.look([judged(3, 3)])
    assert alarms.misses_first_tokens(BASE)
    assert not alarms.misses_first_tokens(OTHER)
