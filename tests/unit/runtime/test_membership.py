"""Who is alive, by table and by random histories. Time is counted in beats: the interval is 1."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.protocol.control import Beat, ProcessKind
from infinilora.runtime.membership import DEAD_BEATS, MAX_PAST, Change, Membership, health_after, of_kind


def beat(
    process_id: str = "e1", seq: int = 1, *, life: str = "a", kind: ProcessKind = "engine", state: str = "ready"
) -> Beat:
    return Beat(kind=kind, id=process_id, incarnation=life, seq=seq, state=state)  # type: ignore[arg-type]


def told(changes: list[Change]) -> list[tuple[str, str]]:
    return [(change.kind, change.member.beat.id) for change in changes]


def keep_up(view: Membership, ids: list[str], start: float, end: float, seq: int) -> list[Change]:
    """Every id beats each interval from start to end; the observer sweeps twice an interval."""
    changes, now = [], start
    while now <= end:
        for process_id in ids:
            changes += view.hear(beat(process_id, seq := seq + 1), now)
        changes += view.sweep(now)
        changes += view.sweep(now + 0.5)
        now += 1
    return changes


@pytest.mark.parametrize(
    ("silent", "health"), [(0, "alive"), (1.4, "alive"), (1.5, "suspect"), (2.9, "suspect"), (3, "dead"), (99, "dead")]
)
def test_silence_means_suspicion_then_death(silent: float, health: str) -> None:
    assert health_after(silent * 0.5, 0.5) == health


def test_a_member_joins_falls_silent_and_dies_in_three_beats() -> None:
    view = Membership(1.0)
    keep_up(view, ["e1", "e2", "e3"], 10, 20, 0)
    changes = []
    now, seq = 21.0, 1000
    while now < 24:
        for process_id in ("e2", "e3"):
            view.hear(beat(process_id, seq := seq + 1), now)
        changes += [(kind, now) for kind, _ in told(view.sweep(now))]
        now += 0.5
    assert changes == [("suspect", 21.5), ("dead", 23.0)]


def test_a_process_that_dies_for_ever_does_not_fill_the_memory() -> None:
    view = Membership(1.0)
    for life in range(1000):
        view.hear(beat(life=str(life)), life)
    (member,) = view.members()
    assert len(member.past) == MAX_PAST
    assert view.hear(beat(life="998", seq=9), 1000) == []


def test_a_late_beat_clears_suspicion() -> None:
    view = Membership(1.0)
    view.hear(beat(seq=1), 10)
    view.hear(beat("e2", seq=1), 10)
    view.hear(beat("e2", seq=2), 11.6)
    assert told(view.sweep(11.7)) == [("suspect", "e1")]
    assert told(view.hear(beat(seq=2), 11.8)) == [("alive", "e1")]
    assert view.sweep(12.0) == []


def test_a_new_life_replaces_the_old_whose_late_beats_are_ignored() -> None:
    view = Membership(1.0)
    view.hear(beat(seq=50, life="old"), 10)
    assert told(view.hear(beat(seq=1, life="new"), 10.1)) == [("replaced", "e1")]
    assert view.hear(beat(seq=51, life="old"), 10.2) == []
    member = view.get("engine", "e1")
    assert member is not None
    assert member.beat.incarnation == "new"


def test_a_beat_of_the_past_changes_nothing() -> None:
    view = Membership(1.0)
    view.hear(beat(seq=5, state="draining"), 10)
    assert view.hear(beat(seq=4), 11) == []
    member = view.get("engine", "e1")
    assert member is not None
    assert (member.beat.state, member.heard_at) == ("draining", 10)


def test_a_change_of_state_is_told_and_a_change_of_load_is_not() -> None:
    view = Membership(1.0)
    view.hear(beat(seq=1, state="starting"), 10)
    assert told(view.hear(beat(seq=2), 10.5)) == [("updated", "e1")]
    assert view.hear(beat(seq=3), 11) == []


def test_nobody_dies_while_the_bus_is_away_or_two_intervals_after() -> None:
    view = Membership(1.0)
    keep_up(view, ["e1", "e2"], 10, 20, 0)
    view.bus_went()
    swept = [change for now in range(21, 60) for change in view.sweep(now)]
    view.bus_proved(60.0)
    swept += view.sweep(60.5) + view.sweep(61.9)
    assert swept == []
    view.hear(beat("e1", 900), 61.95)
    assert told(view.sweep(62.1)) == [("dead", "e2")]


def test_silence_of_most_at_once_is_our_own_until_the_bus_is_proved() -> None:
    view = Membership(1.0)
    keep_up(view, ["e1", "e2", "e3"], 10, 20, 0)
    swept = [change for now in (21.0, 22.0, 23.0, 24.0, 25.0) for change in view.sweep(now)]
    assert swept == []
    assert view.wants_proof
    assert view.is_frozen(25.0)
    view.bus_proved(25.0)
    assert view.sweep(26.9) == []
    assert told(view.sweep(27.1)) == [("dead", "e1"), ("dead", "e2"), ("dead", "e3")]


def test_one_of_two_is_not_most() -> None:
    view = Membership(1.0)
    keep_up(view, ["e1", "e2"], 10, 20, 0)
    swept = []
    for number, now in enumerate((21.0, 22.0, 23.0)):
        view.hear(beat("e2", 500 + number), now)
        swept.append(told(view.sweep(now)))
    assert swept == [[], [("suspect", "e1")], [("dead", "e1")]]


def test_the_only_member_may_die() -> None:
    view = Membership(1.0)
    keep_up(view, ["e1"], 10, 20, 0)
    assert [told(view.sweep(now)) for now in (21.5, 22.4, 23.1)] == [[("suspect", "e1")], [], [("dead", "e1")]]


def test_a_stall_of_our_own_is_nobodys_death() -> None:
    view = Membership(1.0)
    keep_up(view, ["e1", "e2", "e3"], 10, 20, 0)
    assert view.sweep(30.0) == []
    for process_id in ("e1", "e2", "e3"):
        view.hear(beat(process_id, 900), 30.1)
    assert view.sweep(31.0) == []


def test_the_dead_return_as_alive_and_are_forgotten_in_the_end() -> None:
    view = Membership(1.0)
    view.hear(beat(seq=1), 10)
    view.sweep(11)
    view.sweep(13)
    assert told(view.hear(beat(seq=2), 14)) == [("alive", "e1")]
    view.sweep(15)
    assert told(view.sweep(17)) == [("dead", "e1")]
    changes = [change for now in range(18, 300) for change in view.sweep(float(now))]
    assert told(changes) == [("forgotten", "e1")]
    assert view.members() == []


def test_a_life_that_was_called_dead_is_over_whatever_is_heard_of_it() -> None:
    view = Membership(1.0)
    view.hear(beat(seq=1), 10)
    assert told(view.bury("engine", "e1", "a")) == [("dead", "e1")]
    assert view.bury("engine", "e1", "a") == []
    assert view.hear(beat(seq=2), 10.5) == []
    assert of_kind(view.members(), "engine") == []
    assert told(view.hear(beat(seq=3, life="a.1"), 11)) == [("replaced", "e1")]
    assert view.hear(beat(seq=4), 11.1) == []
    assert view.bury("engine", "e1", "a") == [], "the old life, not the new one"
    assert [m.beat.incarnation for m in of_kind(view.members(), "engine")] == ["a.1"]


def test_a_buried_life_that_never_hears_of_it_is_taken_in_again_when_it_is_forgotten() -> None:
    view = Membership(1.0)
    view.hear(beat(seq=1), 0)
    view.bury("engine", "e1", "a")
    changes: list[tuple[str, str]] = []
    for now in range(1, 300):
        changes += told(view.hear(beat(seq=1 + now), float(now)) + view.sweep(float(now)))
    assert changes == [("forgotten", "e1"), ("joined", "e1")]


def test_members_are_in_order_whoever_comes_and_goes() -> None:
    view = Membership(1)
    for process_id in ("e2", "e3", "e1"):
        view.hear(beat(process_id), 0)
        assert [m.beat.id for m in view.members()] == sorted(m.beat.id for m in view.members())
    keep_up(view, ["e1", "e3"], 0, 300, 1)
    assert [m.beat.id for m in view.members()] == ["e1", "e3"]
    view.hear(beat("e0"), 301)
    view.hear(beat("e1", 1, life="b"), 301)
    assert [m.beat.id for m in view.members()] == ["e0", "e1", "e3"]


def test_only_the_ready_and_not_dead_get_work() -> None:
    view = Membership(1.0)
    view.hear(beat("e1"), 10)
    view.hear(beat("e2", state="draining"), 10)
    view.hear(beat("g1", kind="gateway"), 10)
    assert [m.beat.id for m in of_kind(view.members(), "engine")] == ["e1"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["hear1", "hear2", "hear3", "sweep", "went", "proved"]), st.floats(0.01, 4)),
        max_size=60,
    )
)
def test_nobody_heard_within_three_intervals_is_ever_called_dead(history: list[tuple[str, float]]) -> None:
    view = Membership(1.0)
    now, seq = 100.0, 0
    for what, pause in history:
        now += pause
        match what:
            case "sweep":
                for change in view.sweep(now):
                    if change.kind == "dead":
                        assert now - change.member.heard_at >= DEAD_BEATS
                        assert not view.is_frozen(now)
            case "went":
                view.bus_went()
            case "proved":
                view.bus_proved(now)
            case _:
                view.hear(beat(what, seq := seq + 1), now)
