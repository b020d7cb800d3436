"""What was deleted while a process was away leaves its disk when it is back, and nothing else does."""

from pathlib import Path

import pytest
from typing_extensions import override

from infinilora.pool.cache import DiskCache
from infinilora.pool.share import Share
from infinilora.pool.tiers import Tiers
from infinilora.protocol import keys
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest
from infinilora.protocol.shards import Shape, Sharding
from infinilora.runtime.blobs import Blob, DirectoryBlobs
from support.cards import make_card
from support.pools import pack

CARD = make_card("llama", num_layers=2)


class AwayBlobs(DirectoryBlobs):
    """A store that does not answer."""

    @override
    def stat(self, name: str) -> Blob | None:
        raise Unavailable("the object store does not answer")


def load(tiers: Tiers, digest: Digest) -> None:
    """From the store, all of it, into the cache."""
    source = tiers.open_far(digest)
    for layer in range(CARD.num_layers + 1):
        source.read_layer(layer, memoryview(bytearray(source.layer_span(layer)[1])))
    source.commit()
    source.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_was_deleted_while_a_process_was_away_leaves_its_disk(tmp_path: Path, *, is_shared: bool) -> None:
    blobs = DirectoryBlobs(tmp_path / "store")
    share = Share.of_group(Sharding(Shape(1, 2), CARD.num_layers, CARD.sites), 1) if is_shared else None
    tiers = Tiers(blobs, DiskCache(tmp_path / "cache", 1 << 20), share=share)
    gone, kept = (pack(tmp_path, blobs, CARD, seed=seed).digest for seed in (1, 2))
    for digest in (gone, kept):
        load(tiers, digest)
    used = tiers.cache.names()
    assert tiers.sweep() == 0
    assert tiers.cache.names() == used, "to look at a file is not to use it"
    blobs.delete(keys.packed(gone))
    assert tiers.sweep() == 1
    assert tiers.cache.names() == [tiers.key(kept)]
    tiers.close()


def test_a_store_that_does_not_answer_has_not_lost_anything(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "store")
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    load(Tiers(blobs, cache), pack(tmp_path, blobs, CARD, seed=1).digest)
    with pytest.raises(Unavailable):
        Tiers(AwayBlobs(tmp_path / "store"), cache).sweep()
    assert len(cache.names()) == 1
