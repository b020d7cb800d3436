"""IAR against slots as an SVG: one line for each base, where the target is met, and where the plan is."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from infinilora.coordinator.provision.pools import in_slots, pools
from infinilora.planner.plan import BasePlan
from infinilora.planner.workload import Served
from infinilora.protocol.errors import InvalidRequest

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 70, 40, 30, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
BEYOND = 1.5
"""The axis of slots ends so many times the plan's slots."""
MAX_POINTS = 400
TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axes:
    """Where a point of the curve lies in the picture; `last` is the last slot on the axis."""

    last: int

    def at(self, slots: float, iar: float) -> tuple[float, float]:
        across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return round(LEFT + across * slots / self.last, 1), round(TOP + down * (1 - iar), 1)


@dataclass(frozen=True, slots=True)
class Line:
    """One base's curve: (slots, IAR) rising, and two of its points."""

    name: str
    points: tuple[tuple[int, float], ...]
    min_slots: int
    slots: int


def line_of(served: Served, plan: BasePlan) -> Line:
    """The curve of one pool for all of a base's adapters."""
    counted = in_slots(pools(served.demand, 1))
    last = int(plan.slots * BEYOND) + 1
    places = {*range(0, last + 1, max(1, last // MAX_POINTS)), plan.min_slots, plan.slots}
    points = tuple((slots, 1.0 - counted.refused(slots)) for slots in sorted(places))
    return Line(plan.model, points, plan.min_slots, plan.slots)


def check_picture(path: Path) -> None:
    """Before any work is done. A PNG would need a drawing library that nothing else here needs."""
    if path.suffix != ".svg":
        raise InvalidRequest(f"found {path.name}; wanted a name that ends in .svg, the one form drawn", param="picture")


def write_picture(path: Path, lines: Sequence[Line], target: float) -> None:
    try:
        path.write_text(draw(lines, target), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"found {path}, {error.strerror}; wanted a file to write", param="picture") from None


def draw(lines: Sequence[Line], target: float) -> str:
    """The picture as SVG text."""
    axes = Axes(max(line.points[-1][0] for line in lines))
    parts = [*_frame(axes), rule(axes.at(0, target), axes.at(axes.last, target), colour="#888888", dash="6 4")]
    parts.append(text(axes.at(0, target), f"target {target:g}", shift=(4, 15), anchor="start"))
    for index, line in enumerate(lines):
        parts += _drawn(
            line, COLOURS[index % len(COLOURS)], (WIDTH - RIGHT - 8, HEIGHT - BOTTOM - 12 - 16 * index), axes
        )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _frame(axes: Axes) -> list[str]:
    """Both axes with their ticks and names."""
    parts = [rule(axes.at(0, 0), axes.at(axes.last, 0)), rule(axes.at(0, 0), axes.at(0, 1))]
    for tick in range(TICKS + 1):
        slots = axes.last * tick // TICKS
        parts.append(text(axes.at(slots, 0), str(slots), shift=(0, 18)))
        parts.append(text(axes.at(0, tick / TICKS), f"{tick / TICKS:.1f}", shift=(-8, 4), anchor="end"))
    middle = axes.at(axes.last / 2, 0)
    parts.append(text(middle, "slots of one pool", shift=(0, 42)))
    parts.append(text((LEFT, TOP), "IAR: share of requests admitted at once", shift=(-40, -16), anchor="start"))
    return parts


def _drawn(line: Line, colour: str, legend: Point, axes: Axes) -> list[str]:
    """A curve, its two marks, and its row of the legend."""
    path = " ".join(f"{x},{y}" for x, y in (axes.at(*point) for point in line.points))
    iar = dict(line.points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for slots in (line.min_slots, line.slots):
        x, y = axes.at(slots, iar[slots])
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(text((x, y), str(slots), shift=(0, 18), colour=colour))
    told = f"{line.name}: {line.min_slots} slots, {line.slots} with the margin"
    return [*parts, text(legend, told, anchor="end", colour=colour)]


def rule(start: Point, end: Point, *, colour: str = "black", dash: str = "none") -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-dasharray="{dash}"/>'


def text(place: Point, words: str, *, shift: Point = (0, 0), anchor: str = "middle", colour: str = "black") -> str:
    x, y = place[0] + shift[0], place[1] + shift[1]
    return f'<text x="{x:g}" y="{y:g}" font-size="12" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
