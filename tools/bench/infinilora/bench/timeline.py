"""Reads the timeline that an engine writes (engine/timeline.py): where the time of a step goes, and a picture of it.

step = kernels + link + exposed wait + Python      idle: between two steps      computing: in the LoRA server
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from infinilora.protocol.errors import InvalidRequest

LANES = ("step", "kernels", "link", "exposed wait", "computing")
COLOURS = {
    "step": "#bbbbbb",
    "kernels": "#0072b2",
    "link": "#e69f00",
    "exposed wait": "#d55e00",
    "computing": "#009e73",
}
NAMES = {"computing": "LoRA server"}
WIDTH, LEFT, RIGHT, TOP, LANE, BAR = 960, 110, 20, 34, 40, 24
TICKS = 6
FEWEST_PIXELS = 30
"""Of a bar that has its name written into it."""


class Bar(NamedTuple):
    """One event; microseconds."""

    lane: str
    name: str
    start_us: float
    end_us: float

    @property
    def length_us(self) -> float:
        return self.end_us - self.start_us


class _Event(msgspec.Struct, frozen=True):
    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]  # noqa: N815 - as the format spells it


def read(path: Path) -> list[Bar]:
    """What lasted, in order of beginning, the longer first. InvalidRequest where the file is no timeline."""
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=_Trace)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"found {path}: {error}; wanted a timeline as an engine writes it") from None
    bars = [Bar(e.cat, e.name, e.ts, e.ts + e.dur) for e in trace.traceEvents if e.ph == "X"]
    return sorted(bars, key=lambda bar: (bar.start_us, -bar.end_us))


@dataclass(frozen=True, slots=True)
class Parts:
    """Of `steps` steps: milliseconds that one of them spends on each, on average."""

    steps: int
    step_ms: float
    kernels_ms: float
    link_ms: float
    exposed_wait_ms: float
    python_ms: float
    idle_ms: float
    computing_ms: float

    def rows(self) -> list[tuple[str, float, float]]:
        """(name, milliseconds, share of a step) of each part."""
        named = {name.removesuffix("_ms").replace("_", " "): ms for name, ms in asdict(self).items() if name != "steps"}
        return [(name, ms, ms / self.step_ms) for name, ms in named.items()]


def parts_of(bars: Sequence[Bar], *, decode_rows: int = 0) -> Parts:
    """Where the time of steps without prefill rows goes: of all of them, or of those with so many rows."""
    steps = [bar for bar in bars if bar.lane == "step"]
    chosen = [bar for bar in steps if _decodes(bar, decode_rows)]
    if not chosen:
        wanted = f"{decode_rows} rows that decode" if decode_rows else "rows that decode alone"
        raise InvalidRequest(f"found {len(steps)} steps, none of them of {wanted}; wanted at least one")
    sums = {lane: sum(_within(bars, lane, chosen)) for lane in LANES}
    idle = [max(later.start_us - step.end_us, 0.0) for step, later in pairwise(steps) if _decodes(step, decode_rows)]
    per_step = 1e-3 / len(chosen)
    step, wait = sums["step"], sums["exposed wait"]
    return Parts(
        steps=len(chosen),
        step_ms=step * per_step,
        kernels_ms=sums["kernels"] * per_step,
        link_ms=(sums["link"] - wait) * per_step,
        exposed_wait_ms=wait * per_step,
        python_ms=(step - sums["kernels"] - sums["link"]) * per_step,
        idle_ms=sum(idle) * per_step,
        computing_ms=sums["computing"] * per_step,
    )


def _decodes(step: Bar, rows: int = 0) -> bool:
    """Whether so many rows decode (0: any number) and none is prefill. A step that lost all has none of both."""
    decoding, _, rest = step.name.partition(" ")
    return rest == "decode, 0 prefill rows" and decoding != "0" and decoding == str(rows or decoding)


def _within(bars: Sequence[Bar], lane: str, steps: Sequence[Bar]) -> Iterable[float]:
    """Lengths of the lane's bars that begin in one of the steps; both in order of beginning."""
    chosen, step = iter(steps), None
    for bar in bars:
        if bar.lane != lane:
            continue
        while step is None or bar.start_us >= step.end_us:
            step = next(chosen, None)
            if step is None:
                return
        if bar.start_us >= step.start_us:
            yield bar.length_us


def one_layer(bars: Sequence[Bar]) -> tuple[float, float]:
    """Where a layer in the middle of a middling decode step begins and ends, in microseconds."""
    steps = sorted((bar for bar in bars if bar.lane == "step" and _decodes(bar)), key=_length)
    if not steps:
        raise InvalidRequest("found no step that decodes alone; wanted one to draw")
    step = steps[len(steps) // 2]
    begun = [b.start_us for b in bars if b.name.startswith("submit qkv ") and step.start_us <= b.start_us < step.end_us]
    if len(begun) < 2:
        return step.start_us, step.end_us
    middle = (len(begun) - 1) // 2
    return begun[middle], begun[middle + 1]


def _length(bar: Bar) -> float:
    return bar.length_us


def draw(bars: Sequence[Bar], start_us: float, end_us: float) -> str:
    """An SVG of what lies between two moments: one lane below the other, time from left to right."""
    height = TOP + LANE * len(LANES) + 30
    scale = (WIDTH - LEFT - RIGHT) / (end_us - start_us)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, lane in enumerate(LANES):
        y = TOP + LANE * number
        parts.append(_text(LEFT - 8, y + BAR - 7, NAMES.get(lane, lane), "end", 13))
        parts += [
            _bar(bar, y, LEFT + (max(bar.start_us, start_us) - start_us) * scale, scale, start_us, end_us)
            for bar in bars
            if bar.lane == lane and bar.start_us < end_us and bar.end_us > start_us
        ]
    for tick in range(TICKS + 1):
        us = (end_us - start_us) * tick / TICKS
        parts.append(_text(LEFT + us * scale, height - 8, f"{us:.0f} us", "middle", 12))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(bar: Bar, y: float, x: float, scale: float, start_us: float, end_us: float) -> str:
    width = (min(bar.end_us, end_us) - max(bar.start_us, start_us)) * scale
    title = escape(f"{bar.name}: {bar.length_us:.1f} us")
    drawn = f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{BAR}" fill="{COLOURS[bar.lane]}"'
    drawn += f' stroke="white" stroke-width="0.5"><title>{title}</title></rect>'
    fits = width > max(FEWEST_PIXELS, 5.5 * len(bar.name))
    return drawn + (_text(x + width / 2, y + BAR - 8, bar.name, "middle", 10, "white") if fits else "")


def _text(x: float, y: float, words: str, anchor: str, size: int, colour: str = "black") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {at}>{escape(words)}</text>"
