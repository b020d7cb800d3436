"""Store URIs: which may be read, what is fetched of them, and what their errors tell."""

from pathlib import Path

import pytest
from typing_extensions import override

from infinilora.gateway.sources import Buckets, Sources
from infinilora.gateway.uploads import UploadLimits
from infinilora.protocol.errors import InvalidRequest, SourceNotFound, StoreRefused, TooLarge, Unavailable
from infinilora.runtime.blobs import Blob, BlobStore, DirectoryBlobs
from infinilora.weights.unpack import INITIAL_DIRS


class Watched(DirectoryBlobs):
    """A store that notes what it is asked for, may not list, and can be told to change or refuse at some name."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []
        self.refused: set[str] = set()
        self.changes_at = ""

    @override
    def list(self, prefix: str = "") -> list[str]:
        raise StoreRefused("no right to list")

    @override
    def stat(self, name: str) -> Blob | None:
        self.asked.append(name)
        if name in self.refused:
            raise StoreRefused("no right to know")
        return super().stat(name)

    @override
    def get_range(self, name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        self.asked.append(name)
        if name == self.changes_at:
            self.changes_at = ""
            self.put(name, b"other bytes")
        return super().get_range(name, offset, num_bytes, etag=etag)


class World:
    """One bucket `mine` and an empty scratch directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.scratch = root, root / "scratch"
        self.scratch.mkdir()
        self.store = Watched(root / "mine")

    def put(self, prefix: str, *names: str, data: bytes = b"x") -> None:
        for name in names:
            self.store.put(f"{prefix}/{name}", data)

    def fetch(self, source: str, *allowed: str, max_bytes: int = 10_000) -> dict[str, bytes]:
        def open_bucket(name: str) -> BlobStore:
            assert name == "mine"
            return self.store

        limits = UploadLimits(max_bytes=max_bytes)
        sources = Sources([self.root / "roots"], Buckets(allowed or ("mine",), open_bucket), limits)
        assert sources.fetch(source, self.scratch) == self.scratch
        files = (path for path in self.scratch.rglob("*") if path.is_file())
        return {str(path.relative_to(self.scratch)): path.read_bytes() for path in files}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


PEFT = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize("source", ["s3://mine/team/1", "s3://mine/team/1/"])
def test_exactly_the_two_files_are_asked_for_and_nothing_is_listed(world: World, source: str) -> None:
    for prefix in ("team/1", "team/10", "team/1-old", "team/1.bak"):
        world.put(prefix, *PEFT, data=prefix.encode())
    world.put("team/1", "optimizer.pt", "tokenizer.json", "checkpoint-5/adapter_model.safetensors", data=b"o" * 20_000)
    assert world.fetch(source, "mine/team") == dict.fromkeys(PEFT, b"team/1")
    first = {f"{place}/{name}" for place in INITIAL_DIRS for name in PEFT}
    assert set(world.store.asked) == {f"team/1/{name}" for name in (*PEFT, *first)}


@pytest.mark.parametrize("key", ["with space", "plus+plus", "ünï-适配器"])
def test_names_of_any_letters_are_found(world: World, key: str) -> None:
    world.put(key, *PEFT)
    assert world.fetch(f"s3://mine/{key}").keys() == set(PEFT)


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (("adapter_config.json", "adapters.safetensors"), {"adapter_config.json": b"x", "adapters.safetensors": b"x"}),
        (("adapter_config.json", "adapter_model.bin"), {"adapter_config.json": b"x", "adapter_model.bin": b""}),
        ((*PEFT, "adapter_model.bin"), dict.fromkeys(PEFT, b"x")),
        (("adapter_config.json",), {"adapter_config.json": b"x"}),
        (("config.json", "medusa_lm_head.pt"), {"config.json": b"x"}),
    ],
)
def test_what_stands_in_for_the_two_files_is_fetched_so_that_it_can_be_named(
    world: World, there: tuple[str, ...], found: dict[str, bytes]
) -> None:
    world.put("a", *there)
    assert world.fetch("s3://mine/a") == found


