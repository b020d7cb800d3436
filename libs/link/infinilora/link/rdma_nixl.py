"""A Transport over NIXL, which moves memory of GPUs and hosts by UCX over whatever network is there.

NIXL is an optional package (`pip install nixl`). Its agents find one another by metadata that the ends exchange; a
write's notification reaches the peer after the write itself, and is its tag.
"""

import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from infinilora.link.errors import LinkClosed
from infinilora.link.rdma import PATIENCE_S, Fabric
from infinilora.protocol.errors import Unavailable

_CARD = struct.Struct("<QII")
_TAG = struct.Struct("<Q")
_SEGMENTS = ("DRAM", "VRAM")
_FAILED, _DONE = "ERR", "DONE"


def nixl_fabric(device: torch.device) -> Fabric:
    """What a process lends to rdma links through NIXL. Unavailable where the package or its UCX plugin is missing."""
    try:
        from nixl import _bindings
        from nixl._api import nixl_agent, nixl_agent_config
    except (ImportError, OSError) as error:
        raise Unavailable(
            f"no rdma link: the package nixl cannot be used ({error}); install it: pip install nixl"
        ) from error

    errors = _errors_of(_bindings)

    def make_transport(region: Tensor, staging: Tensor) -> NixlTransport:
        with _links_break(errors):
            agent = nixl_agent(f"infinilora-{secrets.token_hex(8)}", nixl_agent_config(backends=["UCX"]))
            if "UCX" not in agent.backends:
                found = ", ".join(agent.plugin_list) or "none"
                raise Unavailable(f"no rdma link: nixl has no UCX plugin; found {found}")
            return NixlTransport(agent, region, staging, errors)

    return Fabric(device, make_transport)


def _errors_of(bindings: object) -> tuple[type[Exception], ...]:
    """What NIXL raises: a class for each of its status codes, with no base of their own; RuntimeError for the rest."""
    named = (value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception))
    return (*named, RuntimeError)


@contextmanager
def _links_break(errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """An error of NIXL is the end of the link, and of nothing else."""
    try:
        yield
    except errors as error:
        raise LinkClosed(f"the link broke: nixl: {type(error).__name__}: {error}") from error


class NixlTransport:
    """Owns an agent and the registration of both tensors. `card`: address, device and kind of the region, metadata."""

    def __init__(self, agent: Any, region: Tensor, staging: Tensor, errors: tuple[type[Exception], ...]) -> None:
        self._agent = agent
        self._errors = errors
        self._tensors = region, staging
        self._device = max(region.get_device(), 0)
        self._segment = _SEGMENTS[region.is_cuda]
        self._registered = [agent.register_memory(tensor) for tensor in self._tensors]
        place = _CARD.pack(region.data_ptr(), self._device, region.is_cuda)
        self.card = place + agent.get_agent_metadata()
        self._peer = ""
        self._peer_place = 0, 0, ""

    def connect(self, card: bytes) -> None:
        if len(card) <= _CARD.size:
            raise LinkClosed(f"the peer's card has {len(card)} bytes; wanted more than {_CARD.size}")
        address, device, is_cuda = _CARD.unpack_from(card)
        with _links_break(self._errors):
            self._peer = self._agent.add_remote_agent(card[_CARD.size :])
        if isinstance(self._peer, bytes):
            self._peer = self._peer.decode()
        self._peer_place = address, device, _SEGMENTS[bool(is_cuda)]

    def put(self, at: int, peer_at: int, num_bytes: int, tag: int) -> None:
        address, device, segment = self._peer_place
        source = self._tensors[1].data_ptr() + at
        with _links_break(self._errors):
            local = self._agent.get_xfer_descs([(source, num_bytes, self._device)], self._segment)
            remote = self._agent.get_xfer_descs([(address + peer_at, num_bytes, device)], segment)
            handle = self._agent.initialize_xfer("WRITE", local, remote, self._peer, _TAG.pack(tag))
            try:
                self._finish(handle, tag)
            finally:
                self._agent.release_xfer_handle(handle)

    def _finish(self, handle: Any, tag: int) -> None:
        """Wait until the write is done. The agent sends its notification while it is asked for the state."""
        deadline = time.monotonic() + PATIENCE_S
        state = self._agent.transfer(handle)
        while state not in (_DONE, _FAILED) and time.monotonic() < deadline:
            time.sleep(0)
            state = self._agent.check_xfer_state(handle)
        if state != _DONE:
            raise LinkClosed(f"the link broke: the write of message {tag} is {state}")

    def has_come(self, tag: int) -> bool:
        with _links_break(self._errors):
            return bool(self._agent.check_remote_xfer_done(self._peer, _TAG.pack(tag)))

    def close(self) -> None:
        with suppress(*self._errors):  # of a card that is gone nothing can be given back
            for registered in self._registered:
                self._agent.deregister_memory(registered)
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
