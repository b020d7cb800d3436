"""BlockPool: every block free or held, prefixes found by digest and content, never by luck."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinilora.engine.sched.blocks import BlockPool, chain_next, chain_root
from infinilora.protocol.ids import Digest, digest_of

ALPHA, BETA = digest_of(b"alpha"), digest_of(b"beta")


def chain(digest: Digest | None, tokens: list[int], size: int = 4) -> list[bytes]:
    keys, parent = [], chain_root(digest)
    for at in range(0, len(tokens) - size + 1, size):
        parent = chain_next(parent, tokens[at : at + size])
        keys.append(parent)
    return keys


def test_a_committed_prefix_is_found_again_after_its_release() -> None:
    pool = BlockPool(8, 4)
    keys = chain(ALPHA, list(range(8)))
    blocks = pool.take(2)
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        pool.commit(block, key)
    pool.release(blocks)

    assert pool.find(keys) == blocks
    pool.hold(pool.find(keys))
    assert pool.num_free == 6


def test_another_digest_or_the_base_never_finds_it() -> None:
    pool = BlockPool(8, 4)
    blocks = pool.take(1)
    assert blocks is not None
    pool.commit(blocks[0], chain(ALPHA, [1, 2, 3, 4])[0])

    assert pool.find(chain(BETA, [1, 2, 3, 4])) == []
    assert pool.find(chain(None, [1, 2, 3, 4])) == []


def test_keys_depend_on_every_token_before() -> None:
    assert chain(None, [1, 2, 3, 4, 5, 6, 7, 8])[1] != chain(None, [9, 2, 3, 4, 5, 6, 7, 8])[1]


def test_the_ends_of_a_chain_are_taken_before_its_beginning() -> None:
    pool = BlockPool(3, 4)
    keys = chain(None, list(range(12)))
    blocks = pool.take(3)
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        pool.commit(block, key)
    pool.release(blocks)

    pool.take(1)

    assert pool.find(keys) == blocks[:2]


def test_blank_blocks_are_taken_before_remembered_ones() -> None:
    pool = BlockPool(2, 4)
    key = chain(None, [1, 2, 3, 4])[0]
    first, second = pool.take(2) or []
    pool.commit(first, key)
    pool.release([first])
    pool.release([second])

    assert pool.take(1) == [second]
    assert pool.find([key]) == [first]


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(4, 4)
    pool.take(3)
    assert pool.take(2) is None
    assert pool.num_free == 1


def test_check_finds_a_leak() -> None:
    pool = BlockPool(4, 4)
    pool.take(1)
    pool.check()
    with pytest.raises(AssertionError, match="1 blocks leaked"):
        pool.check_idle()


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences come with tokens of a tiny alphabet, share prefixes, and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.held: list[tuple[list[int], list[bytes]]] = []
        self.content: dict[int, bytes] = {}

    @rule(digest=st.sampled_from([None, ALPHA, BETA]), tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8))
    def start(self, digest: Digest | None, tokens: list[int]) -> None:
        keys = chain(digest, tokens, 2)
        found = self.pool.find(keys)
        for block, key in zip(found, keys, strict=False):
            assert self.content[block] == key, "a block was found under content it does not have"
        self.pool.hold(found)
        taken = self.pool.take(len(keys) - len(found))
        if taken is None:
            self.pool.release(found)
            return
        for block, key in zip(taken, keys[len(found) :], strict=True):
            self.content[block] = key
            self.pool.commit(block, key)
        self.held.append((found + taken, keys))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        in_use = {b for blocks, _ in self.held for b in blocks}
        assert self.pool.num_free == self.pool.num_blocks - len(in_use)
        for blocks, keys in self.held:
            assert [self.content[b] for b in blocks] == keys, "a held block was given to somebody else"


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase
