"""What the head of an engine knows of one follower: how far its leases are, as it said last."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infinilora.engine.shards.channel import Channel
from infinilora.engine.shards.messages import LeaseNews, Order
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Digest


@dataclass(slots=True)
class _Wanted:
    number: int
    news: LeaseNews | None = None


class HeardFollower:
    """One follower that runs. `listen` begins its reading thread, which ends with the follower, or with `close`."""

    def __init__(self, shard: int, channel: Channel) -> None:
        self._shard = shard
        self._channel = channel
        self._lock = threading.Lock()
        self._wanted: dict[Digest, _Wanted] = {}
        self._closing = False

    def listen(self, on_news: Callable[[], None], on_death: Callable[[BaseException], None]) -> None:
        """Both are called from the reading thread."""
        name = f"engine shard {self._shard}"
        threading.Thread(target=self._read, args=(on_news, on_death), name=name, daemon=True).start()

    def send(self, order: Order) -> None:
        """Any thread. A follower that is gone hears nothing: its death is told by the reading thread."""
        try:
            self._channel.send(order)
        except OSError as error:
            raise Unavailable(f"engine shard {self._shard} is gone: {error}") from error

    def wanted(self, digest: Digest, number: int) -> None:
        with self._lock:
            self._wanted[digest] = _Wanted(number)

    def dropped(self, digest: Digest) -> None:
        with self._lock:
            self._wanted.pop(digest, None)

    def news(self, digest: Digest) -> LeaseNews | None:
        """The latest of the want that is open; None before any."""
        with self._lock:
            wanted = self._wanted.get(digest)
            return wanted.news if wanted else None

    def doubt(self, digests: Iterable[Digest]) -> None:
        """Some shard lost these in a step: believe nothing of them until it is told again."""
        with self._lock:
            for digest in digests:
                if wanted := self._wanted.get(digest):
                    wanted.news = None

    def close(self) -> None:
        """End the follower."""
        self._closing = True
        self._channel.close()

    def _read(self, on_news: Callable[[], None], on_death: Callable[[BaseException], None]) -> None:
        while (report := self._channel.recv()) is not None:
            if not isinstance(report, LeaseNews):
                on_death(Internal(f"engine shard {self._shard} sent {type(report).__name__} while it runs"))
                return
            with self._lock:
                wanted = self._wanted.get(report.digest)
                if wanted and wanted.number == report.number:
                    wanted.news = report
            on_news()
        if not self._closing:
            on_death(Unavailable(f"engine shard {self._shard} ended"))
