"""An rdma fabric inside one process: a thread in place of the network card. It moves payloads after their headers.

Why a double: no test machine has such a card. It is late on purpose: a receiver that trusts a header alone reads what
was there before.
"""

import queue
import random
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from infinilora.link.rdma import Fabric


class LoopbackTransport:
    """One end. Its puts are done in order by its own thread."""

    def __init__(self, known: dict[bytes, "LoopbackTransport"], region: Tensor, staging: Tensor) -> None:
        self.card = secrets.token_bytes(16)
        self.region = region
        self.tags: set[int] = set()
        self.is_closed = False
        self._known = known
        self._staging = staging
        self._peer: LoopbackTransport | None = None
        self._puts: queue.SimpleQueue[tuple[int, int, int, int] | None] = queue.SimpleQueue()
        self._dice = random.Random(0)
        self._card_thread = threading.Thread(target=self._work, name="loopback-card", daemon=True)
        self._card_thread.start()
        known[self.card] = self

    def connect(self, card: bytes) -> None:
        self._peer = self._known[card]

    def put(self, at: int, peer_at: int, num_bytes: int, tag: int) -> None:
        self._puts.put((at, peer_at, num_bytes, tag))

    def _work(self) -> None:
        while (job := self._puts.get()) is not None:
            at, peer_at, num_bytes, tag = job
            time.sleep(self._dice.choice((0.0, 0.0005, 0.002)))
            assert self._peer is not None
            self._peer.region[peer_at : peer_at + num_bytes] = self._staging[at : at + num_bytes]
            self._peer.tags.add(tag)

    def has_come(self, tag: int) -> bool:
        if tag in self.tags:
            self.tags.remove(tag)
            return True
        return False

    def close(self) -> None:
        self.is_closed = True
        self._puts.put(None)


Make = Callable[[dict[bytes, LoopbackTransport], Tensor, Tensor], LoopbackTransport]


def loopback_fabric() -> Fabric:
    return loopback_fabrics()[0]


def loopback_fabrics(*cards: Make) -> tuple[Fabric, ...]:
    """What each of two processes lends to their links, which its own kind of card moves; one sound one for none."""
    known: dict[bytes, LoopbackTransport] = {}
    return tuple(Fabric(torch.device("cpu"), partial(card, known)) for card in cards or (LoopbackTransport,))
