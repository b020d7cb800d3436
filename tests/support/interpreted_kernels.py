"""What a LoRA server computes with on a GPU, where there is one; else the same kernels, run by Triton's interpreter."""

import torch

from infinilora.kernels.device_sites import DeviceSites
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.device import Device, open_device


class InterpretedKernels(SlotKernels):
    """The device's half of SlotKernels over this machine's memory. The process has TRITON_INTERPRET."""

    def __init__(self, *, num_slots: int, num_layers: int) -> None:
        super().__init__(num_slots=num_slots, num_layers=num_layers)
        self._library = None
        self._device_sites = DeviceSites(num_slots=num_slots, num_layers=num_layers, device=self.device)


def device_and_kernels(*, num_slots: int, num_layers: int) -> tuple[Device, SlotKernels]:
    """Interpreted launches have run when they are made, so that the device is then a host."""
    if torch.cuda.is_available():
        device = open_device("cuda")
        return device, SlotKernels(num_slots=num_slots, num_layers=num_layers, device=device.torch_device)
    return open_device("cpu"), InterpretedKernels(num_slots=num_slots, num_layers=num_layers)
