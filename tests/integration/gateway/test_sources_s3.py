"""Sources in a bucket of a real S3 server: what is asked of it, and what becomes of its faults."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from infinilora.gateway.sources import Buckets, Sources
from infinilora.gateway.uploads import UploadLimits
from infinilora.protocol.errors import SourceNotFound, StoreRefused, Unavailable
from infinilora.runtime.blobs import BlobStore, open_blobs
from support.procs import WeedServer
from support.s3_proxy import Fault, S3Proxy

pytestmark = pytest.mark.integration
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 400}


class Bucket:
    """A bucket behind the proxy, and sources that may read it."""

    def __init__(self, server: WeedServer, proxy: S3Proxy) -> None:
        self.name = f"b.{uuid4().hex[:12]}"
        self.proxy = proxy
        self._server = server
        self.direct = self._open_at(server.url(self.name))
        self._sources = Sources([], Buckets((self.name,), self._open), UploadLimits())

    def _open(self, name: str) -> BlobStore:
        return self._open_at(self.proxy.url(name))

    def _open_at(self, url: str) -> BlobStore:
        return open_blobs(url, access_key=self._server.access_key, secret_key=self._server.secret_key)

    def put(self, prefix: str) -> None:
        for name, data in FILES.items():
            self.direct.put(f"{prefix}/{name}", data)

    def fetch(self, prefix: str, scratch: Path) -> dict[str, bytes]:
        scratch.mkdir()
        self._sources.fetch(f"s3://{self.name}/{prefix}", scratch)
        return {path.name: path.read_bytes() for path in scratch.iterdir()}


@pytest.fixture
def bucket(s3_server: WeedServer) -> Iterator[Bucket]:
    with S3Proxy(int(s3_server.endpoint.rpartition(":")[2])) as proxy:
        yield Bucket(s3_server, proxy)


@pytest.mark.parametrize("prefix", ["lora/1", "lora/1/", "with space/plus+plus", "ünï/适配器"])
def test_two_objects_are_read_by_name_and_nothing_is_listed(bucket: Bucket, tmp_path: Path, prefix: str) -> None:
    bucket.put(prefix.rstrip("/"))
    bucket.put("lora/10")
    bucket.direct.put(f"{prefix.rstrip('/')}/optimizer.pt", b"x" * 1000)
    assert bucket.fetch(prefix, tmp_path / "s") == FILES
    asked = {seen.path.partition("?")[0].rpartition("/")[2] for seen in bucket.proxy.seen}
    assert asked == set(FILES)
    assert not any("list-type" in seen.path for seen in bucket.proxy.seen)


def test_what_is_not_there_is_not_found(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("team/run1")
    for number, prefix in enumerate(("team", "team/run", "team/run10")):
        with pytest.raises(SourceNotFound, match="found none; wanted it there"):
            bucket.fetch(prefix, tmp_path / str(number))


def test_a_refusing_store_is_the_operators_matter_and_names_nothing(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("a")
    bucket.proxy.fault(Fault(method="HEAD", path="adapter_config.json", status=403), times=5)
    with pytest.raises(StoreRefused) as refused:
        bucket.fetch("a", tmp_path / "s")
    for secret in (bucket.name, "127.0.0.1", "http"):
        assert secret not in refused.value.message


def test_an_object_that_is_replaced_between_two_ranges_is_noticed(bucket: Bucket, tmp_path: Path) -> None:
    """The proxy answers the first look at it with the etag of what was there before."""
    bucket.put("a")
    bucket.proxy.fault(
        Fault(method="HEAD", path="adapter_model.safetensors", headers={"ETag": '"d41d8cd98f00b204e9800998ecf8427e"'})
    )
    with pytest.raises(Unavailable, match=r"changed|replaced|no longer"):
        bucket.fetch("a", tmp_path / "s")
    assert bucket.fetch("a", tmp_path / "again") == FILES
