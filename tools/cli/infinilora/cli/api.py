"""The HTTP API as the commands use it: blocking, and every failure is one of our errors with words to act on."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import httpx
from typing_extensions import override

from infinilora.protocol.errors import InfiniLoraError, Internal, InvalidRequest, Unavailable, WireError, from_wire

CONNECT_S = 5.0
INGEST_S = 1800.0
"""A large adapter waits its turn, is read, checked and packed before the upload is answered."""
CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapters.safetensors")
INITIAL_DIRS = ("pissa_init", "olora_init", "corda_init", "lora_ga_init")
"""As PEFT writes them, and as MLX does. Nothing else of a directory is needed, or sent."""

PAGE = 500
"""Adapters asked for at a time."""
_INGEST = httpx.Timeout(INGEST_S, connect=CONNECT_S)
Json = dict[str, Any]
OnBytes = Callable[[int], None]
"""Called with how many more bytes have been sent."""


class Wish(NamedTuple):
    """What a new adapter shall be called, and how it is packed; what is empty is left to the gateway."""

    name: str
    replace: bool = False
    base: str = ""
    narrow: str = ""

    def fields(self) -> Json:
        """As the adapter API names them."""
        return {key: value for key, value in self._asdict().items() if value}


class Api:
    """A gateway, or a coordinator, at one base URL."""

    def __init__(
        self, url: str, *, api_key: str = "", tenant: str = "", is_coordinator: bool = False, read_s: float = 60.0
    ) -> None:
        """`tenant`: whose adapters are meant; empty leaves it to the key."""
        self.url = url.rstrip("/")
        self._option = "--coordinator" if is_coordinator else "--url"
        self._tenant = {"tenant": tenant} if tenant else {}
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(read_s, connect=CONNECT_S)
        # Our services are addressed directly: a proxy of the environment is for other hosts.
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{url!r} is not a URL: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str) -> Json:
        with self._errors():
            return _body(self._http.get(path))

    def post(self, path: str, body: Json) -> Json:
        with self._errors():
            return _body(self._http.post(path, json=body))

    def models(self) -> list[Json]:
        models: list[Json] = self.get("/v1/models")["data"]
        return models

    def base_models(self) -> list[str]:
        """Served names of base models: those without a parent."""
        return [model["id"] for model in self.models() if not model.get("parent")]

    def adapters(self) -> Iterator[Json]:
        """All of them, by name, a page at a time."""
        page: Json = {"has_more": True, "last_id": ""}
        while page.get("has_more"):
            wanted = {"limit": PAGE, **({"after": page["last_id"]} if page["last_id"] else {})}
            with self._errors():
                page = _body(self._http.get("/v1/adapters", params=wanted | self._tenant))
            yield from page["data"]

    def adapter(self, name: str) -> Json:
        with self._errors():
            return _body(self._http.get(_adapter_path(name), params=self._tenant))

    def remove(self, name: str) -> Json:
        with self._errors():
            return _body(self._http.delete(_adapter_path(name), params=self._tenant))

    def alias(self, name: str, target: str) -> Json:
        """Let `name` mean `target`: an adapter, or one of its versions."""
        return self._change(name, "alias", {"target": target})

    def rollback(self, name: str, to: int | None) -> Json:
        """Make version `to` the current one; None: the one before the present."""
        return self._change(name, "rollback", {"to": to})

    def pin(self, name: str, *, pinned: bool) -> Json:
        """Have it kept resident whatever its heat, or not any more."""
        return self._change(name, "pin", {"pinned": pinned})

    def verify(self, name: str) -> Json:
        """Have what the store holds read and hashed; says `ok`, and what is not."""
        return self._change(name, "verify", {})

    def _change(self, name: str, verb: str, body: Json) -> Json:
        with self._errors():
            path = f"{_adapter_path(name)}/{verb}"
            return _body(self._http.post(path, json=body, params=self._tenant, timeout=_INGEST))

    def push(self, directory: Path, wish: Wish, *, on_bytes: OnBytes) -> Json:
        """Upload an adapter's directory; returns its record once it can be served."""
        with ExitStack() as open_files, self._errors():
            files = [
                (
                    "files",
                    (
                        str(path.relative_to(directory)),
                        open_files.enter_context(_Counted(path, on_bytes)),
                        "application/octet-stream",
                    ),
                )
                for path in adapter_files(directory)
            ]
            fields = wish.fields() | self._tenant
            form = {key: "true" if value is True else str(value) for key, value in fields.items()}
            return _body(self._http.post("/v1/adapters", data=form, files=files, timeout=_INGEST))

    def register(self, source: str, wish: Wish) -> Json:
        """Have the gateway read an adapter from a store URI; returns its record once it can be served."""
        with self._errors():
            body = {"source": source, **wish.fields(), **self._tenant}
            return _body(self._http.post("/v1/adapters", json=body, timeout=_INGEST))

    def chat(self, model: str, messages: list[Json], **sampling: Any) -> Iterator[str]:
        """Stream an answer's text, piece by piece."""
        body = {"model": model, "messages": messages, "stream": True, **sampling}
        with self._errors(), self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if not answer.is_success:
                answer.read()
                raise _error(answer)
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield _piece(json.loads(line.removeprefix("data: ")))
        raise Unavailable("the stream ended before the answer did")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            what_to_do = f"start it with `infinilora up`, or give {self._option}"
            raise Unavailable(f"nothing answers at {self.url}; {what_to_do}") from error
        except httpx.ReadTimeout as error:
            told = f"{self.url} has taken the request and does not answer; what was asked may still be done"
            raise Unavailable(told) from error
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url}: {str(error) or type(error).__name__}") from error


