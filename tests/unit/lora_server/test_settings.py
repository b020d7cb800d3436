from pathlib import Path

import pytest

from infinilora.lora_server.settings import Settings
from infinilora.runtime.settings import read

NEEDED = {
    "INFINILORA_NATS_URL": "nats://h:1",
    "INFINILORA_REDIS_URL": "redis://h:1",
    "INFINILORA_STORE_URL": "file:///s",
    "INFINILORA_BASE": "m",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in NEEDED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_what_is_not_said_is_derived(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("INFINILORA_GROUP", "g")
    environment.setenv("INFINILORA_POOL_BYTES", str(100 << 20))
    settings = read(Settings)
    assert settings.id == "g"
    assert settings.slots == 100
    assert settings.cache == Path(".var/cache")
    assert settings.link_backends == ("cuda", "shm", "tcp"), "the first where the device is one"


def test_back_ends_are_a_comma_list(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("INFINILORA_LINK_BACKENDS", "tcp")
    assert read(Settings).link_backends == ("tcp",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LINK_BACKENDS", "rdma"),
        ("LINK_BACKENDS", "cuda,shm"),
        ("POOL_BYTES", "1"),
        ("THREADS", "0"),
        ("DEVICE", "tpu"),
        ("DEVICE", "cuda:x"),
    ],
)
def test_nonsense_is_refused_by_name(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    environment.setenv(f"INFINILORA_{name}", value)
    with pytest.raises(SystemExit):
        read(Settings)
    assert f"INFINILORA_{name}" in capsys.readouterr().err


def test_a_base_must_be_named(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environment.delenv("INFINILORA_BASE")
    with pytest.raises(SystemExit):
        read(Settings)
    assert "INFINILORA_BASE" in capsys.readouterr().err


def test_a_shard_of_a_group_has_a_name_of_its_own(environment: pytest.MonkeyPatch) -> None:
    for name, value in {"GROUP": "g", "SHAPE": "2x2", "SHARD": "3", "HEAD": "h:1"}.items():
        environment.setenv(f"INFINILORA_{name}", value)
    assert read(Settings).id == "g.3"
    environment.setenv("INFINILORA_SHARD", "0")
    environment.setenv("INFINILORA_HEAD", "")
    assert read(Settings).id == "g"


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"SHAPE": "2"}, "SHAPE"),
        ({"SHAPE": "0x1"}, "SHAPE"),
        ({"SHAPE": "2x2", "SHARD": "4", "HEAD": "h:1"}, "SHARD"),
        ({"SHARD": "1", "HEAD": "h:1"}, "SHARD"),
        ({"SHAPE": "2x2", "SHARD": "1"}, "HEAD"),
        ({"SHAPE": "2x2", "HEAD": "h:1"}, "HEAD"),
        ({"ROWS_PER_S": "-1"}, "ROWS_PER_S"),
        ({"ROWS_PER_S": "inf"}, "ROWS_PER_S"),
    ],
    ids=str,
)
def test_what_is_no_shard_of_its_shape_or_no_speed_is_refused_by_name(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: dict[str, str], name: str
) -> None:
    for key, value in told.items():
        environment.setenv(f"INFINILORA_{key}", value)
    with pytest.raises(SystemExit):
        read(Settings)
    assert f"INFINILORA_{name}" in capsys.readouterr().err


def test_rdma_is_named_beside_the_tcp_that_carries_its_headers(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("INFINILORA_LINK_BACKENDS", "shm, rdma,tcp")
    assert read(Settings).link_backends == ("shm", "rdma", "tcp")
