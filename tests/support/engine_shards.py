"""An engine of several shards in one process: a thread for each, with the sockets and sums that processes have."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from infinilora.engine.assemble import LoadedModel, ModelOptions, ModelPlan, hold_model
from infinilora.engine.lora.interface import LoraBackend
from infinilora.engine.model.cut import Cut
from infinilora.engine.shards.channel import Channel
from infinilora.engine.shards.collective import join_shards
from infinilora.engine.shards.follower import Follower
from infinilora.engine.shards.messages import Hello, Opening, Ready
from infinilora.engine.shards.open import Head
from support.engines import TestEngine

WAIT_S = 20.0

LoraOf = Callable[[LoadedModel, Callable[[], None]], LoraBackend]
"""Makes a shard's own back-end, which calls the function when it has news."""


@dataclass
class ShardedEngine:
    """What an engine is made of; `finish` drives one until all that was asked of it has ended."""

    model: LoadedModel
    lora: LoraBackend
    bell: threading.Event
    deaths: list[BaseException]

    def finish(self, engine: TestEngine) -> None:
        while engine.loop._jobs or engine.loop._inbox:
            self.bell.clear()
            if not engine.turn():
                assert self.bell.wait(WAIT_S), "nothing runs, and no shard has news"
            assert not self.deaths
        engine.loop.check_idle()


@contextmanager
def sharded(directory: Path, num_shards: int, lora_of: LoraOf, **options: Any) -> Iterator[ShardedEngine]:
    """All shards of an engine of the model in `directory`; gone when the block ends."""
    store, bell = HashStore(), threading.Event()
    settings = ModelOptions(directory=directory, **{"kv_block": 4, **options})
    deaths: list[BaseException] = []
    pairs = [socket.socketpair() for _ in range(1, num_shards)]
    threads = [
        threading.Thread(
            target=_follow, args=(Channel(theirs), Cut(shard, num_shards), store, settings, lora_of, deaths)
        )
        for shard, (_, theirs) in enumerate(pairs, 1)
    ]
    for thread in threads:
        thread.start()
    head = Head([Channel(ours) for ours, _ in pairs], store)
    try:
        model = head.load(settings)
        lora = head.lead(lora_of(model, bell.set), bell.set, deaths.append)
        yield ShardedEngine(model, lora, bell, deaths)
    finally:
        head.close()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        for _, theirs in pairs:
            theirs.close()


def _follow(
    channel: Channel, cut: Cut, store: Store, options: ModelOptions, lora_of: LoraOf, deaths: list[BaseException]
) -> None:
    """What `python -m infinilora.engine.shards` does, without a control plane."""
    try:
        channel.send(Hello())
        opening = channel.recv()
        if not isinstance(opening, Opening):
            return
        shards = join_shards(store, cut, options.device)
        model = hold_model(options, ModelPlan(opening.card, opening.sizes), shards)
        rings: list[Callable[[], None]] = []

        def ring_all() -> None:
            for ring in rings:
                ring()

        lora = lora_of(model, ring_all)
        follower = Follower(channel, shards, model.decoder, lora, lambda _digest: None)
        rings.append(follower.ring)
        channel.send(Ready())
        follower.run()
        lora.close()
    except BaseException as error:
        deaths.append(error)
        raise