def _adapter_path(name: str) -> str:
    """Whatever the name holds, it is one name and no other part of a URL."""
    return f"/v1/adapters/{quote(name, safe='')}"


def adapter_files(directory: Path) -> list[Path]:
    """What is uploaded of a trainer's directory: two files, and the two that it began with where it has them.

    Raises InvalidRequest when there are not the first two.
    """
    if not directory.is_dir():
        unpack = " (an archive: unpack it first)" if directory.is_file() else ""
        wanted = f"one with {CONFIG_FILE} and {WEIGHT_FILES[0]}{unpack}"
        raise InvalidRequest(f"{directory} is not a directory; wanted {wanted}")
    config = directory / CONFIG_FILE
    if not config.is_file():
        raise InvalidRequest(f"{directory} has no {CONFIG_FILE}: is it the directory that PEFT saved?")
    for name in WEIGHT_FILES:
        if (directory / name).is_file():
            return [config, directory / name, *_first_values(directory)]
    raise InvalidRequest(f"{directory}: found {_weights_found(directory)}; wanted {WEIGHT_FILES[0]}")


def _first_values(directory: Path) -> list[Path]:
    places = (directory / name for name in INITIAL_DIRS)
    return [path for place in places for path in (place / CONFIG_FILE, place / WEIGHT_FILES[0]) if path.is_file()]


def _weights_found(directory: Path) -> str:
    """What lies there in place of the weights: most often a pickle, or a training checkpoint's parent."""
    pickles = sorted(p.name for p in directory.glob("adapter_model.*"))
    below = sorted(p.parent.name for p in directory.glob(f"*/{WEIGHT_FILES[0]}"))
    if pickles:
        return f"{pickles[0]}, which is not safetensors (save it again with safe_serialization=True)"
    return f"an adapter in {', '.join(below[:3])} below it" if below else "no weights"


class _Counted(io.FileIO):
    """A file that tells how much of it has been read."""

    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(path, "rb")
        self._on_bytes = on_bytes

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._on_bytes(len(data))
        return data


def _body(answer: httpx.Response) -> Json:
    if not answer.is_success:
        raise _error(answer)
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Internal(
            f"{answer.url}: wanted a JSON object, found {answer.text[:100]!r}; is it InfiniLoRA that answers?"
        )
    return body


def _piece(event: Json) -> str:
    if "error" in event:
        raise _of(event["error"], status=0)
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _error(answer: httpx.Response) -> InfiniLoraError:
    try:
        return _of(answer.json()["error"], answer.status_code)
    except (ValueError, KeyError, TypeError):
        return Internal(f"{answer.url}: HTTP {answer.status_code}: {answer.text[:300]}")


def _of(error: Json, status: int) -> InfiniLoraError:
    return from_wire(WireError(code=str(error.get("code") or status), message=str(error.get("message"))))
