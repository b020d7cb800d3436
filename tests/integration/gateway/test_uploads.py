"""Uploads and narrowing over HTTP, with the real worker."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from infinilora.weights.packed import read_header
from support.gateway_house import error_of, open_house

pytestmark = pytest.mark.integration


def tar_of(source: Path, *, beside: int = 0) -> bytes:
    """The adapter below a directory of its own, with other files of `beside` random bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(source, arcname="run")
        for name in (".gitattributes", "checkpoint-5/optimizer.pt"):
            info = tarfile.TarInfo(f"run/{name}")
            info.size = beside
            archive.addfile(info, io.BytesIO(os.urandom(beside)))
    return buffer.getvalue()


async def test_an_archive_as_the_body_is_the_same_adapter_as_its_directory(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        source = house.adapter_dir("a1")
        named = await house.http.post("/v1/adapters", json={"name": "a1", "source": f"file://{source}"})
        sent = await house.http.post(
            "/v1/adapters?name=a2", content=tar_of(source, beside=5000), headers={"content-type": "application/gzip"}
        )
        assert (named.status_code, sent.status_code) == (200, 200), sent.text
        assert sent.json()["digest"] == named.json()["digest"]
        assert not list((tmp_path / "var").rglob("upload-*"))


async def test_archives_are_opened_by_the_worker_and_refused_in_one_shape(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        files = [("files", ("a.zip", b"PK\x03\x04 and no more"))]
        broken = await house.http.post("/v1/adapters", data={"name": "a1"}, files=files)
        assert (broken.status_code, error_of(broken)["code"]) == (400, "invalid_request")
        assert "the archive cannot be read" in error_of(broken)["message"]
        assert "'a1'" in error_of(broken)["message"]
        empty = await house.http.post(
            "/v1/adapters", data={"name": "a1"}, files=[("files", ("a.tar", tar_of(Path(__file__))))]
        )
        assert (empty.status_code, error_of(empty)["code"]) == (404, "source_not_found")


async def test_narrowing_makes_another_version_and_shows_what_it_cost(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        wish = {"name": "a1", "source": f"file://{house.adapter_dir('a1')}"}
        exact = (await house.http.post("/v1/adapters", json=wish)).json()
        refused = await house.http.post("/v1/adapters", json=wish | {"narrow": "int4"})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "narrow")
        clash = await house.http.post("/v1/adapters", json=wish | {"narrow": "BF16"})
        assert clash.status_code == 409
        narrow = (await house.http.post("/v1/adapters", json=wish | {"narrow": "BF16", "replace": True})).json()
        assert (exact["version"], narrow["version"]) == (1, 2)
        assert (exact["narrowed"], exact["narrow_error"], narrow["narrowed"]) == (None, 0.0, "BF16")
        assert 1e-4 < narrow["narrow_error"] < 2**-6
        assert narrow["bytes"] < exact["bytes"]
        (file,) = (tmp_path / "store").rglob(f"*{narrow['digest'].removeprefix('sha256:')}*.safetensors")
        with file.open("rb") as packed:
            manifest = read_header(packed).manifest
        assert (manifest.pack_version, manifest.dtype, manifest.narrowed_from) == (2, "BF16", "F32")


async def test_a_field_that_no_upload_has_or_that_says_two_things_is_refused(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        archive = tar_of(house.adapter_dir("a1"))
        files = {"files": ("a.tar", archive)}
        for fields, said in (
            ({"name": "a1", "replcae": "true"}, "replcae"),
            ({"name": "a1", "source": "s3://b/a"}, "source"),
            ({"name": "a1", "replace": "perhaps"}, "replace"),
            ({"name": ["a1", "a2"]}, "name"),
        ):
            form = await house.http.post("/v1/adapters", data=fields, files=files)
            query = await house.http.post(
                "/v1/adapters", params=fields, content=archive, headers={"content-type": "application/x-tar"}
            )
            for answer in (form, query):
                assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_request"), answer.text
                assert said in error_of(answer)["message"]
        empty = {"name": "a1", "base": "", "replace": "", "tenant": "", "narrow": ""}  # a browser's form
        assert (await house.http.post("/v1/adapters", data=empty, files=files)).json()["version"] == 1
