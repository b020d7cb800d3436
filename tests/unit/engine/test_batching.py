"""A step's tensors against the rows one by one: whatever ran before, made anew or moved on."""

import random
from dataclasses import replace

import pytest
import torch

from infinilora.engine.batching import BatchBuilder
from infinilora.engine.model.batch import Batch
from infinilora.engine.sched.scheduler import Rows
from infinilora.engine.sequence import Sequence

SIZE = 4
CPU = torch.device("cpu")


def sequence(number: int, length: int) -> Sequence:
    """Its tokens and blocks are numbers of its own."""
    tokens = [1000 * number + i for i in range(length)]
    return Sequence(f"r{number}", tokens, length, blocks=blocks(number, length))


def blocks(number: int, length: int) -> list[int]:
    return [100 * number + (7 * i) % 97 for i in range(-(-length // SIZE))]


def walk(batch: Batch, rows: list[Rows]) -> None:
    """Compare every number with the row that it stands for."""
    paging, at = batch.paging, 0
    assert paging.query_lens == tuple(r.count for r in rows)
    assert paging.query_start.tolist() == [sum(r.count for r in rows[:i]) for i in range(len(rows) + 1)]
    assert paging.context_len.tolist() == [r.start + r.count for r in rows]
    assert paging.max_context == max(r.start + r.count for r in rows)
    for i, r in enumerate(rows):
        needed = -(-(r.start + r.count) // SIZE)
        assert paging.block_tables[i, :needed].tolist() == r.sequence.blocks[:needed]
        for position in range(r.start, r.start + r.count):
            assert batch.token_ids[at] == r.sequence.tokens[position]
            assert batch.positions[at] == position
            assert paging.slots[at] == r.sequence.blocks[position // SIZE] * SIZE + position % SIZE
            at += 1
    assert batch.num_rows == at == len(batch.positions) == len(paging.slots)
    assert (batch.token_ids.dtype, batch.positions.dtype, paging.slots.dtype) == (torch.int64,) * 3
    assert (paging.query_start.dtype, paging.context_len.dtype, paging.block_tables.dtype) == (torch.int32,) * 3


def grow(s: Sequence, number: int) -> Rows:
    """One more token, its block if it begins one, and the row that computes it."""
    s.tokens.append(1000 * number + len(s.tokens))
    s.blocks += blocks(number, len(s.tokens))[len(s.blocks) :]
    return Rows(s, len(s.tokens) - 1, 1)


def test_a_mixed_step_is_its_rows_in_order() -> None:
    a, b, c = sequence(1, 13), sequence(2, 4), sequence(3, 30)
    rows = [Rows(a, 5, 8), Rows(b, 3, 1), Rows(c, 0, 17)]
    walk(BatchBuilder(block_size=SIZE, device=CPU).build(rows), rows)


def test_sequences_that_decode_on_are_right_in_every_step_and_earlier_batches_stay() -> None:
    builder = BatchBuilder(block_size=SIZE, device=CPU)
    sequences = [sequence(i, 3 + 5 * i) for i in range(1, 7)]
    kept = []
    for _ in range(20):
        rows = [grow(s, i) for i, s in enumerate(sequences, start=1)]
        kept.append((builder.build(rows), [Rows(r.sequence, r.start, 1) for r in rows]))
    for batch, rows in kept:
        walk(batch, rows)


def test_a_sequence_that_came_back_with_other_blocks_is_read_anew() -> None:
    """Preempted, computed again and decoding again: its last decode step here was of the same sequences."""
    builder = BatchBuilder(block_size=SIZE, device=CPU)
    a, b = sequence(1, 8), sequence(2, 8)
    for _ in range(2):
        builder.build([grow(a, 1), grow(b, 2)])
    b.blocks = [block + 50 for block in b.blocks]
    builder.build([Rows(b, 0, len(b.tokens))])
    rows = [grow(a, 1), grow(b, 2)]
    walk(builder.build(rows), rows)


def test_a_sequence_that_was_found_in_the_cache_again_is_read_anew() -> None:
    """Preempted and admitted again between two decode steps, at the very next position, its tokens being cached."""
    builder = BatchBuilder(block_size=SIZE, device=CPU)
    a, b = sequence(1, 8), sequence(2, 8)
    builder.build([grow(a, 1), grow(b, 2)])
    rows = [grow(a, 1), grow(b, 2)]
    b.blocks = [block + 50 for block in b.blocks]
    walk(builder.build(rows), rows)


def test_the_same_step_again_is_the_same_batch() -> None:
    """A step whose rows were lost is run again: nothing has moved on."""
    builder = BatchBuilder(block_size=SIZE, device=CPU)
    a, b = sequence(1, 7), sequence(2, 11)
    rows = [grow(a, 1), grow(b, 2)]
    for _ in range(3):
        walk(builder.build(rows), rows)
    walk(builder.build(rows[1:]), rows[1:])


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_are_their_rows(seed: int) -> None:
    dice, builder = random.Random(seed), BatchBuilder(block_size=SIZE, device=CPU)
    sequences = {i: sequence(i, dice.randint(1, 20)) for i in range(1, 9)}
    chosen = list(sequences)
    for _ in range(60):
        if dice.random() < 0.2:
            chosen = dice.sample(list(sequences), dice.randint(1, len(sequences)))
        rows = [grow(sequences[i], i) for i in chosen]
        if dice.random() < 0.1:
            rows = [Rows(r.sequence, start := dice.randint(0, r.start), r.start + 1 - start) for r in rows]
        walk(builder.build(rows), rows)


def test_halves_are_what_two_steps_of_their_rows_would_be() -> None:
    builder = BatchBuilder(block_size=SIZE, device=CPU)
    a, b, c = sequence(1, 13), sequence(2, 4), sequence(3, 30)
    rows = [Rows(a, 5, 8), Rows(b, 3, 1), Rows(c, 0, 17)]
    for cut in (1, 2):
        first, second = builder.build(rows).halves(cut)
        for half, part in ((first, rows[:cut]), (second, rows[cut:])):
            assert half.paging.max_context >= max(r.start + r.count for r in part)
            alone = BatchBuilder(block_size=SIZE, device=CPU).build(part).paging
            assert half.paging.query_lens == alone.query_lens
            assert half.paging.query_start.tolist() == alone.query_start.tolist()
            assert half.paging.context_len.tolist() == alone.context_len.tolist()
            assert half.paging.slots.tolist() == alone.slots.tolist()
            walk(replace(half, paging=replace(half.paging, max_context=alone.max_context)), part)
