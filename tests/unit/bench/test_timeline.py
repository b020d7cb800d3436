"""A timeline made by hand: its parts add up, and its picture shows what lies in the window."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from infinilora.bench.timeline import Bar, Parts, draw, one_layer, parts_of, read
from infinilora.protocol.errors import InvalidRequest

DECODE, PREFILL = "8 decode, 0 prefill rows", "0 decode, 40 prefill rows"
BARS = [
    Bar("step", PREFILL, 0, 1000),
    Bar("kernels", "linear", 100, 900),
    Bar("step", DECODE, 1100, 2100),
    Bar("link", "submit qkv 0", 1150, 1160),
    Bar("kernels", "linear", 1160, 1460),
    Bar("computing", "qkv 0", 1170, 1570),
    Bar("link", "add qkv 0", 1460, 1600),
    Bar("exposed wait", "qkv 0", 1460, 1580),
    Bar("link", "submit qkv 1", 1800, 1810),
    Bar("step", DECODE, 2300, 3300),
    Bar("kernels", "linear", 2400, 3200),
]


def test_the_parts_of_decode_steps_add_up() -> None:
    wanted = Parts(
        steps=2,
        step_ms=1.0,
        kernels_ms=0.55,
        link_ms=0.02,
        exposed_wait_ms=0.06,
        python_ms=0.37,
        idle_ms=0.1,
        computing_ms=0.2,
    )
    assert asdict(parts_of(BARS)) == pytest.approx(asdict(wanted))


def test_steps_of_other_sizes_can_be_left_out() -> None:
    other = Bar("step", "9 decode, 0 prefill rows", 3400, 3500)
    assert parts_of([*BARS, other]).steps == 3
    wanted = replace(parts_of(BARS), idle_ms=0.15)
    assert asdict(parts_of([*BARS, other], decode_rows=8)) == pytest.approx(asdict(wanted))
    with pytest.raises(InvalidRequest, match="none of them of 7 rows"):
        parts_of(BARS, decode_rows=7)


def test_a_step_that_lost_all_its_rows_is_no_decode_step() -> None:
    lost = Bar("step", "0 decode, 0 prefill rows", 3400, 9900)
    wanted = replace(parts_of(BARS), idle_ms=0.15)
    assert asdict(parts_of([*BARS, lost])) == pytest.approx(asdict(wanted))


def test_shares_are_of_a_step() -> None:
    rows = {name: (ms, share) for name, ms, share in parts_of(BARS).rows()}
    assert rows["exposed wait"] == pytest.approx((0.06, 0.06))
    assert list(rows) == ["step", "kernels", "link", "exposed wait", "python", "idle", "computing"]


def test_without_a_decode_step_there_is_nothing_to_tell() -> None:
    with pytest.raises(InvalidRequest, match="found 1 steps, none of them"):
        parts_of(BARS[:2])


def event(bar: Bar) -> dict[str, Any]:
    return {"ph": "X", "cat": bar.lane, "name": bar.name, "ts": bar.start_us, "dur": bar.length_us, "pid": 1, "tid": 1}


def test_a_file_is_read_in_order_of_beginning(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    names = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "engine"}}]
    path.write_text(json.dumps({"traceEvents": [*names, *map(event, reversed(BARS))]}))
    assert read(path) == BARS


@pytest.mark.parametrize("content", [b"", b"{}", b'{"traceEvents": [{"ts": 1}]}', b"\xff"])
def test_what_is_no_timeline_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="wanted a timeline"):
        read(path)


def test_a_layer_lies_between_two_submissions_of_a_middling_step() -> None:
    several = [bar for bar in BARS if bar.lane != "step"] + [Bar("step", DECODE, 1100, 2100)]
    assert one_layer(several) == (1150, 1800)
    assert one_layer([BARS[9]]) == (2300, 3300), "without adapters: the whole step"


def test_the_picture_has_each_bar_of_the_window_in_its_place() -> None:
    svg = draw(BARS, 1100, 2100)
    titles = re.findall("<title>(.*?): ", svg)
    assert sorted(titles) == sorted(bar.name for bar in BARS[2:9])
    at = {title: float(x) for x, title in re.findall('<rect x="([0-9.]+)".*?<title>(.*?): ', svg)}
    assert at[DECODE] < at["submit qkv 0"] < at["linear"] < at["add qkv 0"] < at["submit qkv 1"]
    for lane in ("step", "kernels", "link", "exposed wait", "LoRA server"):
        assert f">{lane}</text>" in svg
