"""How an adapter fares, by the beats of all that have to do with it."""

import pytest

from infinilora.gateway.states import States
from infinilora.protocol.control import Beat, EngineLoad, GroupLoad, LoadFailure, ProcessState
from infinilora.protocol.ids import digest_of
from infinilora.runtime.membership import Health, Member

A, B = digest_of(b"a"), digest_of(b"b")
FAILED = LoadFailure(A, "adapter_failed", "a block is damaged")
HOLDS, LOADS, FAILS = GroupLoad(resident=(A,)), GroupLoad(loading=(A,)), GroupLoad(failed=(FAILED,))


def group(name: str, load: GroupLoad, state: ProcessState = "ready", health: Health = "alive") -> Member:
    beat = Beat(kind="lora-server", id=f"{name}/1", incarnation="1", seq=1, state=state, group=name, load=load)
    return Member(beat, 0.0, health=health)


def engine(load: EngineLoad) -> Member:
    return Member(Beat(kind="engine", id="e", incarnation="1", seq=1, state="ready", load=load), 0.0)


@pytest.mark.parametrize(
    ("members", "state"),
    [
        ([], "pending"),
        ([group("g", GroupLoad(resident=(B,), loading=(B,)))], "pending"),
        ([engine(EngineLoad(digests=(A,), running=1))], "pending"),
        ([group("g", LOADS)], "loading"),
        ([group("g", HOLDS)], "ready"),
        ([engine(EngineLoad(resident=(A,)))], "ready"),
        ([group("g", HOLDS, state="draining")], "draining"),
        ([group("g", HOLDS, state="stuck")], "draining"),
        ([group("g", FAILS)], "failed"),
        ([engine(EngineLoad(failed=(FAILED,)))], "failed"),
        ([group("g", GroupLoad(failed=(FAILED,), loading=(A,)))], "loading"),
        ([group("g", FAILS), group("h", LOADS)], "loading"),
        ([group("g", FAILS), group("h", LOADS), group("i", HOLDS)], "ready"),
        ([group("g", FAILS), group("h", HOLDS, state="draining")], "draining"),
        ([group("g", HOLDS, health="dead"), group("h", FAILS)], "failed"),
        ([group("g", HOLDS, health="suspect")], "ready"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} members",
)
def test_of_several_processes_the_best_counts(members: list[Member], state: str) -> None:
    assert States(members).of(A) == state


def test_each_process_is_told_and_why_it_failed() -> None:
    places = [
        {"on": "g", "state": "failed", "code": "adapter_failed", "reason": "a block is damaged"},
        {"on": "h", "state": "ready", "code": "", "reason": ""},
    ]
    assert States([group("g", FAILS), group("h", HOLDS)]).show(A) == {
        "state": "ready",
        "state_reason": None,
        "places": places,
    }
    reason = "adapter_failed: a block is damaged"
    assert States([group("g", FAILS)]).show(A) == {"state": "failed", "state_reason": reason, "places": places[:1]}
    assert States([]).show(A) == {"state": "pending", "state_reason": None, "places": []}