def test_a_store_that_only_lets_read_may_refuse_what_is_not_there(world: World) -> None:
    world.put("a", "adapter_config.json", "adapters.safetensors")
    world.store.refused = {"a/adapter_model.safetensors"}
    assert "adapters.safetensors" in world.fetch("s3://mine/a")
    world.store.refused = {"a/adapter_config.json"}
    with pytest.raises(StoreRefused):
        world.fetch("s3://mine/a")


def test_a_prefix_above_adapters_holds_none_and_tells_nothing_of_them(world: World) -> None:
    world.put("team/a/run1", *PEFT)
    world.put("team/a/run2", *PEFT)
    for source in ("s3://mine/team/a", "s3://mine/nothing"):
        with pytest.raises(SourceNotFound) as refused:
            world.fetch(source)
        assert refused.value.http_status == 404
        assert refused.value.message == (
            "the source holds no adapter: adapter_config.json: found none; wanted it there"
        )


@pytest.mark.parametrize("name", PEFT)
def test_an_object_that_changes_while_it_is_read_is_not_packed(world: World, name: str) -> None:
    world.put("a", *PEFT, data=b"y" * 100)
    world.store.changes_at = f"a/{name}"
    with pytest.raises(Unavailable) as told:
        world.fetch("s3://mine/a")
    assert "mine" not in told.value.message


def test_a_config_that_changes_while_the_weights_are_read_is_noticed(world: World) -> None:
    """Each object alone is whole; together they are two adapters."""
    world.put("a", *PEFT, data=b"y" * 100)
    get_range = world.store.get_range

    def replace_config(name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        data = get_range(name, offset, num_bytes, etag=etag)
        if name.endswith("safetensors"):
            world.store.put("a/adapter_config.json", b"z" * 100)
        return data

    world.store.get_range = replace_config  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="changed while it was read"):
        world.fetch("s3://mine/a")


def test_too_much_is_refused_before_it_is_read(world: World) -> None:
    world.put("big", *PEFT, data=b"x" * 2000)
    with pytest.raises(TooLarge):
        world.fetch("s3://mine/big", max_bytes=3000)
    assert list(world.scratch.iterdir()) == []


