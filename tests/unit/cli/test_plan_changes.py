"""What `infinilora rebalance` says of a base."""

from typing import Any

import pytest

from infinilora.cli.admin_commands import changes_line

UNNAMED = "sha256:" + 12 * "a"


@pytest.mark.parametrize(("told", "name"), [({"model": "tiny"}, "tiny"), ({"model": ""}, UNNAMED), ({}, UNNAMED)])
def test_a_base_is_called_as_requests_call_it(told: dict[str, Any], name: str) -> None:
    base = {"base": "sha256:" + 64 * "a", "num_moves": 3, "num_bytes": 0, "reasons": {"kept": 2, "moved": 3}, **told}
    line = changes_line(base, verb="would change")
    assert line.startswith(f"{name}: 3 would change, ")
    assert line.endswith("; 2 kept, 3 moved")
