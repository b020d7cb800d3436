import pytest

from infinilora.engine.lora.choose import Group, choose_group
from infinilora.protocol.control import Placement
from infinilora.protocol.ids import Digest, Fingerprint

D, OTHER = Digest("sha256:d"), Digest("sha256:o")


def group(name: str, bytes_free: int, *resident: Digest) -> Group:
    return Group(name=name, address="", incarnation="", bytes_free=bytes_free, resident=frozenset(resident))


def placed(**groups: tuple[Digest, ...]) -> Placement:
    return Placement(base=Fingerprint("f"), epoch=1, revision=1, groups=groups)


@pytest.mark.parametrize(
    ("groups", "placement", "excluded", "chosen"),
    [
        ([], None, (), None),
        ([group("a", 1), group("b", 2)], None, (), "b"),
        ([group("a", 1, D), group("b", 2)], None, (), "a"),
        ([group("a", 1, D), group("b", 2)], placed(b=(D,)), (), "b"),
        ([group("a", 1, D), group("b", 2)], placed(b=(OTHER,)), (), "a"),
        ([group("a", 1), group("b", 2)], placed(gone=(D,)), (), "b"),
        ([group("a", 1), group("b", 2), group("c", 3)], placed(a=(D,), b=(D,)), (), "b"),
        ([group("a", 1), group("b", 2)], placed(b=(D,)), ("b",), "a"),
        ([group("a", 1)], placed(a=(D,)), ("a",), None),
        ([group("a", 5), group("b", 5)], None, (), "b"),
    ],
)
def test_placement_beats_residency_beats_free_bytes(
    groups: list[Group], placement: Placement | None, excluded: tuple[str, ...], chosen: str | None
) -> None:
    assert choose_group(D, groups, placement, excluded) == chosen
    assert choose_group(D, reversed(groups), placement, excluded) == chosen, "the order they beat in decides nothing"
