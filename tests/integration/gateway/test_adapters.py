"""/v1/adapters: register, replace, list, delete, and everything that must be refused; with the real ingest."""

import asyncio
import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord, Manifest
from infinilora.protocol.control import AdapterEvent
from infinilora.protocol.ids import Digest
from infinilora.runtime.store import Change, Stamp
from infinilora.weights.packed import read_header
from support.gateway_house import House, error_of, open_house

pytestmark = pytest.mark.integration


async def create(house: House, name: str, source: Path | str, **more: Any) -> httpx.Response:
    uri = source if isinstance(source, str) else f"file://{source}"
    return await house.http.post("/v1/adapters", json={"name": name, "source": uri} | more)


async def names(house: House, path: str = "/v1/adapters") -> set[str]:
    return {item["id"] for item in (await house.http.get(path)).json()["data"]}


async def test_an_adapter_is_registered_listed_used_and_deleted(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        listener = house.bus.subscribe(subjects.ADAPTER_EVENTS, AdapterEvent)
        answer = await create(house, "a1", house.adapter_dir("a1"))
        made = answer.json()
        assert answer.status_code == 200, made
        digest = Digest(made["digest"])
        assert made["matched_tensors"] == 2 * 7 * 2
        assert (made["version"], made["base"], made["max_rank"], made["state"]) == (1, "tiny", 4, "pending")
        assert made["source"].startswith("file://")
        assert house.gateway.registry.get("default", "a1") is not None
        (event,) = listener.pop_all()
        assert (event.action, event.name, event.digest) == ("put", "a1", digest)

        stored = tmp_path / "store" / keys.packed(digest)
        with stored.open("rb") as file:
            assert isinstance(read_header(file).manifest, Manifest)
        assert await names(house) == {"a1"}
        assert await names(house, "/v1/models") == {"tiny", "a1"}
        used = await house.complete("a1", max_tokens=1)
        assert used.headers["x-adapter-digest"] == digest
        assert used.json()["model"] == "a1"
        assert house.engine.requests[-1].digest == digest

        assert (await house.http.get("/v1/adapters/a1")).json()["digest"] == digest
        gone = await house.http.delete("/v1/adapters/a1")
        assert (gone.status_code, gone.json()["deleted"]) == (200, True)
        assert (await house.http.delete("/v1/adapters/a1")).status_code == 404
        assert error_of(await house.http.get("/v1/adapters/a1"))["code"] == "adapter_not_found"
        assert (await house.complete("a1")).status_code == 404
        assert await names(house, "/v1/models") == {"tiny"}


async def test_the_same_content_again_changes_nothing_and_other_content_is_a_conflict(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        first, second = house.adapter_dir("p", seed=1), house.adapter_dir("q", seed=2)
        made = (await create(house, "a1", first)).json()
        again = (await create(house, "a1", first)).json()
        assert (again["digest"], again["version"], again["changed"]) == (made["digest"], 1, False)
        other = await create(house, "a1", second)
        assert (other.status_code, error_of(other)["code"]) == (409, "conflict")
        twin = (await create(house, "a9", first)).json()
        assert twin["digest"] == made["digest"]

        replaced = (await create(house, "a1", second, replace=True)).json()
        assert (replaced["version"], replaced["changed"]) == (2, True)
        await house.complete("a1@v1", max_tokens=1)
        await house.complete("a1", max_tokens=1)
        assert [request.digest for request in house.engine.requests] == [made["digest"], replaced["digest"]]
        back = (await create(house, "a1", first, replace=True)).json()
        assert (back["version"], len(back["versions"])) == (1, 2)


async def test_racing_registrations_of_one_name_have_one_winner(tmp_path: Path) -> None:
    async with open_house(tmp_path, max_ingests=4) as house:
        sources = [house.adapter_dir(f"s{i}", seed=i) for i in range(3)]
        answers = await asyncio.gather(*(create(house, "a1", source) for source in sources))
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409]


async def test_racing_deletions_have_one_winner_and_a_base_cannot_be_deleted(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a1")
        answers = await asyncio.gather(*(house.http.delete("/v1/adapters/a1") for _ in range(20)))
        assert sorted(answer.status_code for answer in answers) == [200] + [404] * 19
        assert (await house.http.delete("/v1/adapters/nope")).status_code == 404
        assert (await house.http.delete("/v1/adapters/tiny")).status_code == 400


async def test_names_of_base_models_are_taken(tmp_path: Path) -> None:
    async with open_house(tmp_path, model_aliases="base-v1=tiny") as house:
        source = house.adapter_dir("a1")
        for name in ("tiny", "base-v1"):
            assert (await create(house, name, source)).status_code == 409
        assert not await names(house)


BAD_NAMES = ["org/adapter@v1", "a:b", "a b", "ünï-适配器", "x" * 256, "", "../x", "/abs", "a\\b", "a\0b", ".hidden"]


async def test_names_that_could_not_be_used_everywhere_are_refused(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        source = house.adapter_dir("a1")
        for name in BAD_NAMES:
            answer = await create(house, name, source)
            assert answer.status_code == 400, name
            assert error_of(answer)["param"] == "name"
        await house.seed("A")
        await house.seed("a")
        assert await names(house) == {"A", "a"}


async def test_sources_outside_the_roots_are_refused_and_tell_nothing(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        outside = house.adapter_dir("a1").rename(tmp_path / "outside")
        (tmp_path / "adapters" / "link").symlink_to(outside)
        holder = tmp_path / "adapters" / "holder"
        holder.mkdir()
        shutil.copy(outside / "adapter_config.json", holder)
        (holder / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
        inside = f"file://{tmp_path}/adapters"
        for source in (
            *(f"file://{outside}", f"{inside}/link", f"{inside}/../outside", f"{inside}/%2e%2e/outside"),
            *(f"{inside}/holder", "file:///etc", "file:///nonexistent", "file://host/etc", "http://169.254.169.254/"),
            *(
                "s3://other-bucket/x",
                "/etc",
                "",
                "file://",
                "file:",
                "file:adapters",
                f"{inside}/a%00b",
                "s3:///x",
                f"{inside}?x=1",
            ),
        ):
            answer = await create(house, "a1", source)
            assert answer.status_code == 400, source
            error = error_of(answer)
            assert error["param"] == "source", source
            assert str(tmp_path) not in error["message"].replace(source, "")
        assert not await names(house)


def broken_adapter(house: House, kind: str) -> Path:
    source = house.adapter_dir(kind)
    weights, config = source / "adapter_model.safetensors", source / "adapter_config.json"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif kind == "no-config":
        config.unlink()
    elif kind == "pickle":
        weights.rename(source / "adapter_model.bin")
    elif kind == "not-json":
        config.write_text("{")
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 8}))
    return source


async def test_broken_adapters_are_refused_in_one_shape_and_hurt_nobody(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for kind in ("truncated", "no-config", "pickle", "not-json", "wrong-rank"):
            answer = await create(house, kind, broken_adapter(house, kind))
            status, code = (404, "source_not_found") if kind == "no-config" else (422, "adapter_invalid")
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (status, code), (kind, answer.text)
            assert f"'{kind}'" in error["message"], "names the adapter"
            assert "adapter_" in error["message"], "names the file"
            assert str(tmp_path) not in error["message"]
            assert "Traceback" not in error["message"]
        assert not await names(house)
        assert await names(house, "/v1/models") == {"tiny"}
        assert not list((tmp_path / "store").glob("adapters/*"))
        assert not list((tmp_path / "var").rglob("ingest-*"))
        assert (await house.complete(max_tokens=1)).status_code == 200


async def test_an_ingest_beyond_its_memory_ends_alone(tmp_path: Path) -> None:
    async with open_house(tmp_path, ingest_memory_mb=64) as house:
        answer = await create(house, "a1", house.adapter_dir("a1"))
        assert answer.status_code in (422, 500)
        assert error_of(answer)["message"]
        assert (await house.complete(max_tokens=1)).status_code == 200


async def test_an_ingest_beyond_its_time_is_ended(tmp_path: Path) -> None:
    async with open_house(tmp_path, ingest_wall_s=0.05) as house:
        answer = await create(house, "a1", house.adapter_dir("a1"))
        assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
        assert not list((tmp_path / "var").rglob("ingest-*"))


async def test_more_registrations_than_are_read_at_once_wait_their_turn(tmp_path: Path) -> None:
    async with open_house(tmp_path, max_ingests=1) as house:
        answers = await asyncio.gather(*(create(house, f"a{i}", house.adapter_dir(f"a{i}", seed=i)) for i in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3


def as_files(source: Path) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]


def as_tar(source: Path) -> list[tuple[str, tuple[str, bytes]]]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(source, arcname="adapter")
    return [("files", ("a.tar.gz", buffer.getvalue()))]


def as_zip(source: Path) -> list[tuple[str, tuple[str, bytes]]]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in source.iterdir():
            archive.write(path, path.name)
    return [("files", ("a.zip", buffer.getvalue()))]


async def test_uploads_as_files_tar_or_zip_give_the_same_adapter(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        source, digests = house.adapter_dir("a1"), set()
        for number, pack in enumerate((as_files, as_tar, as_zip)):
            form = {"name": f"u{number}", "replace": "false"}
            answer = await house.http.post("/v1/adapters", data=form, files=pack(source))
            assert answer.status_code == 200, answer.text
            assert answer.json()["source"] == "upload"
            digests.add(answer.json()["digest"])
        assert len(digests) == 1


async def test_an_upload_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with open_house(tmp_path, max_upload_mb=1) as house:
        files = [("files", ("adapter_model.safetensors", b"\0" * (3 << 20)))]
        answer = await house.http.post("/v1/adapters", data={"name": "a1"}, files=files)
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"


async def test_bodies_that_are_no_creation_are_refused(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for body in (b"{", b"[]", b"{}", b'{"name": "a", "source": 5}', b'{"name": "a", "source": "x", "y": 1}'):
            answer = await house.http.post("/v1/adapters", content=body)
            assert answer.status_code == 400
            assert error_of(answer)["code"] == "invalid_request"
        empty = await house.http.post("/v1/adapters", data={"name": "a1"}, files={})
        assert empty.status_code == 400


async def test_without_the_registry_reads_go_on_and_writes_are_refused(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digest = await house.seed("a1")
        source = house.adapter_dir("a2")
        house.store.is_connected = False
        house.bus.set_connected(False)
        assert (await house.complete("a1", max_tokens=1)).headers["x-adapter-digest"] == digest
        for answer in (await create(house, "a2", source), await house.http.delete("/v1/adapters/a1")):
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
        assert (await house.http.get("/v1/adapters/a1")).status_code == 200
        ready = await house.http.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")

        house.store.is_connected = True
        house.bus.set_connected(True)
        assert (await create(house, "a2", source)).status_code == 200


async def test_changes_by_other_gateways_are_seen(tmp_path: Path) -> None:
    async with open_house(tmp_path / "one") as house:
        digest = await house.seed("a1")
        found = await house.store.get(keys.adapter("default", "a1"), AdapterRecord)
        assert found is not None
        stamp = Stamp(keys.REGISTRY_JOURNAL, keys.adapter_entry("default", "a1"), keys.REGISTRY_REVISION)
        assert await house.store.swap([Change(keys.adapter("default", "a1"), found.raw, None)], also=[stamp])
        await house.bus.publish(
            subjects.ADAPTER_EVENTS,
            AdapterEvent(action="delete", tenant="default", name="a1", revision=2, digest=digest),
        )
        async with asyncio.timeout(5):
            while house.gateway.registry.get("default", "a1") is not None:
                await asyncio.sleep(0.01)
        assert (await house.complete("a1")).status_code == 404
