"""Makes one operation of a service go wrong, once: Python reads this at its start where PYTHONPATH names its directory.

Of an engine it is the norm of every layer; of a LoRA server, every dense site call. Once HANG_DIR has a file of the
service's name, the next call takes the file away and never comes back: in native code, as from a kernel that hangs. The
file says whether Python's lock is held meanwhile; or that the call finds no memory instead.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOLDING = "holding the interpreter"
NO_MEMORY = "no memory"


def hang_if_told(at: Path) -> None:
    try:
        said = at.read_text()
        at.unlink()
    except FileNotFoundError:
        return
    if said == NO_MEMORY:
        import torch

        torch.empty(1 << 62, dtype=torch.uint8)
    library = (ctypes.PyDLL if said == HOLDING else ctypes.CDLL)(None)
    while True:
        library.pause()


def hanging(operation: Callable[..., Any], at: Path) -> Callable[..., Any]:
    def replaced(*arguments: Any, **named: Any) -> Any:
        hang_if_told(at)
        return operation(*arguments, **named)

    return replaced


def in_python(_: Any) -> None:
    """No call is computed by native code alone: what Python computes can be replaced."""


def replace(directory: Path) -> None:
    if "infinilora.engine" in sys.orig_argv:
        from infinilora.kernels import cpu_ops

        cpu_ops.rms_norm = hanging(cpu_ops.rms_norm, directory / "engine")
    if "infinilora.lora_server" in sys.orig_argv:
        from infinilora.kernels.slot_kernels import SlotKernels

        SlotKernels.native_step = in_python  # type: ignore[method-assign, assignment]
        SlotKernels.dense = hanging(SlotKernels.dense, directory / "lora-server")  # type: ignore[method-assign]


if "HANG_DIR" in os.environ:
    replace(Path(os.environ["HANG_DIR"]))
