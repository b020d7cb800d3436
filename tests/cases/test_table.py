"""The table of the cases, the page and the tests say the same."""

import importlib.util
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("cases_table", HERE / "table.py")
assert _spec is not None
assert _spec.loader is not None
table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(table)


def test_every_case_is_in_the_table() -> None:
    assert Counter(case[0] for case in table.CASES) == {"A": 39, "B": 7, "C": 15, "D": 24}


def test_a_case_is_open_if_and_only_if_no_test_holds_it() -> None:
    for case, (_, verdict, why) in table.CASES.items():
        assert bool(table.tests_of(case)) == (verdict != "open"), case
        assert bool(why) == (verdict == "open"), case


def test_every_test_is_of_a_case_in_the_table() -> None:
    assert sorted(table.tests()) == sorted(test for case in table.CASES for test in table.tests_of(case))


def test_the_page_is_the_table() -> None:
    assert table.table() in table.PAGE.read_text(), "run `python tests/cases/table.py`"
