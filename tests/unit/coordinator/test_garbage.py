"""What becomes of a digest without a name, as a table."""

import pytest

from infinilora.coordinator.garbage import Fate, fate


@pytest.mark.parametrize(
    ("is_dying", "is_named", "is_leased", "unseen_s", "expected"),
    [
        (False, True, False, 100.0, "keep"),
        (False, True, True, 100.0, "keep"),
        (True, True, False, 100.0, "keep"),
        (False, False, False, 4.9, "wait"),
        (False, False, True, 100.0, "wait"),
        (False, False, False, 5.0, "drop"),
        (True, False, True, 0.0, "forget"),
        (True, False, False, 100.0, "forget"),
    ],
)
def test_fates(*, is_dying: bool, is_named: bool, is_leased: bool, unseen_s: float, expected: Fate) -> None:
    assert (
        fate("dying" if is_dying else "live", is_named=is_named, is_leased=is_leased, unseen_s=unseen_s, grace_s=5.0)
        == expected
    )
