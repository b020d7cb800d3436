"""The back-end `local`: what the coordinator wants is had, within what this machine was said to run."""

import asyncio
from typing import cast

import msgspec
import pytest

from infinilora.cli.follow import Range, follow
from infinilora.cli.stack import Stack
from infinilora.protocol.ids import Fingerprint
from infinilora.protocol.scale import Desired


class NotedStack:
    """Notes what it was told to run."""

    served_name = "tiny"

    def __init__(self, coordinator_url: str) -> None:
        self.coordinator_url = coordinator_url
        self.counts: list[int] = []

    async def set_engines(self, count: int) -> None:
        self.counts.append(count)

    async def set_groups(self, count: int) -> None:
        self.counts.append(count)


@pytest.mark.parametrize(
    ("engines", "groups", "run", "told"),
    [
        (2, 1, [2, 1], []),
        (0, 0, [0, 0], []),
        (99, 7, [3, 2], ["99 engines and 7 groups are wanted; at most 3 and 2 run on this machine"]),
    ],
)
async def test_no_more_is_run_than_this_machine_may(engines: int, groups: int, run: list[int], told: list[str]) -> None:
    desired = Desired(base=Fingerprint("b"), model="tiny", epoch=1, engines=engines, groups=groups)
    body = msgspec.json.encode({"desired": [desired]})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    events: list[str] = []
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        stack = NotedStack(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        within, noted = Range(engines=(0, 3), groups=(0, 2)), lambda _, event: events.append(event)
        following = asyncio.create_task(follow(cast(Stack, stack), noted, within=within, every_s=0.01))
        while len(stack.counts) < 6:
            await asyncio.sleep(0.01)
        following.cancel()
    assert stack.counts[:6] == run * 3
    assert events == told
