import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinilora.pool.pages import PageArena, Run
from infinilora.protocol.errors import InvalidRequest

PAGE = 64


def test_runs_are_contiguous_aligned_and_of_the_size_asked_for() -> None:
    arena = PageArena(64 * PAGE, page_bytes=PAGE)
    runs = arena.allocate([100, 0, 64])
    assert runs is not None
    assert [run.data.numel() for run in runs] == [100, 0, 64]
    assert all(run.data.data_ptr() % 64 == 0 for run in runs)
    assert arena.free_bytes == arena.capacity_bytes - arena.cost([100, 0, 64])


def test_an_adapter_may_lie_in_several_extents_but_a_layer_may_not() -> None:
    arena = PageArena(6 * PAGE, page_bytes=PAGE)
    first, hole, last = (arena.allocate([2 * PAGE]) for _ in range(3))
    assert first
    assert hole
    assert last
    arena.free(first)
    arena.free(last)
    assert arena.allocate([3 * PAGE]) is None
    assert arena.allocate([2 * PAGE, 2 * PAGE]) is not None


def test_a_refused_allocation_takes_nothing() -> None:
    arena = PageArena(4 * PAGE, page_bytes=PAGE)
    middle = arena.allocate([PAGE])
    assert arena.allocate([2 * PAGE, 2 * PAGE]) is None
    arena.check(middle or ())


def test_freeing_twice_is_noticed() -> None:
    arena = PageArena(4 * PAGE, page_bytes=PAGE)
    run = arena.allocate([2 * PAGE])
    assert run
    arena.free(run)
    with pytest.raises(AssertionError):
        arena.free(run)


def test_a_leak_is_noticed() -> None:
    arena = PageArena(4 * PAGE, page_bytes=PAGE)
    arena.allocate([PAGE])
    with pytest.raises(AssertionError):
        arena.check([])


def test_a_pool_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="pool_bytes is 10"):
        PageArena(10)


class Arena(RuleBasedStateMachine):
    """Each adapter's bytes are its own for as long as it holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = PageArena(40 * PAGE, page_bytes=PAGE)
        self.held: list[tuple[int, tuple[Run, ...]]] = []
        self.mark = 0

    @rule(sizes=st.lists(st.integers(0, 12 * PAGE), max_size=5))
    def allocate(self, sizes: list[int]) -> None:
        runs = self.arena.allocate(sizes)
        if runs is None:
            return
        self.mark = (self.mark + 1) % 256
        for run in runs:
            run.data.fill_(self.mark)
        self.held.append((self.mark, runs))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.arena.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[1])

    @rule()
    def an_empty_arena_has_all_its_room_in_one_piece(self) -> None:
        if not self.held:
            whole = self.arena.allocate([self.arena.capacity_bytes])
            assert whole is not None
            self.arena.free(whole)

    @invariant()
    def sound(self) -> None:
        self.arena.check(run for _, runs in self.held for run in runs)
        for mark, runs in self.held:
            assert all(bool((run.data == mark).all()) for run in runs)


TestArena = Arena.TestCase
TestArena.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
