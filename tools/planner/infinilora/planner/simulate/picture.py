"""TTFT of several ways of serving as an SVG: the share of requests that had their first token within a time."""

import math
from collections.abc import Sequence
from pathlib import Path

from infinilora.planner.picture import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Point, rule, text
from infinilora.planner.simulate.compare import Served
from infinilora.planner.simulate.outcome import Slo
from infinilora.protocol.errors import InvalidRequest

LEAST_S, DECADES = 0.01, 4
"""The axis of seconds is logarithmic, from here, over so many powers of ten."""


def write_picture(path: Path, served: Sequence[Served], slo: Slo) -> None:
    try:
        path.write_text(draw(served, slo), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"found {path}, {error.strerror}; wanted a file to write", param="picture") from None


def draw(served: Sequence[Served], slo: Slo) -> str:
    """The picture as SVG text. A way without an outcome has its row of the legend only."""
    parts = [*_frame(), rule(_at(slo.ttft_s, 0), _at(slo.ttft_s, 1), colour="#888888", dash="6 4")]
    parts.append(text(_at(slo.ttft_s, 1), f"SLO {slo.ttft_s:g} s", shift=(4, 12), anchor="start"))
    for index, one in enumerate(served):
        colour, outcome = COLOURS[index % len(COLOURS)], one.outcome
        told = f"{one.way}: {one.rate:.4g} requests/s"
        if outcome is not None:
            pairs = enumerate(outcome.ttft_percentiles_s, start=1)
            points = " ".join(f"{x},{y}" for x, y in (_at(s, p / 100) for p, s in pairs if math.isfinite(s)))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
            told += f", P95 {outcome.ttft_s.p95:.3f} s"
        place = (WIDTH - RIGHT - 8, HEIGHT - BOTTOM - 12 - 16 * index)
        parts.append(text(place, told, anchor="end", colour=colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _at(seconds: float, share: float) -> Point:
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    along = min(max(math.log10(max(seconds, LEAST_S) / LEAST_S) / DECADES, 0.0), 1.0)
    return round(LEFT + across * along, 1), round(TOP + down * (1 - share), 1)


def _frame() -> list[str]:
    """Both axes with their ticks and names."""
    last_s = LEAST_S * 10**DECADES
    decades = [(_at(LEAST_S * 10**tick, 0), f"{LEAST_S * 10**tick:g}") for tick in range(DECADES + 1)]
    shares = [(_at(LEAST_S, tick / 10), f"{tick / 10:.1f}") for tick in range(0, 11, 2)]
    return [
        rule(_at(LEAST_S, 0), _at(last_s, 0)),
        rule(_at(LEAST_S, 0), _at(LEAST_S, 1)),
        *(text(place, words, shift=(0, 18)) for place, words in decades),
        *(text(place, words, shift=(-8, 4), anchor="end") for place, words in shares),
        text(_at(LEAST_S * 10 ** (DECADES / 2), 0), "TTFT, seconds", shift=(0, 42)),
        text((LEFT, TOP), "share of requests with a first token by then", shift=(-40, -16), anchor="start"),
    ]
