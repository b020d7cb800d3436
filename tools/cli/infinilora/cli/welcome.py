"""What a newcomer sees when all is ready: URL, adapters, and commands to try that this very model answers."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from infinilora.cli import demo

Speech = Literal["chat", "text", "tokens"]
"""What a base model takes: messages, with its chat template; text, with its tokenizer; else token ids."""


def speech_of(model: Path) -> Speech:
    """By the files of a Hugging Face directory."""
    if not (model / "tokenizer.json").is_file():
        return "tokens"
    config = model / "tokenizer_config.json"
    has_template = config.is_file() and json.loads(config.read_text()).get("chat_template")
    return "chat" if has_template or (model / "chat_template.jinja").is_file() else "text"


def welcome(url: str, model: str, speech: Speech) -> str:
    adapters = demo.adapters_of(model)
    listed = [f"{a.name:9} {a.manner}" for a in adapters] or ["none yet: infinilora adapter push DIR --name NAME"]
    name, prompt = (adapters[0].name, adapters[0].prompt) if adapters else (model, "Who are you?")
    return "\n".join(
        [
            "",
            f"  InfiniLoRA is serving [bold]{model}[/bold] at [bold]{url}[/bold]",
            "",
            *(f"  {'adapters' if i == 0 else '':10} {line}" for i, line in enumerate(listed)),
            "",
            "  Try, in another terminal:",
            "",
            *_requests(url, name, prompt, speech),
            *(_chat(url, adapters[-1].name if adapters else model) if speech == "chat" else ()),
            "  Ctrl-C stops everything.",
        ]
    )


def _requests(url: str, name: str, prompt: str, speech: Speech) -> list[str]:
    """The same request with curl and with the openai client."""
    if speech == "chat":
        method, field, answer = "chat.completions", "messages", "choices[0].message.content"
    else:
        method, field, answer = "completions", "prompt", f"choices[0].{'text' if speech == 'text' else 'token_ids'}"
    asked: dict[Speech, Any] = {"chat": [{"role": "user", "content": prompt}], "text": prompt, "tokens": [1, 2, 3]}
    body = {"model": name, field: asked[speech], "max_tokens": 64}
    return [
        f"  curl {url}/v1/{method.replace('.', '/')} -H 'content-type: application/json' \\",
        f"    -d '{json.dumps(body)}'",
        "",
        f"  {_beside('python')} -c 'from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="none")',
        f'answer = client.{method}.create(model="{name}", max_tokens=64,',
        f"    {field}={json.dumps(asked[speech])})",
        f"print(answer.{answer})'",
        "",
    ]


def _chat(url: str, name: str) -> list[str]:
    elsewhere = "" if url.endswith(":8000") else f" --url {url}"
    return [f"  {_beside('infinilora')} chat --model {name}{elsewhere}", ""]


def _beside(name: str) -> str:
    """How to call a program of this environment from here: by its name if the PATH leads to it."""
    path = Path(sys.executable).parent / name
    if shutil.which(name) == str(path) or not path.exists():
        return name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
