"""make bench-forecast: each method of the forecast, and the choice among them, one lead time ahead on made traffic.

The error is the mean absolute error over the mean count (WAPE), over the second half of each trace; what nobody can
foresee, the Poisson noise of a bucket, is in it. The value is the worst ratio over the shapes of the choice's error to
that of the better of last value and EWMA. `covered` is the share of buckets that stayed below the band's upper end.
"""

import random
from statistics import fmean

from harness import median, report
from traffic_shapes import DAY, LEAD, SHAPES

from infinilora.coordinator.forecast import METHODS, Forecaster

SEEDS, DAYS, TARGET = range(5), 6, 1.05


def main() -> None:
    table = {shape: tested(shape) for shape in SHAPES}
    worst = 0.0
    for shape, (errors, covered) in table.items():
        plain = min(errors["last"], errors["ewma 0.2"])
        worst = max(worst, errors["chosen"] / plain)
        line = "  ".join(f"{name} {error:.3f}" for name, error in errors.items())
        print(f"{shape:7} {line}  covered {covered:.2f}", flush=True)
    report(
        "bench-forecast",
        worst,
        TARGET,
        met=worst <= TARGET,
        unit="error of the choice over the better of last value and EWMA, worst shape",
        errors={shape: {name: round(e, 4) for name, e in errors.items()} for shape, (errors, _) in table.items()},
        covered={shape: round(covered, 3) for shape, (_, covered) in table.items()},
        horizon=LEAD,
        season=DAY,
        n=len(SEEDS),
    )


def tested(shape: str) -> tuple[dict[str, float], float]:
    """The median over seeds of each method's error, and of the band's cover."""
    runs = [one(SHAPES[shape](random.Random(seed), DAYS * DAY)) for seed in SEEDS]
    names = [*METHODS, "chosen"]
    return {name: median([errors[name] for errors, _ in runs]) for name in names}, median([c for _, c in runs])


def one(counts: list[float]) -> tuple[dict[str, float], float]:
    casters = {name: Forecaster(horizon=LEAD, season=DAY, methods=[name]) for name in METHODS}
    casters["chosen"] = Forecaster(horizon=LEAD, season=DAY)
    said: dict[str, list[float]] = {name: [] for name in casters}
    upper = []
    for count in counts:
        for name, caster in casters.items():
            caster.step(count)
            said[name].append(caster.ahead().count)
        upper.append(casters["chosen"].ahead().upper)
    half = len(counts) // 2
    came = counts[half + LEAD :]
    mean = fmean(came)
    errors = {
        name: fmean(abs(a - b) for a, b in zip(came, told[half:-LEAD], strict=True)) / mean
        for name, told in said.items()
    }
    return errors, fmean(a <= b for a, b in zip(came, upper[half:-LEAD], strict=True))


if __name__ == "__main__":
    main()
