"""SHA-256 of several stretches at once, against hashlib's."""

import hashlib

import numpy as np
import pytest

from infinilora.kernels import native
from infinilora.kernels.hashing import sha256_each

EDGES = [0, 1, 3, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 1000, 4096]
"""Around the ends of blocks, and where the length takes a block of its own."""


def stretches(lengths: list[int], seed: int = 0) -> list[bytes]:
    return [np.random.default_rng([seed, at]).bytes(length) for at, length in enumerate(lengths)]


def by_hashlib(data: list[bytes]) -> list[bytes]:
    return [hashlib.sha256(each).digest() for each in data]


@pytest.mark.parametrize("length", EDGES)
def test_one_stretch(length: int) -> None:
    data = stretches([length])
    assert sha256_each(data) == by_hashlib(data)


@pytest.mark.parametrize("number", [0, 2, 3, 5, 17])
def test_several_of_unlike_lengths_are_each_their_own(number: int) -> None:
    for seed in range(20):
        lengths = np.random.default_rng([number, seed]).choice([*EDGES, 5000, 70_000], number).tolist()
        data = stretches(lengths, seed)
        assert sha256_each(data) == by_hashlib(data), lengths


def test_every_order_of_a_long_and_short_ones() -> None:
    for lengths in ([9000, 1, 1, 1], [1, 9000, 1, 1], [1, 1, 9000, 1], [1, 1, 1, 9000], [9000, 9000], [64, 128, 64]):
        data = stretches(lengths)
        assert sha256_each(data) == by_hashlib(data), lengths


def test_parts_of_memory_that_begin_anywhere() -> None:
    memory = memoryview(bytearray(np.random.default_rng(1).bytes(300)))
    data = [memory[at : at + 100 + at] for at in range(20)]
    assert sha256_each(data) == [hashlib.sha256(each).digest() for each in data]


def test_without_the_library_the_digests_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    data = stretches(EDGES)
    assert sha256_each(data) == by_hashlib(data)
