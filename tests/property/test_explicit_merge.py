"""Adapters drawn at random are packed as an explicit merge has them; with one thing wrong, as that or not at all."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import AdapterError
from infinilora.weights.ingest import ingest
from infinilora.weights.packed import part_arrays, part_biases, read_header
from support.explicit_merge import Deltas, disagreement, explicit_deltas
from support.explicit_rules import NoMeaning
from support.faulty_adapters import faulty
from support.random_adapters import Adapter, adapters


def settings_for(examples: int, *, is_soak: bool = False) -> settings:
    """The suite draws the same examples each time, so that it judges the change; the soak draws new ones."""
    slow = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
        HealthCheck.filter_too_much,
    ]
    return settings(max_examples=examples, deadline=None, suppress_health_check=slow, derandomize=not is_soak)


def meaning(directory: Path, adapter: Adapter) -> Deltas | NoMeaning:
    try:
        return explicit_deltas(directory, adapter.card)
    except NoMeaning as no:
        return no


def packed(path: Path, card: BaseCard) -> Deltas:
    """What a packed file adds to the weights of its base, and to its outputs."""
    geometry, deltas = card.geometry(), Deltas()
    with path.open("rb") as file:
        header = read_header(file)
        for entry in header.manifest.sites:
            modules = {part.name: part.module for part in geometry[entry.layer, entry.site].parts}
            file.seek(header.data_start + entry.offset)
            for block in range(entry.num_blocks):
                raw = np.frombuffer(file.read(entry.num_bytes // entry.num_blocks), np.uint8)
                arrays = part_arrays(entry, header.manifest.dtype, raw)
                biases = part_biases(entry, header.manifest.dtype, raw)
                for part, (a, bt), bias in zip(entry.parts, arrays, biases, strict=True):
                    module = modules[part.name].replace("{expert}", str(block))
                    assert not part.has_colscale
                    deltas[module] = part.scale * (bt.astype(np.float64).T @ a.astype(np.float64))
                    if bias is not None:
                        deltas[f"{module}.bias"] = bias.astype(np.float64)
    return deltas


def served(directory: Path, adapter: Adapter) -> Deltas | AdapterError:
    """What was packed, or the refusal. Any error but a refusal of the adapter fails the test."""
    out = directory / "packed"
    try:
        ingest(directory, adapter.card, out)
        return packed(out, adapter.card)
    except AdapterError as refused:
        assert not out.exists()
        return refused


def check_good(adapter: Adapter) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = adapter.write(Path(name))
        wanted, found = meaning(directory, adapter), served(directory, adapter)
    assert isinstance(wanted, NoMeaning) != adapter.has_meaning, f"the oracle cannot read what was drawn: {wanted}"
    if isinstance(found, AdapterError):
        assert not adapter.must_serve, f"a good adapter was refused: {found}"
        return
    assert not isinstance(wanted, NoMeaning), f"served, although {wanted}"
    assert not (wrong := disagreement(found, wanted, adapter.card)), wrong


def check_faulty(adapter: Adapter) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = adapter.write(Path(name))
        wanted, found = meaning(directory, adapter), served(directory, adapter)
    if isinstance(found, AdapterError):
        return
    assert not isinstance(wanted, NoMeaning), f"served, although {wanted}"
    assert not (wrong := disagreement(found, wanted, adapter.card)), wrong


@pytest.mark.timeout(300)
@settings_for(500)
@given(adapters())
def test_any_adapter_is_packed_as_its_explicit_merge(adapter: Adapter) -> None:
    check_good(adapter)


@pytest.mark.timeout(300)
@settings_for(500)
@given(faulty(adapters()))
def test_one_fault_is_refused_or_served_as_the_file_then_says(adapter: Adapter) -> None:
    check_faulty(adapter)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings_for(20_000, is_soak=True)
@given(adapters())
def test_any_of_many_adapters_is_packed_as_its_explicit_merge(adapter: Adapter) -> None:
    check_good(adapter)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings_for(20_000, is_soak=True)
@given(faulty(adapters()))
def test_one_of_many_faults_is_refused_or_served_as_the_file_then_says(adapter: Adapter) -> None:
    check_faulty(adapter)
