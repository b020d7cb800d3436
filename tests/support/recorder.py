"""What torch is asked for while something runs: shows without a device where the host would wait for one."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "is_nonzero"}
"""What makes the host wait for a device, or the next shape depend on what it finds."""


class Recorder(TorchDispatchMode):
    """Keeps the name of everything torch is asked for, with the shapes that came out."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = found if isinstance(found, (tuple, list)) else (found,)
        shapes = tuple(tuple(t.shape) for t in tensors if isinstance(t, Tensor))
        self.asked.append((func.overloadpacket.__name__, shapes))
        return found
