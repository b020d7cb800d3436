"""Models by name: what is found, what is refused, and how the worker that prepares them is heard."""

import io
from pathlib import Path

import pytest

from infinilora.cli import models
from infinilora.cli.stack import Stack
from infinilora.protocol.errors import InvalidRequest, Unavailable

PROGRESS = '{"type":"progress","stage":"downloading","done":3,"total":10}\n'
READY = '{"type":"ready","path":"/m"}\n'
ERROR = '{"code":"unavailable","message":"pip could not download","retryable":true}\n'


def prepared(var_dir: Path, name: str) -> Path:
    path = models.demo_path(name, var_dir)
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_demo_model_is_found_by_its_name_once_it_is_prepared(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="infinilora model prepare smollm2-moe"):
        models.find_model("smollm2-moe", tmp_path)
    path = prepared(tmp_path, "smollm2-moe")
    assert models.find_model("smollm2-moe", tmp_path) == path


def test_a_directory_is_a_model_if_it_has_a_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json does not exist"):
        models.find_model(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert models.find_model(str(tmp_path), tmp_path) == tmp_path


def test_the_workers_progress_is_passed_on_until_it_is_ready() -> None:
    heard: list[tuple[str, int, int]] = []
    assert models._follow(io.StringIO(PROGRESS + READY), lambda *said: heard.append(said))
    assert heard == [("downloading", 3, 10)]


def test_the_workers_error_is_raised_here_as_the_same_leaf() -> None:
    with pytest.raises(Unavailable, match="pip could not download"):
        models._follow(io.StringIO(PROGRESS + ERROR), lambda *_: None)


def test_a_worker_that_ends_without_a_word_has_not_made_it() -> None:
    assert not models._follow(io.StringIO(PROGRESS), lambda *_: None)


def test_a_stack_refuses_what_it_cannot_run_before_it_starts_anything(tmp_path: Path) -> None:
    path = prepared(tmp_path, "smollm2-135m")
    with pytest.raises(InvalidRequest, match="'remote', 'local' or 'none'"):
        Stack(tmp_path, model=str(path), lora="both")
    stack = Stack(tmp_path, model="smollm2-135m")
    assert stack.served_name == "smollm2-135m"
    with pytest.raises(InvalidRequest, match="no program 'engine'"):
        stack.pid("engine")
    with pytest.raises(InvalidRequest, match="not started"):
        _ = stack.url


async def test_a_stack_that_was_never_started_stops_without_complaint(tmp_path: Path) -> None:
    stack = Stack(tmp_path, model=str(prepared(tmp_path, "smollm2-135m")))
    await stack.stop()
    assert stack.names() == ()
