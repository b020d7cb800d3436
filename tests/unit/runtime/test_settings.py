"""What a process does with its environment."""

from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from infinilora.runtime.settings import Address, Common, misspelt, read


class Settings(Common):
    """As a service declares them."""

    threads: int = Field(default=2, ge=1)
    listen: Address = "127.0.0.1:0"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("INFINILORA_NATS_URL", "nats://u:hidden@127.0.0.1:4222")
    monkeypatch.setenv("INFINILORA_REDIS_URL", "redis://:hidden@127.0.0.1:6379/0")
    monkeypatch.setenv("INFINILORA_STORE_URL", "file:///tmp/x")
    monkeypatch.setenv("INFINILORA_S3_SECRET_KEY", "hidden")
    return monkeypatch


def test_the_environment_is_read_with_its_prefix(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("INFINILORA_THREADS", "5")
    environment.setenv("INFINILORA_VAR_DIR", "/tmp/var")
    settings = read(Settings)
    assert (settings.threads, settings.var_dir, settings.log_level) == (5, Path("/tmp/var"), "info")


@pytest.mark.parametrize(("given", "read_as"), [("60", (60,)), ("600, 10,60", (10, 60, 600)), ("5,5", (5,))])
def test_half_lives_are_read_shortest_first(
    environment: pytest.MonkeyPatch, given: str, read_as: tuple[int, ...]
) -> None:
    environment.setenv("INFINILORA_HEAT_HALF_LIVES_S", given)
    assert read(Settings).heat_half_lives_s == read_as


@pytest.mark.parametrize("given", ["", "0,60", "ten", "10,,60", "-5", "1.5"])
def test_half_lives_that_are_none_are_refused(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    environment.setenv("INFINILORA_HEAT_HALF_LIVES_S", given)
    with pytest.raises(SystemExit):
        read(Settings)
    assert "wanted whole seconds" in capsys.readouterr().err


def test_what_is_missing_or_wrong_is_named_and_ends_the_process(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.delenv("INFINILORA_NATS_URL")
    environment.setenv("INFINILORA_THREADS", "0")
    with pytest.raises(SystemExit) as caught:
        read(Settings)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "INFINILORA_NATS_URL" in said
    assert "INFINILORA_THREADS" in said


@pytest.mark.usefixtures("environment")
def test_no_secret_shows_in_a_repr() -> None:
    assert "hidden" not in repr(read(Settings))


@pytest.mark.usefixtures("environment")
def test_settings_do_not_change_and_take_nothing_unknown() -> None:
    settings = read(Settings)
    with pytest.raises(ValidationError, match="frozen"):
        settings.threads = 3
    with pytest.raises(ValidationError, match="nonsense"):
        Settings.model_validate({"nonsense": 1})


@pytest.mark.parametrize("given", ["127.0.0.1:0", "lora-0.lora:7100", "[::]:65535", ""])
def test_an_address_is_a_host_and_a_port(environment: pytest.MonkeyPatch, given: str) -> None:
    environment.setenv("INFINILORA_LISTEN", given)
    assert read(Settings).listen == given


@pytest.mark.parametrize(
    "given", ["7100", "host", ":7100", "host:", "host:70000", "host:-1", "::1:7100", "host:\uff17"]
)
def test_what_is_no_address_is_refused_by_name(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    environment.setenv("INFINILORA_LISTEN", given)
    with pytest.raises(SystemExit):
        read(Settings)
    assert "INFINILORA_LISTEN: Value error, found" in (told := capsys.readouterr().err)
    assert "wanted host:port" in told


def test_a_variable_that_is_nearly_a_setting_is_told_and_starts_all_the_same(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("INFINILORA_THREAD", "5")
    assert read(Settings).threads == 2
    assert capsys.readouterr().err == (
        "INFINILORA_THREAD is no setting of this service; is INFINILORA_THREADS meant?\n"
    )


def test_what_is_spelt_right_and_what_is_like_no_setting_is_passed_over() -> None:
    assert misspelt(Settings, ["INFINILORA_THREADS", "INFINILORA_POOL_BYTES", "THREAD", "INFINILORA_LOG_LEVEL"]) == {}
