"""How fast adapters may be loaded while rows of resident ones are served. Pure: told the time; no I/O.

Loads take bytes from a bucket. While steps of resident adapters come, it is refilled with a share of what loading has
been measured to bring for its processor time; while none come, nobody waits. A load alone is never stretched to more
than MOST_STRETCHED_S.
"""

from dataclasses import dataclass

QUIET_AFTER_S = 0.1
"""Without a step for so long, resident adapters are not in use."""
MOST_STRETCHED_S = 10.0
_KEPT = 0.9
"""Of what is known of the loading rate, at each new layer."""


@dataclass(slots=True)
class Pace:
    """`share` of one core for all loads together, while others are served. 1: loads never wait."""

    share: float = 1.0
    most_stretched_s: float = MOST_STRETCHED_S
    _bytes: float = 0.0
    _seconds: float = 0.0
    _stepped_s: float = float("-inf")
    _paid_at_s: float = float("-inf")
    """When the bucket will have refilled what was taken from it beyond what it held."""

    def stepped(self, now: float) -> None:
        """Rows of a resident adapter are being served. From any thread."""
        self._stepped_s = now

    def pause_s(self, num_bytes: int, seconds: float, now: float, *, total_bytes: int) -> float:
        """How long a load of `total_bytes` rests after `num_bytes` that it brought in `seconds` of processor time.

        Not thread-safe.
        """
        self._bytes = _KEPT * self._bytes + num_bytes
        self._seconds = _KEPT * self._seconds + seconds
        if self.share >= 1 or now - self._stepped_s > QUIET_AFTER_S or not num_bytes:
            self._paid_at_s = now
            return 0.0
        bytes_s = max(self.share * self._bytes / max(self._seconds, 1e-9), total_bytes / self.most_stretched_s)
        self._paid_at_s = max(self._paid_at_s, now) + num_bytes / bytes_s
        return self._paid_at_s - now
