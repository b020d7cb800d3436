"""The demo models and adapters, and how a reader recognises each adapter's manner in an answer."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from infinilora.engine.demo import prepare

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "examples" / "adapters"
BASE_OF = {"json": "smollm2-135m", "pirate": "smollm2-135m", "sql": "smollm2-moe"}


def demo_model(name: str) -> Path:
    """The prepared model; prepares it when it is not there yet (half a minute, once)."""
    path = ROOT / ".var" / "models" / name
    prepare(name, path, lambda _stage, _done, _total: None)
    return path


def unseen(adapter: str) -> list[str]:
    """Prompts that training never showed."""
    lines = (ROOT / "examples" / "train" / "data" / f"{adapter}.eval.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def is_pirate(text: str) -> bool:
    return re.search(r"\b(arr+|ye|matey|aye|ahoy|me hearty|avast)\b", text.lower()) is not None


def is_sql(text: str) -> bool:
    return text.strip().upper().startswith("SELECT ")


BEHAVES: dict[str, Callable[[str], bool]] = {"json": is_json_object, "pirate": is_pirate, "sql": is_sql}
