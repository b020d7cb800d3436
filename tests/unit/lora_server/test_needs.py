"""What a LoRA server counts, and against whose memory: the pool lies where deltas are computed."""

import pytest
import torch

from infinilora.lora_server.needs import check_memory, terms_of
from infinilora.lora_server.settings import Settings
from infinilora.protocol.errors import InvalidRequest

GIB = 1 << 30
POOL = "adapters in the pool"


def settings(**more: object) -> Settings:
    urls = {"nats_url": "nats://127.0.0.1:1", "redis_url": "redis://127.0.0.1:1", "store_url": "file:///nowhere"}
    return Settings.model_validate({**urls, "base": "", "pool_bytes": GIB, **more})


def test_the_pool_is_counted_where_deltas_are_computed() -> None:
    in_host, on_device = terms_of(settings())
    assert on_device == []
    beside, pool = terms_of(settings(device="cuda:1"))
    assert [(term.name, term.num_bytes) for term in pool] == [(POOL, GIB)]
    assert in_host == pool + beside


def test_a_pool_that_a_device_has_no_room_for_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def tell(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return GIB // 2, 4 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", tell)
    device = torch.device("cuda", 1)
    with pytest.raises(InvalidRequest, match=r"the memory of cuda:1 is 4,294,967,296 bytes.*INFINILORA_POOL_BYTES"):
        check_memory(settings(device="cuda:1"), device)
    check_memory(settings(device="cuda:1", pool_bytes=GIB // 4), device)
    assert asked == [device, device]
