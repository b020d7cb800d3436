"""Uploads over a real form parser: what is written, once, and what is passed by."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from infinilora.gateway.scratch import disk_errors, use_scratch
from infinilora.gateway.uploads import UploadLimits, is_upload, received
from infinilora.protocol.errors import InfiniLoraError, StoreFull, Unavailable

LIMITS = UploadLimits(max_bytes=100_000, max_files=5)
Part = tuple[str, tuple[str, bytes]]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def app() -> FastAPI:
    """Answers with what an upload has left on disk while it is handled."""
    app = FastAPI()

    async def take(request: Request) -> Response:
        assert is_upload(request)
        try:
            async with received(request, LIMITS) as upload:
                files = [upload.source] if upload.source.is_file() else list(upload.source.iterdir())
                content = {file.name: file.read_bytes().decode("latin-1") for file in files}
                return JSONResponse({"fields": dict(upload.fields), "files": content})
        except InfiniLoraError as error:
            return JSONResponse({"error": error.message, "code": error.code}, error.http_status)

    app.add_api_route("/", take, methods=["POST"])
    return app


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app()), base_url="http://gateway")


async def send(files: Sequence[Part], **fields: str) -> httpx.Response:
    async with client() as http:
        return await http.post("/", data=fields, files=list(files))


def is_empty(directory: Path) -> bool:
    return not list(directory.iterdir())


def file_of(name: str, data: bytes = b"x") -> Part:
    return ("files", (name, data))


GOOD = [file_of("adapter_config.json", b"{}"), file_of("adapter_model.safetensors", os.urandom(50_000))]


async def test_files_and_fields_are_told_apart_and_nothing_stays(scratch: Path) -> None:
    answer = (await send(GOOD, name="a1", note="ünï\r\n--x")).json()
    assert answer["fields"] == {"name": "a1", "note": "ünï\r\n--x"}
    assert {name: text.encode("latin-1") for name, text in answer["files"].items()} == {
        name: data for _, (name, data) in GOOD
    }
    assert is_empty(scratch)


async def test_files_that_no_adapter_needs_are_passed_by() -> None:
    side = [
        file_of("optimizer.pt", b"o" * 9000),
        file_of(".gitattributes"),
        file_of("checkpoint-5/adapter_config.json"),
    ]
    answer = (await send([*side, *GOOD])).json()
    assert answer["files"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert answer["files"]["adapter_config.json"] == "{}"


@pytest.mark.parametrize("name", ["a.zip", "A.TAR.GZ", "x.tgz"])
async def test_an_archive_is_left_as_it_is_for_the_worker(name: str) -> None:
    answer = (await send([file_of(name, b"PK not opened here")])).json()
    assert answer["files"] == {"archive": "PK not opened here"}


@pytest.mark.parametrize("kind", ["application/zip", "application/x-tar", "application/octet-stream"])
async def test_an_archive_may_be_the_body_itself(kind: str) -> None:
    async with client() as http:
        answer = await http.post("/?name=a1&replace=1", content=b"bytes", headers={"content-type": kind})
    assert answer.json() == {"fields": {"name": "a1", "replace": "1"}, "files": {"archive": "bytes"}}


async def test_a_body_may_come_byte_by_byte() -> None:
    request = httpx.Request("POST", "http://gateway/", data={"name": "a1"}, files=GOOD[:1])
    request.read()

    async def drops() -> AsyncIterator[bytes]:
        for byte in request.content:
            yield bytes([byte])

    headers = {"content-type": request.headers["content-type"]}
    async with client() as http:
        answer = await http.post("/", content=drops(), headers=headers)
    assert answer.json() == {"fields": {"name": "a1"}, "files": {"adapter_config.json": "{}"}}


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        ([file_of("a.zip"), *GOOD], "invalid_request", "an archive and more"),
        ([*GOOD, file_of("a.zip")], "invalid_request", "an archive and more"),
        ([GOOD[0], GOOD[0]], "invalid_request", "comes twice"),
        ([file_of("../adapter_config.json")], "invalid_request", "is not allowed"),
        ([file_of("a\\b.json"), GOOD[0]], "invalid_request", "is not allowed"),
        ([file_of(f"f{i}") for i in range(6)], "request_too_large", "more than 5 files"),
        ([*GOOD, file_of("x.pt", bytes(60_000))], "request_too_large", "more than 100000 bytes"),
        ([file_of("README.md")], "source_not_found", "adapter_config.json: found none among 1 files"),
        ([file_of("")], "invalid_request", "holds no file"),
    ],
)
async def test_what_is_no_upload_of_one_adapter_is_refused(
    scratch: Path, files: list[Part], code: str, said: str
) -> None:
    answer = (await send(files)).json()
    assert answer["code"] == code
    assert said in answer["error"]
    assert is_empty(scratch)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"no boundary at all", "cannot be read"),
        (b"", "ends before its last boundary"),
        (
            b'--b\r\nContent-Disposition: form-data; name="files"; filename="adapter_config.json"\r\n\r\n{',
            "ends before",
        ),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "has no name"),
        (b'--b\r\nContent-Disposition: form-data; name="n"\r\n\r\n' + b"x" * 9000 + b"\r\n--b--\r\n", "more than 8192"),
        (b"--b\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\nx\r\n--b--\r\n", "header size"),
        (b'--b\r\nContent-Disposition: form-data; name="n"\r\n\r\nx\r\n--b--\r\n', "holds no file"),
    ],
)
async def test_a_broken_form_is_refused(body: bytes, said: str) -> None:
    async with client() as http:
        answer = await http.post("/", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert answer.json()["code"] == "invalid_request"
    assert said in answer.json()["error"]


def test_a_full_disk_is_not_the_senders_fault(scratch: Path) -> None:
    with pytest.raises(StoreFull, match="no room on this gateway's disk"), disk_errors():
        Path("/dev/full").write_bytes(b"x")
    with pytest.raises(Unavailable, match="does not work"), disk_errors():
        (scratch / "not" / "there").touch()


# The scratch directory ----------------------------------------------------------------------------


def test_uploads_wait_in_the_scratch_directory_and_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch = tmp_path / "gateway" / "g0"
    (scratch / "ingest-left-over").mkdir(parents=True)
    with use_scratch(scratch):
        assert tempfile.gettempdir() == str(scratch)
        assert list(scratch.iterdir()) == []
    (tmp_path / "file").touch()
    with use_scratch(tmp_path / "file" / "below"):
        assert tempfile.gettempdir() == str(scratch)


HOLD = """
import sys, time
from pathlib import Path
from infinilora.gateway.scratch import use_scratch
with use_scratch(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_the_dead_left_is_removed_and_what_the_living_hold_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    processes = []
    for name in ("dead", "alive"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        (tmp_path / name / "upload-1").mkdir()
        processes.append(process)
    dead, alive = processes
    dead.kill()
    dead.wait()
    try:
        with use_scratch(tmp_path / "mine"):
            assert {path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "scratch"} == {
                "alive",
                "mine",
            }
            assert (tmp_path / "alive" / "upload-1").is_dir()
            with (tmp_path / "mine.lock").open("rb") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        alive.communicate()
        assert dead.stdout is not None
        dead.communicate()


def test_a_directory_that_another_process_holds_is_not_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    with use_scratch(tmp_path / "g0"):
        (tmp_path / "g0" / "upload-1").mkdir()
        with use_scratch(tmp_path / "g0"):
            assert (tmp_path / "g0" / "upload-1").is_dir()
