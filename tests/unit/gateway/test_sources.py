"""Store URIs: which may be read. Roots of directories are tested over HTTP; here it is buckets."""

from pathlib import Path

import pytest

from infinilora.gateway.sources import Buckets, Sources
from infinilora.gateway.uploads import UploadLimits
from infinilora.protocol.errors import InvalidRequest, TooLarge
from infinilora.runtime.blobs import BlobStore, DirectoryBlobs


def sources_over(root: Path, *allowed: str, max_bytes: int = 1000) -> Sources:
    """Buckets are directories below `root`."""

    def open_bucket(name: str) -> BlobStore:
        return DirectoryBlobs(root / name)

    return Sources([], Buckets(allowed, open_bucket), UploadLimits(max_bytes=max_bytes, max_files=3))


def test_files_below_a_prefix_are_copied(tmp_path: Path) -> None:
    store = DirectoryBlobs(tmp_path / "mine")
    store.put("team/a1/adapter_config.json", b"{}")
    store.put("team/a1/adapter_model.safetensors", b"abc" * 100)
    store.put("team/a10/adapter_config.json", b"other")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert sources_over(tmp_path, "mine/team").fetch("s3://mine/team/a1/", scratch) == scratch
    assert {path.name for path in scratch.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (scratch / "adapter_model.safetensors").read_bytes() == b"abc" * 100


@pytest.mark.parametrize(
    "source",
    [
        "s3://other/team/a1",
        "s3://mine/teams/a1",
        "s3://mine",
        "s3://mine/team/../a",
        "s3://mine/team/%2e%2e/a",
        "s3:///x",
    ],
)
def test_what_lies_outside_is_not_opened(tmp_path: Path, source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sources_over(tmp_path, "mine/team").fetch(source, tmp_path)
    assert refused.value.param == "source"


def test_an_empty_prefix_too_many_and_too_much_are_refused(tmp_path: Path) -> None:
    store, sources = DirectoryBlobs(tmp_path / "mine"), sources_over(tmp_path, "mine")
    with pytest.raises(InvalidRequest, match="no file"):
        sources.fetch("s3://mine/a", tmp_path)
    store.put("big/x", b"x" * 2000)
    with pytest.raises(TooLarge):
        sources.fetch("s3://mine/big", tmp_path)
    for number in range(4):
        store.put(f"many/{number}", b"x")
    with pytest.raises(TooLarge):
        sources.fetch("s3://mine/many", tmp_path)


def test_without_an_s3_store_there_are_no_buckets(tmp_path: Path) -> None:
    sources = Sources([tmp_path], Buckets((), None), UploadLimits())
    with pytest.raises(InvalidRequest, match="not S3"):
        sources.fetch("s3://mine/a", tmp_path)
