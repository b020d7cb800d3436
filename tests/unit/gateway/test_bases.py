"""What the gateway makes of a base model's files in the store: broken ones cost that base, never the process."""

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest

from infinilora.gateway.bases import BaseShelf
from infinilora.protocol import keys
from infinilora.protocol.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from infinilora.runtime.blobs import DirectoryBlobs
from support.gateway_house import byte_tokenizer, publish_base, text_card

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_a_template_that_does_not_compile_leaves_completions(tmp_path: Path) -> None:
    blobs, tokenizer = DirectoryBlobs(tmp_path), byte_tokenizer()
    card = text_card(tokenizer)
    publish_base(blobs, card, tokenizer)
    config = json.dumps({"chat_template": "{% generation %}{{ messages }}{% endgeneration %}"})
    blobs.put(keys.base_file(card.fingerprint, "tokenizer_config.json"), config.encode())
    base = await BaseShelf(blobs).get(card.fingerprint)
    assert await base.encode("hi", param="prompt")
    with pytest.raises(InvalidRequest, match=r"does not compile.*use /v1/completions"):
        base.render(MESSAGES)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "card.json"])
@pytest.mark.parametrize("data", [b"{", b"\xff\xfe"])
async def test_a_file_that_cannot_be_read_is_said_and_is_read_again(tmp_path: Path, name: str, data: bytes) -> None:
    blobs, tokenizer = DirectoryBlobs(tmp_path), byte_tokenizer()
    card = text_card(tokenizer)
    publish_base(blobs, card, tokenizer)
    shelf = BaseShelf(blobs)
    place = keys.base_card(card.fingerprint) if name == "card.json" else keys.base_file(card.fingerprint, name)
    blobs.put(place, data)
    with pytest.raises(Unavailable, match="cannot be read"):
        await shelf.get(card.fingerprint)
    publish_base(blobs, card, tokenizer)
    assert (await shelf.get(card.fingerprint)).card == card


async def test_limits_of_an_engine_that_was_started_anew_are_seen(tmp_path: Path) -> None:
    blobs, tokenizer = DirectoryBlobs(tmp_path), byte_tokenizer()
    card = text_card(tokenizer)
    publish_base(blobs, card, tokenizer)
    shelf = BaseShelf(blobs)
    first = await shelf.get(card.fingerprint)
    await shelf.refresh(card.fingerprint)
    assert await shelf.get(card.fingerprint) is first
    shorter = msgspec.structs.replace(card, max_model_len=card.max_model_len // 2)
    publish_base(blobs, shorter, tokenizer)
    await shelf.refresh(card.fingerprint)
    assert (await shelf.get(card.fingerprint)).card == shorter
    blobs.delete(keys.base_card(card.fingerprint))
    with pytest.raises(Unavailable):
        await shelf.refresh(card.fingerprint)
    assert (await shelf.get(card.fingerprint)).card == shorter


async def test_a_text_far_too_long_keeps_no_stream_waiting(tmp_path: Path) -> None:
    blobs, tokenizer = DirectoryBlobs(tmp_path), byte_tokenizer()
    card = text_card(tokenizer)
    publish_base(blobs, card, tokenizer)
    base = await BaseShelf(blobs).get(card.fingerprint)
    longest_s, is_over = 0.0, asyncio.Event()

    async def look() -> None:
        nonlocal longest_s
        last = time.perf_counter()
        while not is_over.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest_s, last = max(longest_s, now - last), now

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(look())
        started = time.perf_counter()
        with pytest.raises(ContextLengthExceeded, match=r"the prompt has \d+ tokens and leaves no room"):
            await base.encode("the fox jumps over the lazy dog. " * 12_000, param="prompt")
        took_s = time.perf_counter() - started
        is_over.set()
    assert longest_s < took_s / 3
