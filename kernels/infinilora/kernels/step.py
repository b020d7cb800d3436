"""A step's plan as the native library keeps it: site calls that need no Python.

The serving thread of a link loads each plan that it has checked against its holder's grants. Native code computes by
it as long as none of those grants is taken back, and leaves every other call to Python. Mirrors cpu/step.h.
"""

import ctypes
from ctypes import Structure, c_int32, c_int64, c_uint32, c_uint64, c_void_p

from torch import Tensor

_NOBODY = (1 << 64) - 1


class StepRecord(Structure):
    """`il_step`."""

    _fields_ = (
        ("version", c_uint64),
        ("busy", c_uint32),
        ("ready_layers", c_int32),
        ("granted_version", c_uint64),
        ("step_id", c_uint64),
        ("segments", c_void_p),
        ("table", c_void_p),
        ("left_to_python", c_void_p),
        ("slot_stride", c_int64),
        ("num_segments", c_int32),
        ("num_slots", c_int32),
    )


class NativeStep:
    """One for a link. Made by `SlotKernels.native_step`; keeps what its addresses point to."""

    def __init__(
        self, library: ctypes.CDLL, table: ctypes.Array[c_uint64], left_to_python: bytearray, num_slots: int
    ) -> None:
        places = len(left_to_python)
        flags = (ctypes.c_char * places).from_buffer(left_to_python)
        self._keeps = (table, flags)
        self._segments: Tensor | None = None
        self._shut = library.il_step_shut
        self._record = StepRecord(
            granted_version=_NOBODY,
            table=ctypes.addressof(table),
            left_to_python=ctypes.addressof(flags),
            slot_stride=places,
            num_slots=num_slots,
        )
        self.address = ctypes.addressof(self._record)
        self.compute = int(ctypes.cast(library.il_step_compute, c_void_p).value or 0)
        """Address of the function that computes one site call by the record at `address`."""

    def load(self, step_id: int, segments: Tensor, *, ready_layers: int, version: int) -> None:
        """Compute step `step_id` from now on. segments int32 [n, 3] (row_start, rows, slot), in order of rows.

        They were checked against the grants, of which so many had been taken back (`version`). Only while nobody
        computes: the serving thread calls it.
        """
        record = self._record
        record.granted_version = _NOBODY
        self._segments = segments
        record.step_id = step_id
        record.segments, record.num_segments = segments.data_ptr(), len(segments)
        record.ready_layers = ready_layers
        record.granted_version = version

    def unload(self) -> None:
        """Compute nothing until the next `load`."""
        self._record.granted_version = _NOBODY

    @property
    def is_busy(self) -> bool:
        """Whether a call is being computed. Any thread."""
        return bool(self._record.busy)

    def shut(self, version: int) -> None:
        """Something granted was taken back; returns when nothing computes by what was before. Any thread."""
        self._shut(self.address, version)
