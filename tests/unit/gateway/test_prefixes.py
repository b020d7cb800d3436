"""What a gateway remembers of the beginnings of prompts."""

from hypothesis import given
from hypothesis import strategies as st

from infinilora.gateway.prefixes import BLOCK_TOKENS, MAX_HOLDERS, PrefixMemory, chain_of
from infinilora.protocol.ids import digest_of

A, B = digest_of(b"a"), digest_of(b"b")
LONG = list(range(3 * BLOCK_TOKENS + 5))


def test_an_engine_is_known_for_the_whole_blocks_that_a_prompt_has_in_common_with_its_own() -> None:
    memory = PrefixMemory()
    memory.note(chain_of(A, LONG), "e")
    for same in (0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, len(LONG)):
        prompt = LONG[:same] + [999] * (4 * BLOCK_TOKENS)
        assert memory.matches(chain_of(A, prompt)) == {"e": same // BLOCK_TOKENS * BLOCK_TOKENS}


def test_the_same_tokens_under_another_adapter_or_the_base_have_nothing_in_common() -> None:
    memory = PrefixMemory()
    memory.note(chain_of(A, LONG), "e")
    assert memory.matches(chain_of(B, LONG)) == {}
    assert memory.matches(chain_of(None, LONG)) == {}


def test_each_engine_is_known_for_what_it_computed_itself() -> None:
    memory = PrefixMemory()
    memory.note(chain_of(A, LONG), "e")
    memory.note(chain_of(A, LONG[:BLOCK_TOKENS]), "f")
    memory.note(chain_of(A, [5]), "g")
    assert memory.matches(chain_of(A, LONG)) == {"e": 3 * BLOCK_TOKENS, "f": BLOCK_TOKENS, "g": 0}


def test_of_many_engines_the_last_ones_are_remembered() -> None:
    memory = PrefixMemory()
    for number in range(MAX_HOLDERS + 2):
        memory.note(chain_of(A, [1]), f"e{number}")
    memory.note(chain_of(A, [1]), "e3")
    assert set(memory.matches(chain_of(A, [1]))) == {"e2", "e3", "e4", "e5"}


def test_what_is_forgotten_first_is_the_end_of_what_was_used_longest_ago() -> None:
    memory = PrefixMemory(max_blocks=6)
    memory.note(chain_of(A, LONG), "e")
    memory.note(chain_of(B, LONG[: 2 * BLOCK_TOKENS]), "f")
    assert memory.matches(chain_of(A, LONG)) == {"e": 2 * BLOCK_TOKENS}
    assert memory.matches(chain_of(B, LONG)) == {"f": 2 * BLOCK_TOKENS}


def test_what_is_used_again_is_kept() -> None:
    memory = PrefixMemory(max_blocks=6)
    for digest in (A, B, A, None):
        memory.note(chain_of(digest, LONG[: 2 * BLOCK_TOKENS]), "e")
    assert memory.matches(chain_of(A, LONG)) == {"e": 2 * BLOCK_TOKENS}
    assert memory.matches(chain_of(B, LONG)) == {}


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=300), st.sampled_from("ef")), max_size=20))
def test_it_never_grows_beyond_its_bound(prompts: list[tuple[list[int], str]]) -> None:
    memory = PrefixMemory(max_blocks=5)
    for tokens, engine in prompts:
        memory.note(chain_of(None, tokens), engine)
        assert len(memory) <= 5
