"""What a placement costs, in one unit: requests that wait at any moment (requests/s times seconds each). Pure.

    lacking     a request whose adapter is nowhere waits for a load, then is served at the worst place there is;
                each copy that a hot adapter lacks costs a share of that
    crowding    a request waits in proportion to how busy its group is, against an evenly loaded fleet
    leaving     a copy that is given up has to be loaded anew some day; spread over `horizon_s`

All three are sums over adapters, groups and copies, so a change is priced by what it touches. Pins have no price:
no plan that holds more of them is worse.
"""

from dataclasses import dataclass

TOUCHES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
"""Where the broken line that stands for the square touches it. Between two, moves gain nothing: a dead band."""
STEEPEST = 2 * TOUCHES[-1]


@dataclass(frozen=True, slots=True)
class Costs:
    """What the objective depends on. Seconds are of one request unless said otherwise."""

    load_s: float = 0.1
    """A cold load, whatever the size."""
    load_bytes_per_s: float = 1e9
    wait_s: float = 0.005
    """At a LoRA server of an evenly loaded fleet."""
    horizon_s: float = 300.0
    """A move must pay for its load within so long."""
    stay: float = 0.25
    """A copy that is there is worth this much more than its heat says, at most: what swings is not followed."""
    copy_worth: float = 0.1
    """What lacking all further copies costs, against lacking the adapter."""

    def loading_s(self, num_bytes: int) -> float:
        return self.load_s + num_bytes / self.load_bytes_per_s

    def missing_s(self, num_bytes: int) -> float:
        """What a request loses whose adapter is nowhere."""
        return self.loading_s(num_bytes) + STEEPEST * self.wait_s

    def leaving(self, rps: float, num_bytes: int, copies: int, *, is_pinned: bool) -> float:
        """Of one copy. An adapter that nobody asks for is not loaded again, so it leaves for nothing."""
        moving = self.loading_s(num_bytes) / self.horizon_s
        return moving if is_pinned else min(moving, self.stay * rps / copies * self.missing_s(num_bytes))

    def crowding(self, load: float, fair: float) -> float:
        """Of one group with `load` requests/s, where an even spread by speed would give it `fair`."""
        if not fair:
            return 0.0
        # The square of the ratio by its tangents: exact in TOUCHES, a little less between, a line beyond.
        ratio = load / fair
        at = touch(ratio)
        return self.wait_s * fair * at * (2 * ratio - at)


def touch(ratio: float) -> float:
    """Where the tangent touches that stands for the square of `ratio`: the nearest of TOUCHES."""
    return round(ratio * 4) / 4 if ratio < TOUCHES[-3] else min(max(round(ratio), TOUCHES[-3]), TOUCHES[-1])
