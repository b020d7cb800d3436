"""The commands against a scripted gateway over real HTTP: what is sent, and how refusals reach a person."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner
from typing_extensions import override

from infinilora.cli import demo
from infinilora.cli.__main__ import app
from infinilora.cli.api import Api, Wish
from infinilora.cli.terminal import REFUSED, UNREACHABLE
from infinilora.protocol.errors import AdapterInvalid, AdapterNotFound, InvalidRequest, Unavailable

RECORD = {"version": 1, "base": "smollm2-135m", "state": "pending", "max_rank": 8, "bytes": 4_900_000}


class Gateway(BaseHTTPRequestHandler):
    """Keeps adapters by name; a digest is a counter of uploads."""

    adapters: ClassVar[dict[str, dict[str, object]]] = {}
    uploads: ClassVar[list[bytes]] = []
    changes: ClassVar[list[tuple[str, str, dict[str, object]]]] = []

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            models = [{"id": "tiny", "parent": None}, {"id": "a", "parent": "tiny"}]
            self._say(200, {"object": "list", "data": models})
        elif self.path == "/v1/fleet":
            self._say(200, {"leader": None, "members": []})
        elif self.path.startswith("/v1/adapters?"):
            self._list(parse_qs(urlsplit(self.path).query))
        elif record := self.adapters.get(self.path.rsplit("/", 1)[-1]):
            self._say(200, record)
        else:
            self._refuse(404, "adapter_not_found", "no adapter of this name")

    def do_DELETE(self) -> None:
        found = self.adapters.pop(self.path.rsplit("/", 1)[-1], None)
        self._say(200, found) if found else self._refuse(404, "adapter_not_found", "no adapter of this name")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/chat/completions":
            self._stream(json.loads(body))
            return
        if "/v1/adapters/" in self.path:
            self._change(json.loads(body))
            return
        self.uploads.append(body)
        if self.headers["content-type"] == "application/json":
            self._say(201, {**RECORD, "digest": f"sha256:{len(self.uploads):064}", **json.loads(body)})
            return
        name = body.split(b'name="name"\r\n\r\n')[1].split(b"\r\n")[0].decode()
        if b"broken" in body:
            self._refuse(422, "adapter_invalid", "tensor 'x': found [2, 3], wanted [2, 4]")
            return
        self.adapters[name] = {"name": name, "digest": f"sha256:{len(self.uploads):064}", **RECORD}
        self._say(201, self.adapters[name])

    @override
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Quiet."""

    def _list(self, query: dict[str, list[str]]) -> None:
        """Two a page, whatever is asked for."""
        after = query.get("after", [""])[0]
        rest = [record for name, record in sorted(self.adapters.items()) if name > after]
        last = rest[:2][-1]["name"] if rest else None
        self._say(200, {"object": "list", "data": rest[:2], "last_id": last, "has_more": len(rest) > 2})

    def _change(self, body: dict[str, object]) -> None:
        path, _, query = self.path.removeprefix("/v1/adapters/").partition("?")
        self.changes.append((path, query, body))
        name, _, verb = path.partition("/")
        if verb == "verify":
            told = {"version": 2, "digest": "sha256:d", "blocks": 3, "bytes": 2000}
            is_whole = name != "rotten"
            faults = [] if is_whole else ["layer 0, qkv: another hash"]
            test = {"parts": 6, "error": 1.25e-7} if name == "a" else None
            self._say(200, {**told, "ok": is_whole, "num_faults": len(faults), "faults": faults, "self_test": test})
            return
        self._say(200, {**RECORD, "name": "a", "digest": "sha256:d"})

    def _stream(self, asked: dict[str, object]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in ("Arr, ", "ma", "tey")]
        end = {"error": {"code": "adapter_failed", "message": "lost"}} if asked["model"] == "lost" else None
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(f"data: {json.dumps(end) if end else '[DONE]'}\n\n".encode())

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._say(status, {"error": {"code": code, "message": message, "type": "invalid_request_error"}})

    def _say(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def gateway_with(adapters: dict[str, dict[str, object]]) -> Iterator[tuple[str, type[Gateway]]]:
    handler = type("Scripted", (Gateway,), {"adapters": adapters, "uploads": [], "changes": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def gateway() -> Iterator[tuple[str, type[Gateway]]]:
    with gateway_with({}) as served:
        yield served


def peft_directory(path: Path, content: bytes = b"tensors") -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(content)
    for side in ("README.md", "tokenizer.json", "optimizer.pt", "training_args.bin", "model.safetensors"):
        (path / side).write_text("not sent")
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.stdout, done.stderr


def test_push_sends_the_adapters_files_and_prints_the_digest(
    gateway: tuple[str, type[Gateway]], tmp_path: Path
) -> None:
    url, seen = gateway
    code, out, _ = run("adapter", "push", str(peft_directory(tmp_path / "a")), "--name", "a", "--url", url)
    assert code == 0
    assert out == f"a sha256:{1:064}\n"
    (body,) = seen.uploads
    assert b'filename="adapter_config.json"' in body
    assert b'filename="adapter_model.safetensors"' in body
    assert body.count(b"filename=") == 2
    assert b"not sent" not in body


def test_push_sends_what_training_began_with_under_its_own_directory(
    gateway: tuple[str, type[Gateway]], tmp_path: Path
) -> None:
    url, seen = gateway
    directory = peft_directory(tmp_path / "a")
    peft_directory(directory / "pissa_init")
    peft_directory(directory / "checkpoint-5")
    assert run("adapter", "push", str(directory), "--name", "a", "--url", url)[0] == 0
    (body,) = seen.uploads
    assert b'filename="pissa_init/adapter_config.json"' in body
    assert b'filename="pissa_init/adapter_model.safetensors"' in body
    assert body.count(b"filename=") == 4


def test_push_of_an_address_leaves_the_reading_to_the_gateway(gateway: tuple[str, type[Gateway]]) -> None:
    url, seen = gateway
    options = ("--name", "a", "--base", "tiny", "--narrow", "BF16", "--replace", "--url", url)
    assert run("adapter", "push", "s3://bucket/a", *options)[:2] == (0, f"a sha256:{1:064}\n")
    wish = {"name": "a", "base": "tiny", "narrow": "BF16", "replace": True}
    assert json.loads(seen.uploads[0]) == {"source": "s3://bucket/a", **wish}


def test_a_refused_adapter_is_told_in_the_servers_words(gateway: tuple[str, type[Gateway]], tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "a", b"broken")
    code, out, err = run("adapter", "push", str(directory), "--name", "a", "--url", gateway[0])
    assert (code, out) == (REFUSED, "")
    assert "adapter_invalid: tensor 'x': found [2, 3], wanted [2, 4]" in err


def test_a_directory_that_is_no_adapter_is_refused_before_anything_is_sent(
    gateway: tuple[str, type[Gateway]], tmp_path: Path
) -> None:
    code, _, err = run("adapter", "push", str(tmp_path), "--name", "a", "--url", gateway[0])
    assert code == REFUSED
    assert "has no adapter_config.json" in err
    assert gateway[1].uploads == []


def test_a_pickle_is_refused_before_anything_is_sent(gateway: tuple[str, type[Gateway]], tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    code, _, err = run("adapter", "push", str(directory), "--name", "a", "--url", gateway[0])
    assert code == REFUSED
    assert "found adapter_model.bin, which is not safetensors" in err
    assert gateway[1].uploads == []


def test_adapters_are_listed_shown_and_removed(gateway: tuple[str, type[Gateway]], tmp_path: Path) -> None:
    url = gateway[0]
    run("adapter", "push", str(peft_directory(tmp_path / "a")), "--name", "a", "--url", url)
    _, listed, _ = run("adapter", "ls", "--url", url)
    assert "4.9 MB" in listed
    _, shown, _ = run("adapter", "show", "a", "--url", url)
    assert json.loads(shown)["digest"] == f"sha256:{1:064}"
    assert run("adapter", "rm", "a", "--url", url)[0] == 0
    assert run("adapter", "rm", "a", "--url", url)[0] == REFUSED


def test_a_long_list_is_read_page_by_page() -> None:
    held: dict[str, dict[str, object]] = {f"a{i}": {"name": f"a{i}", "digest": "sha256:d", **RECORD} for i in range(5)}
    with gateway_with(held) as (url, _), Api(url) as api:
        assert [record["name"] for record in api.adapters()] == sorted(held)
    with gateway_with({}) as (url, _), Api(url) as api:
        assert list(api.adapters()) == []


def test_names_are_pointed_rolled_back_and_verified(gateway: tuple[str, type[Gateway]]) -> None:
    url, seen = gateway
    assert run("adapter", "alias", "live", "a@v1", "--url", url)[:2] == (0, "live a@v1 sha256:d\n")
    assert run("adapter", "rollback", "a", "--url", url)[:2] == (0, "a v1 sha256:d\n")
    assert run("adapter", "rollback", "a", "--to", "v3", "--tenant", "t", "--url", url)[0] == 0
    code, out, _ = run("adapter", "verify", "a", "--url", url)
    assert code == 0
    assert out.startswith("a v2 sha256:d: 3 blocks, 2.0 kB, all whole; self-test passed: 6 parts")
    code, out, _ = run("adapter", "verify", "old", "--url", url)
    assert code == 0
    assert "not self-tested" in out
    assert seen.changes == [
        ("live/alias", "", {"target": "a@v1"}),
        ("a/rollback", "", {"to": None}),
        ("a/rollback", "tenant=t", {"to": 3}),
        ("a/verify", "", {}),
        ("old/verify", "", {}),
    ]
    assert run("adapter", "rollback", "a", "--to", "latest", "--url", url)[0] == REFUSED


def test_a_broken_object_is_told_by_its_faults_and_the_exit_status(gateway: tuple[str, type[Gateway]]) -> None:
    code, out, err = run("adapter", "verify", "rotten", "--url", gateway[0])
    assert code == REFUSED
    assert "1 of them broken" in out
    assert "layer 0, qkv: another hash" in err


def test_a_tenant_goes_with_every_request(gateway: tuple[str, type[Gateway]], tmp_path: Path) -> None:
    url, seen = gateway
    directory = str(peft_directory(tmp_path / "a"))
    assert run("adapter", "push", directory, "--name", "a", "--tenant", "t", "--url", url)[0] == 0
    assert b'name="tenant"\r\n\r\nt\r\n' in seen.uploads[0]
    assert run("adapter", "push", "s3://bucket/a", "--name", "b", "--tenant", "t", "--url", url)[0] == 0
    assert json.loads(seen.uploads[1])["tenant"] == "t"


@pytest.mark.parametrize("name", ["a?x", "a#x", "b/a", "../adapters/a", "a%00", "[/a]"])
def test_a_name_is_one_name_whatever_it_holds(gateway: tuple[str, type[Gateway]], tmp_path: Path, name: str) -> None:
    url = gateway[0]
    run("adapter", "push", str(peft_directory(tmp_path / "a")), "--name", "a", "--url", url)
    for command in ("show", "rm"):
        code, out, err = run("adapter", command, name, "--url", url)
        assert (code, out) == (REFUSED, ""), err
    assert run("adapter", "show", "a", "--url", url)[0] == 0


def test_markup_in_a_name_is_text(gateway: tuple[str, type[Gateway]]) -> None:
    done = CliRunner().invoke(app, ["chat", "--model", "[/red]", "--url", gateway[0]], input="hello\n")
    assert (done.exit_code, done.exception) == (0, None)
    assert "[/red] at http" in done.stderr


def test_what_is_no_url_is_refused() -> None:
    code, _, err = run("adapter", "ls", "--url", "http://[::")
    assert code == REFUSED
    assert "is not a URL" in err


def test_chat_prints_an_answer_as_it_comes(gateway: tuple[str, type[Gateway]]) -> None:
    assert run("chat", "hello", "there", "--url", gateway[0]) == (0, "Arr, matey\n", "")


def test_chat_asks_the_only_base_when_no_model_is_named(gateway: tuple[str, type[Gateway]]) -> None:
    with Api(gateway[0]) as api:
        assert api.base_models() == ["tiny"]


def test_an_answer_that_breaks_off_is_an_error_and_not_an_answer(gateway: tuple[str, type[Gateway]]) -> None:
    code, _, err = run("chat", "hello", "--model", "lost", "--url", gateway[0])
    assert code == REFUSED
    assert "adapter_failed: lost" in err


def test_nothing_at_the_url_says_how_to_start_something() -> None:
    code, _, err = run("adapter", "ls", "--url", "http://127.0.0.1:9")
    assert code == UNREACHABLE
    assert "infinilora up" in err


def test_status_shows_what_answers_and_says_what_does_not(gateway: tuple[str, type[Gateway]]) -> None:
    url, nowhere = gateway[0], "http://127.0.0.1:9"
    code, out, err = run("status", "--url", nowhere, "--coordinator", url)
    assert code == UNREACHABLE
    assert "nobody leads" in out
    assert f"nothing answers at {nowhere}" in err
    assert "--url" in err
    code, out, err = run("status", "--url", url, "--coordinator", nowhere, "--json")
    assert (code, json.loads(out)) == (UNREACHABLE, {"fleet": None, "adapters": []})
    assert "--coordinator" in err


def test_what_does_not_answer_in_time_may_have_been_done() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Api(url, read_s=0.1) as api, pytest.raises(Unavailable, match="may still be done"):
            api.post("/v1/admin/freeze", {})


def test_errors_of_the_api_are_leaves_of_the_one_tree(gateway: tuple[str, type[Gateway]], tmp_path: Path) -> None:
    with Api(gateway[0]) as api:
        with pytest.raises(AdapterNotFound):
            api.get("/v1/adapters/none")
        with pytest.raises(AdapterInvalid):
            api.push(peft_directory(tmp_path / "a", b"broken"), Wish("a"), on_bytes=lambda _: None)
        with pytest.raises(InvalidRequest, match="is not a directory"):
            api.push(tmp_path / "none", Wish("a"), on_bytes=lambda _: None)
        (tmp_path / "a.zip").touch()
        with pytest.raises(InvalidRequest, match="unpack it first"):
            api.push(tmp_path / "a.zip", Wish("a"), on_bytes=lambda _: None)
    with Api("http://127.0.0.1:9") as api, pytest.raises(Unavailable):
        api.models()


def test_every_byte_of_an_upload_is_counted_once(gateway: tuple[str, type[Gateway]], tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "a", bytes(300_000))
    sent: list[int] = []
    with Api(gateway[0]) as api:
        api.push(directory, Wish("a"), on_bytes=sent.append)
    assert sum(sent) == 300_000 + len("{}")


def test_demo_adapters_are_uploaded_once(tmp_path: Path) -> None:
    memory = tmp_path / "demo.json"
    with gateway_with({}) as (url, seen), Api(url) as api:
        demo.register(api, "smollm2-135m", memory)
        assert sorted(seen.adapters) == ["json", "pirate"]
        demo.register(api, "smollm2-135m", memory)
        assert len(seen.uploads) == 2


def test_a_name_that_a_person_took_over_is_left_alone(tmp_path: Path) -> None:
    theirs: dict[str, object] = {"name": "json", "digest": "sha256:theirs"}
    with gateway_with({"json": theirs}) as (url, seen), Api(url) as api:
        demo.register(api, "smollm2-135m", tmp_path / "demo.json")
        assert seen.adapters["json"] is theirs
        assert sorted(seen.adapters) == ["json", "pirate"]


def test_a_registry_that_was_emptied_is_filled_again(tmp_path: Path) -> None:
    memory = tmp_path / "demo.json"
    with gateway_with({}) as (url, seen), Api(url) as api:
        demo.register(api, "smollm2-moe", memory)
        seen.adapters.clear()
        demo.register(api, "smollm2-moe", memory)
        assert sorted(seen.adapters) == ["sql"]


def test_why_an_adapter_could_not_be_loaded_is_said_below_the_list() -> None:
    failed = RECORD | {"name": "a", "digest": "sha256:d", "state": "failed", "state_reason": "adapter_failed: damaged"}
    well = RECORD | {"name": "b", "digest": "sha256:e", "state": "ready", "state_reason": None}
    with gateway_with({"a": failed, "b": well}) as (url, _):
        _, listed, told = run("adapter", "ls", "--url", url)
    assert [line.split()[4] for line in listed.splitlines()[1:]] == ["failed", "ready"]
    assert told == "a: adapter_failed: damaged\n"
