import asyncio

import numpy as np
import torch

from infinilora.lora_server.outbox import Message, Outbox
from infinilora.pool.pool import LeaseState
from infinilora.pool.scales import SiteScale
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest

A = Digest("sha256:" + "a" * 64)
ALL = 0b11
"""The sites that the states of these tests have."""


def state(layers: int, *, generation: int = 7) -> LeaseState:
    return LeaseState(A, slot=3, slot_generation=generation, layer_sites=(1, 2, 0), layers_ready=layers)


def kinds(messages: list[Message]) -> list[str | None]:
    return [message.WhichOneof("message") for message in messages]


async def test_a_grant_is_said_once_and_then_only_layers() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL)
    outbox.put(state(0))
    first = await outbox.take()
    assert kinds(first) == ["granted"]
    assert tuple(first[0].granted.layer_sites) == (1, 2, 0)
    outbox.put(state(2))
    assert kinds(await outbox.take()) == ["layers"]


async def test_a_slow_reader_gets_the_newest_state_only() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL)
    for layers in range(4):
        outbox.put(state(layers))
    messages = await outbox.take()
    assert kinds(messages) == ["granted", "layers"]
    assert messages[1].layers.count == 3


async def test_another_tenancy_is_a_new_grant() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL)
    outbox.put(state(3))
    await outbox.take()
    outbox.put(state(1, generation=8))
    messages = await outbox.take()
    assert kinds(messages) == ["granted", "layers"]
    assert messages[0].granted.slot_generation == 8


async def test_a_lost_lease_carries_code_and_words_and_a_later_one_is_granted_anew() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL)
    outbox.put(state(3))
    await outbox.take()
    outbox.put(LeaseState(A, error=AdapterFailed("block 3 is corrupt")))
    (lost,) = await outbox.take()
    assert (lost.failed.code, lost.failed.message) == ("adapter_failed", "block 3 is corrupt")
    outbox.put(state(3))
    assert kinds(await outbox.take()) == ["granted", "layers"]


async def test_what_is_unsent_of_a_lease_given_up_is_void() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL)
    outbox.put(state(3))
    outbox.forget(A)
    outbox.close()
    assert await outbox.take() == []
    assert await outbox.take() == []


async def test_it_is_filled_from_other_threads() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL)
    waiting = asyncio.get_running_loop().run_in_executor(None, outbox.put, state(1))
    async with asyncio.timeout(5):
        assert kinds(await outbox.take()) == ["granted", "layers"]
    await waiting


async def test_an_adapter_with_a_site_that_the_engine_does_not_compute_is_refused_by_its_name() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL)
    beyond = LeaseState(A, slot=3, slot_generation=7, layer_sites=(1, 1 << Site.SHARED_GATE), layers_ready=2)
    outbox.put(beyond)
    (message,) = await outbox.take()
    assert message.failed.code == AdapterFailed.code
    assert "shared_gate of layer 1" in message.failed.message
    assert outbox.take_refused() == [A]
    assert outbox.take_refused() == []


def scaled(layers: int, *, generation: int = 7) -> LeaseState:
    """Of an adapter that scales site 0 of layer 0 and site 1 of layer 1."""
    scales = (SiteScale(0, Site.QKV, torch.arange(3.0)), SiteScale(1, Site.O, torch.full((2,), 0.5)))
    return LeaseState(
        A,
        slot=3,
        slot_generation=generation,
        layer_sites=(1, 2, 0),
        layers_ready=layers,
        scaled_sites=(1, 2, 0),
        scales=scales[:layers],
    )


async def test_a_column_scale_goes_before_the_news_of_its_layer_and_once() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL, scales_columns=True)
    outbox.put(scaled(0))
    (granted,) = await outbox.take()
    assert tuple(granted.granted.scaled_sites) == (1, 2, 0)
    outbox.put(scaled(1))
    first = await outbox.take()
    assert kinds(first) == ["scale", "layers"]
    sent = first[0].scale
    assert (sent.digest, sent.slot, sent.slot_generation, sent.layer, sent.site) == (A, 3, 7, 0, Site.QKV)
    np.testing.assert_array_equal(np.frombuffer(sent.factors, "<f4"), [0, 1, 2])
    outbox.put(scaled(3))
    rest = await outbox.take()
    assert kinds(rest) == ["scale", "layers"]
    assert (rest[0].scale.layer, rest[0].scale.site, rest[1].layers.count) == (1, Site.O, 3)


async def test_a_slow_reader_still_gets_every_scale() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL, scales_columns=True)
    for layers in range(4):
        outbox.put(scaled(layers))
    assert kinds(await outbox.take()) == ["granted", "scale", "scale", "layers"]


async def test_a_new_tenancy_and_a_new_lease_bring_their_scales_again() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL, scales_columns=True)
    outbox.put(scaled(3))
    await outbox.take()
    outbox.put(scaled(3, generation=8))
    again = await outbox.take()
    assert kinds(again) == ["granted", "scale", "scale", "layers"]
    assert {message.scale.slot_generation for message in again[1:3]} == {8}
    outbox.forget(A)
    outbox.put(scaled(3, generation=8))
    assert kinds(await outbox.take()) == ["granted", "scale", "scale", "layers"]


async def test_an_engine_that_scales_no_columns_gets_no_lease_that_needs_it() -> None:
    outbox = Outbox(asyncio.get_running_loop(), ALL)
    outbox.put(scaled(0))
    (message,) = await outbox.take()
    assert message.failed.code == AdapterFailed.code
    assert "scales columns" in message.failed.message
    assert outbox.take_refused() == [A]
    outbox.put(state(3))
    assert kinds(await outbox.take()) == ["granted", "layers"], "an adapter that scales nothing is granted"
