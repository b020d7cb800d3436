"""What a process of a group is made of fits its base, or is refused with the setting's name."""

import pytest

from infinilora.lora_server.settings import Settings
from infinilora.lora_server.shard import Shard
from infinilora.protocol.errors import InvalidRequest
from support.cards import make_card

WIDE = make_card("llama", num_layers=2, intermediate=1200)
"""A row of down is 2,400 bytes of bf16; one of gate and up comes back as 4,800."""


def settings(**more: object) -> Settings:
    urls = {"nats_url": "nats://127.0.0.1:1", "redis_url": "redis://127.0.0.1:1", "store_url": "file:///nowhere"}
    return Settings.model_validate({**urls, "base": "", "pool_bytes": 1 << 20, **more})


def test_link_buffers_that_hold_no_row_of_the_base_are_refused_at_the_start() -> None:
    with pytest.raises(InvalidRequest, match=r"INFINILORA_LINK_BUFFER_BYTES is 4096; .* takes 4800"):
        Shard(settings(link_buffer_bytes=4096), WIDE)
    Shard(settings(link_buffer_bytes=4800), WIDE)


def test_a_shape_of_more_stages_than_the_base_has_layers_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="layers"):
        Shard(settings(shape="1x3"), WIDE)
