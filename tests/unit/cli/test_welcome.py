"""The commands that `infinilora up` prints are such as this very model can answer."""

import json
import re
from pathlib import Path

import pytest

from infinilora.cli.adapter_commands import table_of
from infinilora.cli.welcome import Speech, speech_of, welcome

URL = "http://127.0.0.1:8123"


def test_speech_is_what_the_directory_holds(tmp_path: Path) -> None:
    assert speech_of(tmp_path) == "tokens"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert speech_of(tmp_path) == "text"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert speech_of(tmp_path) == "chat"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert speech_of(tmp_path) == "text"
    (tmp_path / "chat_template.jinja").write_text("x")
    assert speech_of(tmp_path) == "chat"


@pytest.mark.parametrize(
    ("speech", "route", "field", "kind"),
    [("chat", "chat/completions", "messages", list), ("text", "completions", "prompt", str)],
)
def test_requests_fit_the_model(speech: Speech, route: str, field: str, kind: type) -> None:
    said = welcome(URL, "mine", speech)
    assert f"{URL}/v1/{route} " in said
    body = json.loads(_found(r"-d '(.*)'", said))
    assert body["model"] == "mine"
    assert isinstance(body[field], kind)
    compile(_found(r"(?s)-c '(.*?)'\n", said), "printed", "exec")
    assert ("chat --model mine" in said) == (speech == "chat")


def test_without_a_tokenizer_it_is_token_ids() -> None:
    said = welcome(URL, "mine", "tokens")
    assert json.loads(_found(r"-d '(.*)'", said))["prompt"] == [1, 2, 3]
    assert "/v1/chat" not in said
    assert "choices[0].token_ids" in said


def test_demo_adapters_are_what_is_asked() -> None:
    said = welcome(URL, "smollm2-135m", "chat")
    assert json.loads(_found(r"-d '(.*)'", said))["model"] == "json"
    assert f"chat --model pirate --url {URL}" in said


def test_a_base_that_is_not_served_does_not_widen_the_table() -> None:
    record = {"name": "a", "version": 1, "state": "pending", "max_rank": 8, "bytes": 10}
    bases = [
        list(table_of([record | {"digest": "sha256:" + "0" * 64, "base": base}]).columns[3].cells)
        for base in ("sha256:" + "1" * 64, "mine")
    ]
    assert bases == [["sha256:" + "1" * 12], ["mine"]]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]
