"""Tiny checkpoints, loaded engines and adapters, made once a run."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from infinilora.engine.assemble import LoadedModel
from support.engines import load_tiny
from support.oracle import Oracle, write_adapter
from support.tiny_models import TinyModel, make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda name: make_tiny_model(name, root / name))


@pytest.fixture(scope="session")
def loaded(tiny: Callable[[str], TinyModel]) -> Callable[[str], LoadedModel]:
    return cache(lambda name: load_tiny(tiny(name).directory))


@pytest.fixture(scope="session")
def oracle(tiny: Callable[[str], TinyModel]) -> Callable[[str], Oracle]:
    return cache(lambda name: Oracle(tiny(name).directory))


@pytest.fixture(scope="session")
def adapter(tiny: Callable[[str], TinyModel]) -> Callable[..., Path]:
    """A random PEFT adapter of a tiny model: adapter(model, rank, targets, seed, std)."""

    @cache
    def make(name: str, rank: int, targets: tuple[str, ...], seed: int, std: float = 0.25) -> Path:
        model = tiny(name).directory
        return write_adapter(
            model.parent / f"{name}-a{seed}-r{rank}", model, rank=rank, targets=targets, seed=seed, std=std
        )

    return make
