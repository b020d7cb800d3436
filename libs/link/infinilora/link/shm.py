"""The `shm` back-end: two processes of one host and one file. Chooses between the native and the Python port."""

from infinilora.kernels import native
from infinilora.link.engine_end import EngineEnd
from infinilora.link.layout import RingFile
from infinilora.link.pyring import PythonEnginePort, PythonServerPort, can_order_stores
from infinilora.link.ring import NativeEnginePort, NativeServerPort, RingLibrary
from infinilora.link.server_end import ServerEnd

SPIN_S = 30e-6
"""How long a waiter polls before it sleeps: about one round trip. On few cores, longer steals from the peer."""


def is_available() -> bool:
    return native.load() is not None or can_order_stores()


def engine_end(
    ring: RingFile, *, spin_s: float = SPIN_S, is_native: bool = True, make: type[EngineEnd] = EngineEnd
) -> EngineEnd:
    """The engine's end of a mapped link file; without the native library, or when told so, in Python."""
    library = native.load() if is_native else None
    if library is None:
        return make(PythonEnginePort(ring))
    return make(NativeEnginePort(RingLibrary(library), ring, spin_s=spin_s))


def server_end(ring: RingFile, *, spin_s: float = SPIN_S, is_native: bool = True) -> ServerEnd:
    """The server's end of a mapped link file."""
    library = native.load() if is_native else None
    if library is None:
        return ServerEnd(PythonServerPort(ring))
    return ServerEnd(NativeServerPort(RingLibrary(library), ring, spin_s=spin_s))
