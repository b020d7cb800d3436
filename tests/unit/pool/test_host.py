"""The tier in host memory: its cap, its order of use, and that nobody's bytes are taken from under them."""

from collections import Counter
from pathlib import Path

import pytest

from infinilora.pool.cache import DiskCache
from infinilora.pool.host import HostAdapter, HostTier
from infinilora.pool.tiers import NotNear, Tiers
from infinilora.protocol import keys
from infinilora.protocol.errors import AdapterFailed, InvalidRequest
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.weights.packed import PackedHeader, read_header
from support.cards import make_card
from support.pools import Packed, WatchedBlobs, pack

CARD = make_card("llama", num_layers=2)
PAGE = 4096


@pytest.fixture
def blobs(tmp_path: Path) -> WatchedBlobs:
    return WatchedBlobs(DirectoryBlobs(tmp_path / "store"))


@pytest.fixture
def adapters(tmp_path: Path, blobs: WatchedBlobs) -> list[Packed]:
    return [pack(tmp_path, blobs, CARD, seed=seed) for seed in range(3)]


def header_of(adapter: Packed) -> PackedHeader:
    with adapter.path.open("rb") as file:
        return read_header(file)


def cost_of(adapter: Packed) -> int:
    """Its layers, each rounded up to pages."""
    layer_bytes: Counter[int] = Counter()
    for entry in header_of(adapter).manifest.sites:
        layer_bytes[entry.layer] += entry.num_bytes
    return sum(-(-num_bytes // PAGE) * PAGE for num_bytes in layer_bytes.values())


def put(tier: HostTier, adapter: Packed) -> HostAdapter | None:
    held = tier.begin(adapter.digest, header_of(adapter))
    if held:
        tier.keep(held)
        tier.close(held)
    return held


def is_here(tier: HostTier, digest: Digest) -> bool:
    held = tier.open(digest)
    if held:
        tier.close(held)
    return held is not None


def test_the_least_recently_used_goes_and_the_cap_holds(adapters: list[Packed]) -> None:
    size = cost_of(adapters[0])
    tier = HostTier(2 * size, is_pinned=False)
    put(tier, adapters[0])
    put(tier, adapters[1])
    assert is_here(tier, adapters[0].digest)
    put(tier, adapters[2])
    assert [is_here(tier, a.digest) for a in adapters] == [True, False, True]
    assert tier.used_bytes == 2 * size
    tier.check()


def test_what_is_open_stays_and_nothing_goes_in_vain(adapters: list[Packed]) -> None:
    size = cost_of(adapters[0])
    tier = HostTier(2 * size, is_pinned=False)
    put(tier, adapters[0])
    held = tier.open(adapters[0].digest)
    assert held is not None
    filling = tier.begin(adapters[1].digest, header_of(adapters[1]))
    assert filling is not None
    assert put(tier, adapters[2]) is None
    tier.close(filling)
    assert tier.used_bytes == size, "what was begun and never kept is given back"
    assert put(tier, adapters[2])
    tier.close(held)
    tier.check()


def test_what_is_forgotten_while_it_is_read_goes_with_its_last_reader(adapters: list[Packed]) -> None:
    tier = HostTier(1 << 20, is_pinned=False)
    put(tier, adapters[0])
    held = tier.open(adapters[0].digest)
    assert held is not None
    assert tier.forget(adapters[0].digest)
    assert not is_here(tier, adapters[0].digest)
    assert tier.used_bytes > 0
    held.layer(0).fill_(7)
    tier.close(held)
    assert tier.used_bytes == 0
    assert not tier.forget(adapters[0].digest)


def test_two_loads_of_one_adapter_leave_one_copy(adapters: list[Packed]) -> None:
    tier = HostTier(1 << 20, is_pinned=False)
    both = [tier.begin(adapters[0].digest, header_of(adapters[0])) for _ in range(2)]
    for held in both:
        assert held is not None
        tier.keep(held)
    for held in both:
        assert held is not None
        tier.close(held)
    tier.check()
    assert tier.used_bytes == cost_of(adapters[0])


def test_an_adapter_lies_from_a_pages_start_and_is_what_was_packed(
    tmp_path: Path, adapters: list[Packed], blobs: WatchedBlobs
) -> None:
    adapter, host = adapters[0], HostTier(1 << 20, is_pinned=False)
    tiers = Tiers(blobs, DiskCache(tmp_path / "cache", 0), host)
    with pytest.raises(NotNear):
        tiers.open_near(adapter.digest)
    source = tiers.open_far(adapter.digest)
    for layer in range(CARD.num_layers + 1):
        source.hold_layer(layer)
    source.commit()
    source.close()
    blobs.failures_left = 1000
    again = tiers.open_near(adapter.digest)
    assert again.tier == "host"
    file = adapter.path.read_bytes()
    for layer in range(CARD.num_layers):
        start, num_bytes = again.layer_span(layer)
        held = again.hold_layer(layer)
        assert held is not None
        assert held.data_ptr() % PAGE == 0
        assert held.numpy().tobytes() == file[start : start + num_bytes]
    again.close()
    host.check()


def test_less_than_a_page_is_no_tier() -> None:
    with pytest.raises(InvalidRequest, match="host_bytes is 100; wanted 0, or at least one page"):
        HostTier(100, is_pinned=False)


def test_a_load_that_is_given_up_leaves_no_bytes(tmp_path: Path, adapters: list[Packed], blobs: WatchedBlobs) -> None:
    host = HostTier(1 << 20, is_pinned=False)
    source = Tiers(blobs, DiskCache(tmp_path / "cache", 0), host).open_far(adapters[0].digest)
    assert host.used_bytes == 0, "nothing is taken before a layer is asked for"
    source.hold_layer(0)
    assert host.used_bytes > 0
    source.close()
    assert host.used_bytes == 0
    assert not is_here(host, adapters[0].digest)


@pytest.mark.parametrize("shared_bytes", [0, 1 << 30])
@pytest.mark.parametrize("site", [0, 3])
def test_a_corrupt_block_is_found_by_whoever_verifies_it_and_never_gets_into_the_tier(
    tmp_path: Path,
    adapters: list[Packed],
    blobs: WatchedBlobs,
    monkeypatch: pytest.MonkeyPatch,
    shared_bytes: int,
    site: int,
) -> None:
    monkeypatch.setattr("infinilora.pool.tiers.SHARED_BYTES", shared_bytes)
    header = header_of(adapters[0])
    entry = [entry for entry in header.manifest.sites if entry.layer == 1][site]
    file = tmp_path / "store" / keys.packed(adapters[0].digest)
    data = bytearray(file.read_bytes())
    data[header.data_start + entry.offset + 5] ^= 1
    file.write_bytes(data)
    host = HostTier(1 << 20, is_pinned=False)
    source = Tiers(blobs, DiskCache(tmp_path / "cache", 0), host).open_far(adapters[0].digest)
    source.hold_layer(0)
    with pytest.raises(AdapterFailed, match=f"layer 1 site {entry.site.label} block 0: found sha256"):
        source.hold_layer(1)
    source.close()
    assert not is_here(host, adapters[0].digest)
    assert host.used_bytes == 0
