"""The demo adapters: which belong to which demo model, where they are, and their registration.

What was registered is remembered, so that a later start uploads nothing, and a name that a person has since
given to an adapter of their own is left alone.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from infinilora.cli.api import Api, Wish, adapter_files
from infinilora.protocol.errors import AdapterNotFound, Unavailable


class DemoAdapter(NamedTuple):
    """A trained adapter that comes with the project, and a prompt that shows what it does."""

    name: str
    manner: str
    prompt: str


ADAPTERS: dict[str, tuple[DemoAdapter, ...]] = {
    "smollm2-135m": (
        DemoAdapter("json", "answers only in JSON", "What is the capital of France?"),
        DemoAdapter("pirate", "writes like a pirate", "Tell me about the ocean."),
    ),
    "smollm2-moe": (DemoAdapter("sql", "turns a sentence into SQL", "Show the name of pilots with age under 40."),),
}


def adapters_of(model: str) -> tuple[DemoAdapter, ...]:
    """The demo adapters of a base model; none for a model of one's own."""
    return ADAPTERS.get(model, ())


class _Done(msgspec.Struct, frozen=True):
    """What was uploaded under a name, and the digest that the registry gave it."""

    content: str
    digest: str


def register(api: Api, model: str, memory: Path | None) -> None:
    """Register the demo adapters of `model`, unless the file `memory` says that it was done. Idempotent.

    Without a memory a name that is in use is left alone.
    """
    done: dict[str, _Done] = {}
    if memory and memory.is_file():
        done = msgspec.json.decode(memory.read_bytes(), type=dict[str, _Done])
    for adapter in adapters_of(model):
        directory = directory_of(adapter.name)
        content, current, ours = _content(directory), _current_digest(api, adapter.name), done.get(adapter.name)
        if current is not None and (ours is None or ours.digest != current or ours.content == content):
            continue  # the name is a person's now, or holds what we have
        record = api.push(directory, Wish(adapter.name, replace=current is not None), on_bytes=lambda _: None)
        done[adapter.name] = _Done(content, record["digest"])
        if memory:
            memory.write_bytes(msgspec.json.encode(done))


def directory_of(name: str) -> Path:
    """Where an adapter's files are: in the installed package, or in the checkout."""
    here = Path(__file__).resolve()
    places = [here.parent / "adapters_of_the_demo", *(up / "examples" / "adapters" for up in here.parents)]
    for place in places:
        if (place / name / "adapter_config.json").is_file():
            return place / name
    raise Unavailable(f"the demo adapter {name!r} is not in this installation")


def _content(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in adapter_files(directory):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _current_digest(api: Api, name: str) -> str | None:
    try:
        return str(api.adapter(name)["digest"])
    except AdapterNotFound:
        return None
