import pytest

from infinilora.engine.lora.choose import Group, choose_group
from infinilora.protocol.ids import Digest

D = Digest("sha256:d")


def group(name: str, bytes_free: int, *resident: Digest, leases: int = 0) -> Group:
    return Group(
        name=name, address="", incarnation="", bytes_free=bytes_free, leases=leases, resident=frozenset(resident)
    )


@pytest.mark.parametrize(
    ("groups", "placed", "excluded", "chosen"),
    [
        ([], (), (), None),
        ([group("a", 1), group("b", 2)], (), (), "b"),
        ([group("a", 1, D), group("b", 2)], (), (), "a"),
        ([group("a", 1, D), group("b", 2)], ("b",), (), "a"),
        ([group("a", 1, D), group("b", 2, D)], ("a",), (), "a"),
        ([group("a", 1), group("b", 2)], ("gone",), (), "b"),
        ([group("a", 1), group("b", 2), group("c", 3)], ("a", "b"), (), "b"),
        ([group("a", 1), group("b", 2, leases=9), group("c", 3)], ("a", "b"), (), "a"),
        ([group("a", 1, D, leases=9), group("b", 2)], ("a", "b"), (), "a"),
        ([group("a", 1), group("b", 2)], ("b",), ("b",), "a"),
        ([group("a", 1)], ("a",), ("a",), None),
        ([group("a", 5), group("b", 5)], (), (), "b"),
    ],
)
def test_where_it_is_beats_where_it_is_wanted_beats_load_beats_free_bytes(
    groups: list[Group], placed: tuple[str, ...], excluded: tuple[str, ...], chosen: str | None
) -> None:
    assert choose_group(D, groups, placed, excluded) == chosen
    assert choose_group(D, reversed(groups), placed, excluded) == chosen, "the order they beat in decides nothing"
