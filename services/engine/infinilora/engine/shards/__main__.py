"""`python -m infinilora.engine.shards SHARD/NUM MEETING SOCKET`: a follower, started by its engine's head alone.

Settings are the head's, from the same environment. A stop is the head's to hear of: this process ends with it.
"""

import asyncio
import socket
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from infinilora.engine.assemble import ModelPlan, hold_model
from infinilora.engine.backends import Bell, open_lora, reach_out
from infinilora.engine.model.cut import Cut
from infinilora.engine.options import model_options
from infinilora.engine.settings import Settings, of_shard
from infinilora.engine.shards.channel import Channel
from infinilora.engine.shards.collective import join_shards
from infinilora.engine.shards.follower import Follower
from infinilora.engine.shards.messages import Hello, Opening, Ready
from infinilora.protocol.errors import Internal
from infinilora.runtime import log
from infinilora.runtime.service import Service, run
from infinilora.runtime.settings import read


async def follow(settings: Settings, cut: Cut, meeting: Path, sock: socket.socket, service: Service) -> None:
    """Run until the head is gone."""
    torch.set_num_threads(1)
    channel = Channel(sock)
    channel.send(Hello())
    opening = await asyncio.to_thread(channel.recv)
    if opening is None:
        return
    if not isinstance(opening, Opening):
        raise Internal(f"the head of this engine sent {type(opening).__name__}; wanted Opening")
    options = model_options(settings, cut.num_shards)
    shards = await asyncio.to_thread(join_shards, FileStore(str(meeting), cut.num_shards), cut, options.device)
    model = await asyncio.to_thread(hold_model, options, ModelPlan(opening.card, opening.sizes), shards)
    bell = Bell()
    async with AsyncExitStack() as stack:
        around = await reach_out(settings, stack)
        lora = await stack.enter_async_context(open_lora(settings, model, service, around, bell))
        follower = Follower(channel, shards, model.decoder, lora.backend, lora.forget)
        bell.connect(follower.ring)
        channel.send(Ready())
        service.ready()
        await asyncio.to_thread(follower.run)


def main() -> None:
    numbers, meeting, socket_number = sys.argv[1:]
    cut = Cut(*map(int, numbers.split("/")))
    settings = of_shard(read(Settings), cut.shard)
    log.setup("engine", settings.log_level, process_id=settings.engine_id)
    sock = socket.socket(fileno=int(socket_number))
    run("engine shard", partial(follow, settings, cut, Path(meeting), sock), drain_s=2 * settings.drain_s)


if __name__ == "__main__":
    main()
