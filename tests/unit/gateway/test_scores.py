"""Which engine takes a sequence."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infinilora.gateway.scores import EngineView, Wanted, pick
from infinilora.protocol.ids import Digest, Fingerprint

BASE, OTHER = Fingerprint("sha256:b"), Fingerprint("sha256:o")
A = Digest("sha256:a")


def engine(key: str, **facts: Any) -> EngineView:
    blank = EngineView(
        key=key,
        base=BASE,
        is_alive=True,
        is_draining=False,
        is_suspect=False,
        is_open=False,
        running=0,
        waiting=0,
        in_flight=0,
        kv_free=1.0,
        digests=frozenset(),
    )
    return blank._replace(**facts)


def chosen(*engines: EngineView, digest: Digest | None = None, **wanted: Any) -> str | None:
    found = pick(engines, Wanted(BASE, digest, **wanted))
    return found.key if found else None


def test_nobody_dead_draining_unreachable_tried_or_of_another_base_is_taken() -> None:
    engines = (
        engine("a", base=OTHER),
        engine("b", is_draining=True),
        engine("c"),
        engine("d", is_alive=False),
        engine("e", is_open=True),
        engine("f", base=None),
    )
    assert chosen(*engines, avoid=("c",)) is None
    assert chosen(*engines) == "c"


def test_the_least_loaded_wins() -> None:
    assert chosen(engine("a", running=3), engine("b", running=1), engine("c", running=2)) == "b"


def test_what_waits_weighs_double() -> None:
    assert chosen(engine("a", waiting=2), engine("b", running=3)) == "b"


def test_what_this_gateway_has_sent_counts_before_the_next_heartbeat() -> None:
    assert chosen(engine("a", in_flight=2), engine("b", in_flight=1)) == "b"


def test_a_warm_adapter_is_worth_a_little_load() -> None:
    warm = engine("a", running=1, digests=frozenset({A}))
    assert chosen(warm, engine("b"), digest=A) == "a"
    assert chosen(warm._replace(running=9), engine("b"), digest=A) == "b"
    assert chosen(warm, engine("b")) == "b"


def test_who_served_an_adapter_last_is_warm_and_the_base_is_warm_everywhere() -> None:
    served = {"a": 0}
    assert chosen(engine("a", running=1), engine("b"), digest=A, matches=served) == "a"
    assert chosen(engine("a", running=1), engine("b"), matches=served) == "b"


def test_a_known_prefix_is_worth_load_for_each_part_of_it_up_to_a_bound() -> None:
    assert chosen(engine("a", running=2), engine("b"), matches={"a": 768}) == "a"
    assert chosen(engine("a", running=2), engine("b"), matches={"a": 256}) == "b"
    assert chosen(engine("a", running=5), engine("b"), matches={"a": 1 << 20}) == "b"


def test_the_longer_prefix_wins_among_equals() -> None:
    assert chosen(engine("a"), engine("b"), matches={"a": 64, "b": 128}) == "b"


def test_a_suspect_is_the_last_resort() -> None:
    assert chosen(engine("a", is_suspect=True), engine("b", running=50)) == "b"
    assert chosen(engine("a", is_suspect=True)) == "a"


def test_less_free_kv_loses_among_equals() -> None:
    assert chosen(engine("a", kv_free=0.1), engine("b", kv_free=0.9)) == "b"


@given(st.permutations(["a", "b", "c"]))
def test_ties_do_not_depend_on_the_order(order: list[str]) -> None:
    assert chosen(*(engine(key) for key in order)) == "a"
