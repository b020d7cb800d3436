from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinilora.link.frame import (
    HEADER_BYTES,
    Flag,
    Header,
    Kind,
    column_slices,
    rows_that_fit,
    unpack_header,
)
from infinilora.protocol.errors import InvalidRequest

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@given(U64, U64, st.tuples(*[U32] * 12), st.binary(min_size=24, max_size=24))
def test_a_header_comes_back_as_it_was_sent(step: int, sequence: int, words: tuple[int, ...], trace: bytes) -> None:
    header = Header._make((Kind.SITE, Flag.LAST, step, sequence, *words, 12345, trace))
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert unpack_header(data) == header


@given(st.integers(1, 5000), st.integers(1, 9000), st.integers(9000, 40000), st.booleans())
def test_as_many_rows_as_fit_both_buffers(out: int, back: int, buffer: int, has_gap: bool) -> None:
    fit = rows_that_fit(out, back, buffer, has_gap=has_gap)

    def holds(rows: int) -> bool:
        return rows * out + 64 * has_gap <= buffer and rows * back <= buffer

    assert holds(fit)
    assert not holds(fit + 1)


def test_a_row_that_fits_no_buffer_is_refused_with_the_size_it_needs() -> None:
    with pytest.raises(InvalidRequest, match="at least 600000"):
        rows_that_fit(1000, 600_000, 4096, has_gap=False)


def _site(**changes: Any) -> Header:
    return Header(Kind.SITE, rows=2, in_cols=3, out_cols=5, payload_bytes=24)._replace(**changes)


def test_a_frame_whose_fields_agree_passes() -> None:
    _site().check(4096)
    _site(flags=Flag.HAS_IDS | Flag.HAS_WEIGHTS, topk=2, payload_bytes=64 + 2 * 2 * 2 * 4).check(4096)
    Header(Kind.PLAN, rows=3, payload_bytes=48).check(4096)


@pytest.mark.parametrize(
    "header",
    [
        _site(payload_bytes=20),
        _site(rows=2**31, payload_bytes=24),
        _site(out_cols=2**20),
        _site(dtype=7),
        _site(flags=Flag.HAS_IDS, topk=2),
        _site(flags=Flag.HAS_ROWS),
        _site(flags=Flag.HAS_ROWS | Flag.HAS_IDS, topk=1, payload_bytes=64 + 2 * 4),
        Header(Kind.REPLY),
        Header(Kind.PLAN, rows=3, payload_bytes=47),
        Header(77),
    ],
)
def test_a_frame_whose_fields_disagree_is_refused(header: Header) -> None:
    with pytest.raises(InvalidRequest):
        header.check(4096)


def test_dtypes_on_the_wire_are_numbered_once_and_for_all() -> None:
    assert [Header(Kind.SITE, dtype=code).torch_dtype for code in range(3)] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]


@given(columns=st.integers(1, 300_000), width=st.sampled_from([2, 4]), buffer=st.sampled_from([128, 4096, 262_144]))
def test_slices_cover_a_row_once_and_each_fits(columns: int, width: int, buffer: int) -> None:
    slices = column_slices(columns, width, buffer)
    assert [at for at, _ in slices] == [0, *(end for _, end in slices[:-1])]
    assert slices[-1][1] == columns
    assert all(0 < (end - at) * width <= buffer for at, end in slices)
    assert len(slices) == 1 or columns * width > buffer


def test_runs_of_columns_are_asked_for_side_by_side_and_one_as_an_older_server_knows_it() -> None:
    shape = Header(Kind.SITE, out_cols=100)
    assert shape.runs == ()
    one, two = shape.asking([(3, 9)]), shape.asking([(0, 4), (7, 9)])
    assert (one.runs, one.out_cols, one.flags, one.out_begin, one.out_end) == (((3, 9),), 6, 0, 3, 9)
    assert (two.runs, two.out_cols, two.out_end) == (((0, 4), (7, 9)), 6, 0)
    trace = bytes([1]) * 24
    assert (one.traced(trace).trace, two.traced(trace).runs) == (trace, two.runs)
