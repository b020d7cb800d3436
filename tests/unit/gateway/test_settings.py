"""What a gateway's operator may set, and what is refused at the start."""

from typing import Any

import pytest
from pydantic import ValidationError

from infinilora.gateway.settings import Settings

ADDRESSES: dict[str, Any] = {
    "nats_url": "nats://127.0.0.1:1",
    "redis_url": "redis://127.0.0.1:1",
    "store_url": "file:///tmp/x",
}


@pytest.mark.parametrize("rank", [1, 64, 1 << 20])
def test_the_highest_rank_is_the_operators_to_say(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILORA_MAX_RANK", str(rank))
    assert Settings(**ADDRESSES).max_rank == rank


@pytest.mark.parametrize("rank", ["0", "-1", "sixty-four", "1048577", ""])
def test_a_rank_that_is_none_is_refused_at_the_start(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILORA_MAX_RANK", rank)
    with pytest.raises(ValidationError, match="max_rank"):
        Settings(**ADDRESSES)


@pytest.mark.parametrize("aliases", ["prod", "prod=", "=tiny", "a=b=c", "prod=tiny,prod=other"])
def test_aliases_that_name_nothing_are_refused_at_the_start(aliases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILORA_MODEL_ALIASES", aliases)
    with pytest.raises(ValidationError, match="model_aliases"):
        Settings(**ADDRESSES)


def test_aliases_may_be_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILORA_MODEL_ALIASES", " prod = tiny , org/tiny=tiny,")
    assert Settings(**ADDRESSES).aliases == {"prod": "tiny", "org/tiny": "tiny"}
