"""What an engine is told wrongly is refused when it is read, by the name of the variable and what was wanted."""

from pathlib import Path

import pytest

from infinilora.engine.settings import LEAST_POOL_BYTES, Settings
from infinilora.runtime.settings import read


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    needed = {"NATS_URL": "nats://h:1", "REDIS_URL": "redis://h:1", "STORE_URL": "file:///s", "MODEL": "m"}
    for name, value in needed.items():
        monkeypatch.setenv(f"INFINILORA_{name}", value)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("HYBRID_BYTES", "100", f"wanted 0, or at least {LEAST_POOL_BYTES}"),
        ("HYBRID_BYTES", "-1", "greater than or equal to 0"),
        ("POOL_BYTES", "100", f"greater than or equal to {LEAST_POOL_BYTES}"),
        ("TIMELINE", "/nowhere/at/all/t.json", "found no directory /nowhere/at/all"),
        ("LINK_NARROWING", "fp8", "'never', 'load' or 'always'"),
        ("LINK_BACKENDS", "shm,nvlink", "'cuda', 'shm', 'rdma' or 'tcp'"),
        ("PING_PONG", "maybe", "'auto' or 'on'"),
        ("ENGINE_SHARDS", "0", "greater than or equal to 1"),
        ("LOAD_SHARE", "0", "greater than 0"),
        ("STEP_LIMIT_S", "inf", "finite"),
        ("METRICS_LISTEN", "9100", "wanted host:port"),
    ],
)
def test_nonsense_is_refused_by_name_and_with_what_was_wanted(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, wanted: str
) -> None:
    environment.setenv(f"INFINILORA_{name}", value)
    with pytest.raises(SystemExit):
        read(Settings)
    told = capsys.readouterr().err
    assert f"INFINILORA_{name}" in told
    assert wanted in told


def test_what_makes_sense_is_taken(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("INFINILORA_HYBRID_BYTES", str(LEAST_POOL_BYTES))
    environment.setenv("INFINILORA_TIMELINE", str(tmp_path / "t.json"))
    environment.setenv("INFINILORA_METRICS_LISTEN", "")
    settings = read(Settings)
    assert (settings.hybrid_bytes, settings.timeline, settings.metrics_listen) == (
        LEAST_POOL_BYTES,
        tmp_path / "t.json",
        "",
    )
