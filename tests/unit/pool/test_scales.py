"""Column scales out of a pool: those of the file, layer by layer as they arrive, told to each holder of a tenancy."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from infinilora.pool.pool import AdapterPool, LeaseState, PoolConfig
from infinilora.pool.scales import AdapterScales
from infinilora.protocol.adapter import Site
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.weights.packed import packed_ranges, read_header
from support.cards import make_card
from support.pools import DefinedKernels, Told, pack
from support.scaled import Scaled, pack_scaled

CARD = make_card("llama", heads=4, kv_heads=1, head_dim=6, hidden=24, intermediate=31, vocab_size=40, outer=True)
"""Widths at which no vector fills a multiple of 64 bytes."""
TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head", "embed_tokens"]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[AdapterPool]:
    config = PoolConfig(
        base=CARD.fingerprint,
        num_layers=CARD.num_layers,
        capacity_bytes=1 << 20,
        num_slots=1,
        cache_dir=tmp_path / "cache",
        cache_bytes=1 << 20,
    )
    deaths: list[BaseException] = []
    made = AdapterPool(config, DirectoryBlobs(tmp_path / "store"), DefinedKernels(), on_death=deaths.append)
    yield made
    made.check()
    made.close()
    assert not deaths


def adapter(work: Path, seed: int) -> Scaled:
    return pack_scaled(work, DirectoryBlobs(work / "store"), CARD, seed=seed, targets=TARGETS)


def is_of(state: LeaseState, scaled: Scaled) -> None:
    wanted = {place: factors for place, factors in scaled.factors.items() if place[1] is not Site.EMBED}
    assert {(scale.layer, scale.site) for scale in state.scales} == wanted.keys()
    for scale in state.scales:
        np.testing.assert_array_equal(scale.factors.numpy(), wanted[scale.layer, scale.site])


def test_each_layer_gives_its_own_and_none_before_it_is_read(tmp_path: Path) -> None:
    scaled = adapter(tmp_path, 1)
    with scaled.path.open("rb") as file:
        header = read_header(file)
        scales = AdapterScales(header.manifest)
        assert scales.sites == tuple(
            sum(1 << site for at, site in scaled.factors if at == layer and site is not Site.EMBED)
            for layer in range(3)
        )
        assert scales.until(0) == ()
        for layer in range(3):
            ranges = packed_ranges(header, layer)
            file.seek(ranges[0][1])
            data = file.read(sum(num_bytes for _, _, num_bytes in ranges))
            scales.read(layer, torch.frombuffer(bytearray(data), dtype=torch.uint8))
            assert {scale.layer for scale in scales.until(layer + 1)} == set(range(layer + 1))
    for scale in scales.until(3):
        np.testing.assert_array_equal(scale.factors.numpy(), scaled.factors[scale.layer, scale.site])


def test_a_holder_is_told_them_with_the_layers(pool: AdapterPool, tmp_path: Path) -> None:
    scaled, told, late = adapter(tmp_path, 1), Told(), Told()
    pool.lease("one", scaled.digest, told)
    is_of(told.resident(), scaled)
    for state in told.states:
        assert all(scale.layer < state.layers_ready for scale in state.scales)
        assert sum(bin(mask).count("1") for mask in state.scaled_sites[: state.layers_ready]) == len(state.scales)
    pool.lease("two", scaled.digest, late)
    is_of(late.resident(), scaled)


def test_the_next_tenancy_of_a_slot_has_its_own(pool: AdapterPool, tmp_path: Path) -> None:
    adapters = [adapter(tmp_path, seed) for seed in (1, 2, 1)]
    generations = []
    for scaled in adapters:
        told = Told()
        pool.lease("one", scaled.digest, told)
        state = told.resident()
        is_of(state, scaled)
        generations.append(state.slot_generation)
        pool.release("one", scaled.digest)
    assert len(set(generations)) == 3, "there is one slot, and the three were in it in turn"


def test_an_adapter_without_any_has_none(pool: AdapterPool, tmp_path: Path) -> None:
    plain, told = pack(tmp_path, DirectoryBlobs(tmp_path / "store"), CARD, seed=3), Told()
    pool.lease("one", plain.digest, told)
    state = told.resident()
    assert (state.scaled_sites, state.scales) == ((), ())
