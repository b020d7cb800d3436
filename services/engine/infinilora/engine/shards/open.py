"""Begins the followers of an engine and meets them: the head's side. Blocking: run it in a thread.

head                                   followers
  starts them, a socket pair each
                                       Hello
  meets them in a process group <->    the same
  Opening ->
  reads its weights                    read theirs, open their LoRA back-end
                                       Ready
"""

import logging
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store

from infinilora.engine.assemble import LoadedModel, ModelOptions, hold_model, plan_model
from infinilora.engine.lora.interface import LoraBackend
from infinilora.engine.model.cut import Cut
from infinilora.engine.settings import Settings, shard_env
from infinilora.engine.shards.channel import Channel
from infinilora.engine.shards.collective import join_shards
from infinilora.engine.shards.head import HeadDecoder, HeadLora
from infinilora.engine.shards.heard import HeardFollower
from infinilora.engine.shards.messages import Forget, Hello, Opening, Ready
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Digest

logger = logging.getLogger(__name__)

END_S = 5.0
"""What a follower may take to end after the head has gone."""


class Head:
    """The other shards of this engine. `load` once, then `lead`."""

    def __init__(self, channels: list[Channel], store: Store) -> None:
        self._channels = channels
        self._store = store
        self.followers = [HeardFollower(shard, channel) for shard, channel in enumerate(channels, 1)]

    @property
    def num_shards(self) -> int:
        return len(self._channels) + 1

    def load(self, options: ModelOptions) -> LoadedModel:
        """Have all shards read their weights; all can run steps when it returns."""
        for shard, channel in enumerate(self._channels, 1):
            _expect(Hello, channel, shard)
        cut = Cut(0, self.num_shards)
        plan = plan_model(options, cut)
        for channel in self._channels:
            channel.send(Opening(plan.card, plan.sizes))
        shards = join_shards(self._store, cut, options.device)
        model = hold_model(options, plan, shards)
        for shard, channel in enumerate(self._channels, 1):
            _expect(Ready, channel, shard)
        logger.info("engine shards are ready", extra={"shards": self.num_shards})
        return replace(model, decoder=HeadDecoder(model.decoder, shards, self.followers))

    def lead(
        self, own: LoraBackend, on_news: Callable[[], None], on_death: Callable[[BaseException], None]
    ) -> LoraBackend:
        """The back-end of all shards, over this one's. Both callbacks come from other threads."""
        for follower in self.followers:
            follower.listen(on_news, on_death)
        return HeadLora(own, self.followers)

    def forget(self, digest: Digest) -> None:
        for follower in self.followers:
            follower.send(Forget(digest))

    def close(self) -> None:
        for follower in self.followers:
            follower.close()


@contextmanager
def head_of(settings: Settings, num_shards: int) -> Iterator[Head]:
    """Start the followers as children; they have ended when the block has."""
    settings.var_dir.mkdir(parents=True, exist_ok=True)
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="engine-shards-", dir=settings.var_dir) as directory:
        meeting = Path(directory) / "meeting"
        pairs = [socket.socketpair() for _ in range(1, num_shards)]
        head = Head([Channel(ours) for ours, _ in pairs], FileStore(str(meeting), num_shards))
        try:
            for shard, (_, theirs) in enumerate(pairs, 1):
                with theirs:
                    children.append(_start(settings, Cut(shard, num_shards), meeting, theirs.fileno()))
            yield head
        finally:
            head.close()
            for child in children:
                _end(child)


def _start(settings: Settings, cut: Cut, meeting: Path, socket_number: int) -> subprocess.Popen[bytes]:
    arguments = [f"{cut.shard}/{cut.num_shards}", str(meeting), str(socket_number)]
    command = [sys.executable, "-m", "infinilora.engine.shards", *arguments]
    return subprocess.Popen(  # noqa: S603 - our own module
        command, env=shard_env(settings, cut.shard), pass_fds=[socket_number], stdin=subprocess.DEVNULL
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        logger.warning("an engine shard did not end by itself", extra={"pid": child.pid})
        child.kill()
        child.wait()


def _expect(kind: type, channel: Channel, shard: int) -> None:
    found = channel.recv()
    if found is None:
        raise Unavailable(f"engine shard {shard} ended before it was ready; its log says why")
    if not isinstance(found, kind):
        raise Internal(f"engine shard {shard} sent {type(found).__name__}; wanted {kind.__name__}")