@pytest.mark.parametrize(
    "source",
    [
        "s3://other/team/a1",
        "s3://mine/teams/a1",
        "s3://mine",
        "s3://mine/team/../a",
        "s3://mine/team/%2e%2e/a",
        "s3:///x",
        "mine/team/a1",
        "team",
        "https://mine/team/a1",
        "s3://[mine/team/a1",
        "s3://mine\u2100/team/a1",
        "s3://key:secret@mine/team/a1",
        "s3://mine/team/a\t1",
        " s3://mine/team/a1",
        "s3://mine//team/a1",
        "s3://mine/%2Fteam/a1",
        "s3://mine/team/a1//",
        "s3://mine/team/%ff",
        "file://[",
        "",
    ],
)
def test_what_lies_outside_is_not_opened(world: World, source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        world.fetch(source, "mine/team")
    assert refused.value.param == "source"
    assert world.store.asked == []


def test_without_an_s3_store_there_are_no_buckets(tmp_path: Path) -> None:
    sources = Sources([tmp_path], Buckets((), None), UploadLimits())
    with pytest.raises(InvalidRequest, match="not S3"):
        sources.fetch("s3://mine/a", tmp_path)


FIRST = tuple(f"pissa_init/{name}" for name in PEFT)
BEGAN = b'{"init_lora_weights": "pissa_niter_4"}'


@pytest.mark.parametrize("config", [BEGAN, b'{"init_lora_weights": true}', b"{}"])
def test_first_values_are_fetched_whatever_the_config_says_of_its_beginning(world: World, config: bytes) -> None:
    """Pairs of their own size under a plain config are refused by whoever reads them, if they are seen."""
    world.put("a", *PEFT, *FIRST, "pissa_init/optimizer.pt")
    world.put("a", PEFT[0], data=config)
    assert world.fetch("s3://mine/a").keys() == {*PEFT, *FIRST}


def test_a_store_that_will_not_say_is_asked_in_vain_only_once(world: World) -> None:
    world.put("a", *PEFT)
    world.store.refused = {f"a/{place}/{name}" for place in INITIAL_DIRS for name in PEFT}
    assert world.fetch("s3://mine/a").keys() == set(PEFT)
    assert [name for name in world.store.asked if "_init" in name] == ["a/pissa_init/adapter_config.json"]


def test_a_store_may_refuse_to_say_that_there_are_no_first_values(world: World) -> None:
    world.put("a", *PEFT, *FIRST)
    world.put("a", PEFT[0], data=BEGAN)
    world.store.refused = {f"a/{FIRST[0]}", "a/olora_init/adapter_config.json"}
    assert world.fetch("s3://mine/a").keys() == {*PEFT, FIRST[1]}


def test_first_values_count_in_the_size_and_must_not_change(world: World) -> None:
    world.put("a", *PEFT, *FIRST, data=b"x" * 300)
    world.put("a", PEFT[0], data=BEGAN)
    with pytest.raises(TooLarge):
        world.fetch("s3://mine/a", max_bytes=900)
    world.store.changes_at = f"a/{FIRST[1]}"
    with pytest.raises(Unavailable, match="replaced while it was read"):
        world.fetch("s3://mine/a")


# Directories --------------------------------------------------------------------------------------


def test_of_a_directory_only_an_adapters_files_are_seen(world: World) -> None:
    directory = world.root / "roots" / "a"
    directory.mkdir(parents=True)
    for name in (*PEFT, "optimizer.pt", *(f"checkpoint-{i}.json" for i in range(500))):
        (directory / name).write_bytes(b"x" * 3000)
    assert world.fetch(f"file://{directory}") == dict.fromkeys(PEFT, b"x" * 3000)


def test_of_a_directory_first_values_are_seen_too_and_lead_nowhere_else(world: World) -> None:
    directory = world.root / "roots" / "a"
    (directory / "pissa_init").mkdir(parents=True)
    for name in (*PEFT, *FIRST):
        (directory / name).write_bytes(b"x")
    assert world.fetch(f"file://{directory}").keys() == {*PEFT, *FIRST}
    (world.root / "secret").write_bytes(b"secret")
    (directory / FIRST[1]).unlink()
    (directory / FIRST[1]).symlink_to(world.root / "secret")
    with pytest.raises(InvalidRequest, match="outside the directories"):
        world.fetch(f"file://{directory}")


def test_links_within_the_roots_are_followed_and_others_are_not(world: World) -> None:
    directory = world.root / "roots" / "hub" / "snapshot"
    directory.mkdir(parents=True)
    (world.root / "roots" / "blob").write_bytes(b"blob")
    (world.root / "secret").write_bytes(b"secret")
    for name in PEFT:
        (directory / name).symlink_to(world.root / "roots" / "blob")
    assert world.fetch(f"file://{directory}") == dict.fromkeys(PEFT, b"blob")
    (directory / PEFT[1]).unlink()
    (directory / PEFT[1]).symlink_to(world.root / "secret")
    with pytest.raises(InvalidRequest, match="outside the directories"):
        world.fetch(f"file://{directory}")


@pytest.mark.parametrize("name", ["", "nothing", "a/run1/.."])
def test_a_directory_without_an_adapter_is_not_found(world: World, name: str) -> None:
    (world.root / "roots" / "a" / "run1").mkdir(parents=True)
    (world.root / "roots" / "a" / "run1" / "adapter_config.json").write_bytes(b"{}")
    with pytest.raises(SourceNotFound, match="found none; wanted it there"):
        world.fetch(f"file://{world.root}/roots/{name}")


def test_a_name_that_no_file_system_takes_and_links_in_a_circle_are_no_adapter(world: World) -> None:
    (world.root / "roots").mkdir(exist_ok=True)
    (world.root / "roots" / "circle").symlink_to(world.root / "roots" / "circle")
    for name in ("n" * 300, "circle", "circle/x"):
        with pytest.raises((SourceNotFound, InvalidRequest)):
            world.fetch(f"file://{world.root}/roots/{name}")
