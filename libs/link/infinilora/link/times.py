"""How long site calls took on one link: counts for each bound, written by the serving thread alone.

Native code and Python write the same memory (`Times` in native/server_end.h), one after the other.
"""

import ctypes
from bisect import bisect_left
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_uint64, c_void_p


class _Record(Structure):
    _fields_ = (
        ("calls", c_uint64),
        ("last_ns", c_int64),
        ("sum_ns", c_int64),
        ("bounds", c_void_p),
        ("counts", c_void_p),
        ("num_bounds", c_uint64),
    )


class SiteTimes:
    """A histogram of seconds. `bounds_s` rise; a call that took at most bounds_s[i] is counted at i."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds = (c_int64 * len(bounds_s))(*(round(bound * 1e9) for bound in bounds_s))
        self._counts = (c_uint64 * (len(bounds_s) + 1))()
        self._record = _Record(
            bounds=ctypes.addressof(self._bounds),
            counts=ctypes.addressof(self._counts),
            num_bounds=len(bounds_s),
        )
        self.address = ctypes.addressof(self._record)

    def add(self, started_s: float, ended_s: float) -> None:
        """One call, by `time.perf_counter`."""
        took_ns = round((ended_s - started_s) * 1e9)
        self._counts[bisect_left(self._bounds, took_ns)] += 1
        self._record.calls += 1
        self._record.sum_ns += took_ns
        self._record.last_ns = round(ended_s * 1e9)

    @property
    def calls(self) -> int:
        return int(self._record.calls)

    @property
    def last_s(self) -> float:
        """When the latest call ended, by `time.perf_counter`."""
        return float(self._record.last_ns) / 1e9

    @property
    def sum_s(self) -> float:
        return float(self._record.sum_ns) / 1e9

    @property
    def counts(self) -> list[int]:
        """Calls for each bound, and those that took longer than the last."""
        return list(self._counts)
