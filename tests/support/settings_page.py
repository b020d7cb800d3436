"""docs/settings.md: the tables of all settings, made of the `settings.py` of each service. `make docs` writes them."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from infinilora.coordinator.settings import Settings as CoordinatorSettings
from infinilora.engine.settings import Settings as EngineSettings
from infinilora.gateway.settings import Settings as GatewaySettings
from infinilora.lora_server.settings import Settings as LoraServerSettings
from infinilora.runtime.settings import PREFIX, Common
from support.tables import filled

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
TABLES: dict[str, type[Common]] = {
    "every service": Common,
    "gateway": GatewaySettings,
    "engine": EngineSettings,
    "LoRA server": LoraServerSettings,
    "coordinator": CoordinatorSettings,
}
FIELDS = {name for settings in TABLES.values() for name in settings.model_fields}


def own_fields(settings: type[Common]) -> Iterator[tuple[str, FieldInfo, str]]:
    """Of each field that the class itself declares: name, field, and the words under it, if there are any."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(node, ast.ClassDef)
    for at, line in enumerate(node.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id != "model_config":
            below = node.body[at + 1] if at + 1 < len(node.body) else None
            said = below.value if isinstance(below, ast.Expr) else None
            words = str(said.value) if isinstance(said, ast.Constant) else ""
            yield line.target.id, settings.model_fields[line.target.id], " ".join(words.split())


def table(settings: type[Common]) -> str:
    lines = ["| setting | default | what it is |", "|---|---|---|"]
    for name, field, words in own_fields(settings):
        lines.append(f"| `{variable(name)}` | {default(name, field)} | {in_environment(words)}{choices(field)} |")
    return "\n".join(lines) + "\n"


def variable(field: str) -> str:
    return f"{PREFIX}{field.upper()}"


def in_environment(words: str) -> str:
    """Settings are named in the code as its fields and on the page as variables."""
    return re.sub(r"`(\w+)`", lambda m: f"`{variable(m[1])}`" if m[1] in FIELDS else m[0], words)


def choices(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not Literal:
        return ""
    return f" One of {', '.join(f'`{choice}`' for choice in get_args(field.annotation) if choice)}."


def default(name: str, field: FieldInfo) -> str:
    """As it would be written in the environment."""
    if field.is_required():
        return "**must be set**"
    if name in ("gateway_id", "coordinator_id"):
        return "from host and process"
    value: Any = field.default
    match value:
        case SecretStr():
            text = value.get_secret_value()
        case tuple():
            text = ",".join(map(str, value))
        case None:
            text = ""
        case float() if value.is_integer():
            text = str(int(value))
        case _:
            text = str(value)
    return f"`{text}`" if text else "empty"


def page(text: str) -> str:
    return filled(text, {title: table(settings) for title, settings in TABLES.items()})


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
