"""Memory that a server's end of a link shows as one arena: plans on the host, payloads on a device."""

import torch
from torch import Tensor
from typing_extensions import override

from infinilora.link.control import MAX_BODY_BYTES
from infinilora.link.layout import Arena

DEVICE_AT = MAX_BODY_BYTES
"""Offsets from here on are on the device; plans lie before it, on the host."""


class Staging(Arena):
    """`host` holds one plan; `device_bytes` uint8 what comes or goes, at DEVICE_AT and after."""

    def __init__(self, host: bytearray, device_bytes: Tensor) -> None:
        super().__init__(host)
        self._device = {dtype: device_bytes.view(dtype) for dtype in self._wholes}

    @override
    def tensor(self, dtype: torch.dtype, offset: int, rows: int, cols: int) -> Tensor:
        if offset < DEVICE_AT:
            return super().tensor(dtype, offset, rows, cols)
        return self._device[dtype].as_strided((rows, cols), (cols, 1), (offset - DEVICE_AT) // dtype.itemsize)
