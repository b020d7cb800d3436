"""A choice as it grows: what is shown, when, and which tokens go with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.gateway.choice import Choice, Delta, Scored
from infinilora.gateway.text import TokenTable
from support.gateway_house import byte_tokenizer

TOKENIZER = byte_tokenizer()
TABLE = TokenTable(TOKENIZER)
EOS = 2


def run(ids: list[int], *, stops: list[str] | None = None, reason: str = "length") -> list[Delta]:
    choice, deltas = Choice(TABLE, stops=stops or [], stop_ids={EOS}), []
    for token_id in ids:
        deltas.append(choice.push(Scored(token_id, -0.5, ())))
        if deltas[-1].finish_reason:
            return deltas
    return [*deltas, choice.finish(reason)]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[Delta]) -> list[int]:
    return [shown.token.id for delta in deltas for shown in delta.tokens]


def test_all_tokens_are_shown_with_their_text() -> None:
    ids = TOKENIZER.encode("the fox 🦊 ran").ids
    deltas = run(ids)
    assert text_of(deltas) == "the fox 🦊 ran"
    assert ids_of(deltas) == ids
    assert deltas[-1].finish_reason == "length"


def test_a_stop_string_ends_the_choice_and_drops_its_tokens() -> None:
    ids = TOKENIZER.encode("The quick brown fox jumps").ids
    deltas = run(ids, stops=["own fox"])
    assert text_of(deltas) == "The quick br"
    assert deltas[-1].finish_reason == "stop"
    shown = ids_of(deltas)
    assert shown == ids[: len(shown)]
    assert TOKENIZER.decode(shown).startswith("The quick br")
    assert not TOKENIZER.decode(shown[:-1]).startswith("The quick br")


def test_held_text_is_flushed_with_its_tokens_when_no_match_follows() -> None:
    ids = TOKENIZER.encode("the quick brown").ids
    deltas = run(ids, stops=["brown fox"])
    assert text_of(deltas) == "the quick brown"
    assert ids_of(deltas) == ids
    assert deltas[-1].finish_reason == "length"


def test_a_stop_completed_inside_an_unfinished_longer_one_cuts_at_the_end() -> None:
    deltas = run(TOKENIZER.encode("the fox").ids, stops=["e fox jumps", "fo"])
    assert (text_of(deltas), deltas[-1].finish_reason) == ("the ", "stop")


def test_a_character_cut_by_the_budget_is_one_replacement_and_keeps_its_tokens() -> None:
    ids = TOKENIZER.encode("a🦊").ids[:-1]
    deltas = run(ids)
    assert text_of(deltas) == "a\ufffd"
    assert ids_of(deltas) == ids


def test_the_token_that_stopped_a_sequence_is_not_shown() -> None:
    ids = TOKENIZER.encode("fox").ids
    deltas = run([*ids, EOS], reason="stop")
    assert ids_of(deltas) == ids
    assert text_of(deltas) == "fox"
    assert deltas[-1].finish_reason == "stop"


def test_a_stop_id_that_did_not_stop_is_shown() -> None:
    ids = [*TOKENIZER.encode("fox").ids, EOS, *TOKENIZER.encode(" ran").ids]
    assert ids_of(run(ids)) == ids


def test_without_a_tokenizer_the_tokens_come_alone() -> None:
    choice = Choice(None)
    assert [shown.token.id for shown in choice.push(Scored(7, None, ())).tokens] == [7]
    assert choice.finish("length") == Delta("", (), "length")


@pytest.mark.parametrize("text", ["the fox", "a🦊b", "日本語"])
def test_offsets_say_where_a_tokens_text_begins(text: str) -> None:
    shown = [s for delta in run(TOKENIZER.encode(text).ids) for s in delta.tokens]
    for token, follower in zip(shown, [*shown[1:], None], strict=True):
        label = TABLE.label(token.token.id)
        if not label.startswith("bytes:"):
            end = follower.offset if follower else len(text)
            assert text[token.offset : end] == label


@given(st.text("ab 🦊é", max_size=20), st.lists(st.text("ab 🦊é", min_size=1, max_size=4), max_size=3))
def test_text_is_that_of_the_definition_and_tokens_match_it(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text).ids
    deltas = run(ids, stops=stops)
    found = [i for stop in stops if (i := text.find(stop)) >= 0]
    assert text_of(deltas) == text[: min(found, default=len(text))]
    shown = ids_of(deltas)
    assert shown == ids[: len(shown)]
    assert TOKENIZER.decode(shown).startswith(text_of(deltas))
