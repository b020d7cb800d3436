"""How many rows a step may have: what the time between two tokens leaves room for. Pure; durations are arguments.

A step of n rows takes about fixed_s + n * row_s, and whoever decodes gets one token from it: a step is their TPOT.

    tpot_s x share  |-- fixed_s --|-- decode rows --|------ slack ------|
                                                      prefill rows = slack / row_s

The share grows with what waits to be computed: under load a step takes all the time there is and carries many rows,
with little to do it is short. Where nobody decodes there is nobody to protect, and a step is as large as may be.
"""

from dataclasses import dataclass

IDLE_SHARE = 0.5
"""Of `tpot_s`, while next to nothing waits."""

_KEPT = 0.97
"""Of what is known of the costs, after each further step: a half-life of 23 steps."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What steps took, as a line through (rows, seconds): least squares, older steps count less."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_rows: float = 0.0
    rows_seconds: float = 0.0

    def after(self, rows: int, seconds: float) -> "StepCost":
        """With one more step."""
        return StepCost(
            _KEPT * self.weight + 1.0,
            _KEPT * self.rows + rows,
            _KEPT * self.seconds + seconds,
            _KEPT * self.rows_rows + float(rows) * rows,
            _KEPT * self.rows_seconds + rows * seconds,
        )

    @property
    def row_s(self) -> float:
        """Seconds that one more row takes. 0: unknown.

        The average of a row where steps of one size alone are known; and where larger ones were faster, which is
        chance: rows that cost nothing would be taken without end while somebody decodes.
        """
        if not self.rows:
            return 0.0
        average, spread = self.seconds / self.rows, self.weight * self.rows_rows - self.rows**2
        if spread <= 1e-3 * self.rows**2:
            return average
        slope = (self.weight * self.rows_seconds - self.rows * self.seconds) / spread
        return min(slope, average) if slope > 0.0 else average

    def of(self, rows: int) -> float:
        """Seconds that a step of so many rows should take."""
        if not self.weight:
            return 0.0
        return self.seconds / self.weight + (rows - self.rows / self.weight) * self.row_s


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Rows of a step: at most `max_tokens`; besides those that decode at least `min_tokens`. `tpot_s` 0: always all."""

    max_tokens: int
    min_tokens: int = 64
    tpot_s: float = 0.0


def step_budget(limits: BudgetLimits, cost: StepCost, *, decoding: int, missing: int) -> int:
    """Rows of the next step. `decoding` sequences miss one token; the others miss `missing` tokens together."""
    row_s = cost.row_s
    if not limits.tpot_s or not decoding or not row_s:
        return limits.max_tokens
    pressure = min(missing / limits.max_tokens, 1.0)
    target_s = limits.tpot_s * (IDLE_SHARE + (1.0 - IDLE_SHARE) * pressure)
    slack = int((target_s - cost.of(decoding)) / row_s)
    return min(decoding + max(slack, limits.min_tokens), limits.max_tokens)
