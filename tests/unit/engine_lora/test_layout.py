import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.engine.lora.interface import AdapterRows, Lease
from infinilora.engine.lora.layout import KEPT_WINDOWS, Layout, Range, clip
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import Internal
from infinilora.protocol.ids import Digest


def lease(name: str, group: str, masks: tuple[int, ...] = (0b1111, 0b1111)) -> Lease:
    return Lease(Digest(name), group, ord(name[0]), 1, masks)


A, B, C = lease("a", "g0"), lease("b", "g0", (0b0001, 0b0000)), lease("c", "g1", (0b1000, 0b1111))
ROWS = [AdapterRows(0, 3, A), AdapterRows(3, 2, B), AdapterRows(5, 4, C)]


def test_neighbours_of_one_group_are_one_span() -> None:
    layout = Layout(ROWS)
    assert [(s.group, sorted(s.digests)) for s in layout.spans] == [("g0", ["a", "b"]), ("g1", ["c"])]
    assert layout.num_rows == 9


def test_only_rows_between_the_first_and_last_that_adapt_are_sent() -> None:
    layout = Layout(ROWS)
    assert layout.ranges(0, Site.QKV) == (Range(0, 0, 5),), "c does not adapt qkv in layer 0"
    assert layout.ranges(0, Site.DOWN) == (Range(0, 0, 3), Range(1, 5, 9))
    assert layout.ranges(1, Site.O) == (Range(0, 0, 3), Range(1, 5, 9))


def test_a_site_or_layer_that_nobody_adapts_sends_nothing() -> None:
    layout = Layout(ROWS)
    assert layout.ranges(0, Site.ROUTER) == ()
    assert layout.ranges(7, Site.QKV) == (), "a mask may be shorter than the model"


def test_rows_without_an_adapter_in_between_part_a_group_into_two_spans() -> None:
    layout = Layout([AdapterRows(0, 1, A), AdapterRows(2, 1, A)])
    assert layout.ranges(0, Site.QKV) == (Range(0, 0, 1), Range(1, 2, 3))


@pytest.mark.parametrize(
    "rows",
    [
        [AdapterRows(3, 2, A), AdapterRows(0, 1, B)],
        [AdapterRows(0, 3, A), AdapterRows(2, 1, B)],
        [AdapterRows(0, 0, A)],
    ],
)
def test_rows_out_of_order_are_refused(rows: list[AdapterRows]) -> None:
    with pytest.raises(Internal, match="out of order"):
        Layout(rows)


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from("abcd"), st.integers(0, 15), st.sampled_from(["g", "h"]))))
def test_every_adapting_row_is_in_exactly_one_range(segments: list[tuple[int, str, int, str]]) -> None:
    rows, at = [], 0
    for count, name, mask, group in segments:
        rows.append(AdapterRows(at, count, lease(name, group, (mask,))))
        at += count
    layout = Layout(rows)
    for site in (Site.QKV, Site.O, Site.GATE_UP, Site.DOWN):
        covered = [row for r in layout.ranges(0, site) for row in range(r.start, r.stop)]
        wanted = {
            row for s in rows if s.lease.layer_sites[0] >> site & 1 for row in range(s.row_start, s.row_start + s.rows)
        }
        assert len(covered) == len(set(covered))
        assert wanted <= set(covered)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.sampled_from("abcd")), max_size=6),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_a_clip_has_each_row_of_its_window_under_its_lease(
    segments: list[tuple[int, int, str]], start: int, stop: int
) -> None:
    rows, end = [], 0
    for gap, count, name in segments:
        rows.append(AdapterRows(end + gap, count, lease(name, "g")))
        end += gap + count
    of_row = {at + i: held.digest for at, count, held in rows for i in range(count)}

    clipped = clip(rows, start, stop)

    found = {start + at + i: held.digest for at, count, held in clipped for i in range(count)}
    assert found == {row: digest for row, digest in of_row.items() if start <= row < stop}
    Layout(clipped)


def test_a_window_is_made_once_and_few_are_kept() -> None:
    layout = Layout([AdapterRows(0, 30, lease("a", "g"))])
    first = layout.window(0, 12)
    assert [row[:2] for row in first.rows] == [(0, 12)]
    assert layout.window(0, 12) is first
    for stop in range(13, 13 + KEPT_WINDOWS):
        layout.window(0, stop)
    assert len(layout._windows) <= KEPT_WINDOWS
    assert layout.window(0, 12).rows == first.rows
