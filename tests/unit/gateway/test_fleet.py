"""The gateway's calls to engines: what is left of them."""

import time

import pytest

from infinilora.gateway.fleet import Engine, Fleet
from infinilora.protocol.control import Beat
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.generate_pb2 import GenerateRequest
from infinilora.runtime.membership import Member
from infinilora.runtime.rpc import Channels

NOBODY = Engine("e/1", "e", "127.0.0.1:1")


async def test_the_channel_to_an_engine_is_kept_until_nobody_is_known_there() -> None:
    beat = Beat(kind="engine", id="e", incarnation="1", seq=1, state="ready", address=NOBODY.address)
    members = [Member(beat, 0.0, health="dead")]
    async with Channels() as channels:
        fleet = Fleet(lambda: members, channels)
        for _ in range(2):
            with pytest.raises(Unavailable):
                async for _ in fleet.generate(NOBODY, GenerateRequest(), time.monotonic() + 5):
                    pass
        await fleet.forget_gone()
        assert list(channels._channels) == [NOBODY.address]
        members.clear()
        await fleet.forget_gone()
        assert not channels._channels
