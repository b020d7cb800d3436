"""Which engine takes a sequence."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infinilora.gateway.scores import EngineView, pick
from infinilora.protocol.ids import Digest, Fingerprint

BASE, OTHER = Fingerprint("sha256:b"), Fingerprint("sha256:o")
A = Digest("sha256:a")


def engine(key: str, **facts: Any) -> EngineView:
    blank = EngineView(
        key=key,
        base=BASE,
        is_draining=False,
        is_suspect=False,
        running=0,
        waiting=0,
        in_flight=0,
        kv_free=1.0,
        digests=frozenset(),
    )
    return blank._replace(**facts)


def chosen(*engines: EngineView, digest: Digest | None = None, avoid: tuple[str, ...] = ()) -> str | None:
    found = pick(engines, BASE, digest, avoid)
    return found.key if found else None


def test_nobody_of_another_base_or_draining_or_tried_is_taken() -> None:
    assert chosen(engine("a", base=OTHER), engine("b", is_draining=True), engine("c"), avoid=("c",)) is None


def test_the_least_loaded_wins() -> None:
    assert chosen(engine("a", running=3), engine("b", running=1), engine("c", running=2)) == "b"


def test_what_this_gateway_has_sent_counts_before_the_next_heartbeat() -> None:
    assert chosen(engine("a", in_flight=2), engine("b", in_flight=1)) == "b"


def test_a_warm_adapter_is_worth_a_little_load() -> None:
    warm = engine("a", running=1, digests=frozenset({A}))
    assert chosen(warm, engine("b"), digest=A) == "a"
    assert chosen(warm._replace(running=9), engine("b"), digest=A) == "b"
    assert chosen(warm, engine("b")) == "b"


def test_a_suspect_is_the_last_resort() -> None:
    assert chosen(engine("a", is_suspect=True), engine("b", running=50)) == "b"
    assert chosen(engine("a", is_suspect=True)) == "a"


def test_less_free_kv_loses_among_equals() -> None:
    assert chosen(engine("a", kv_free=0.1), engine("b", kv_free=0.9)) == "b"


@given(st.permutations(["a", "b", "c"]))
def test_ties_do_not_depend_on_the_order(order: list[str]) -> None:
    assert chosen(*(engine(key) for key in order)) == "a"
