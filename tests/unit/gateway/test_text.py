"""Token ids to text: bytes, characters cut by tokens, stop strings cut by tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from infinilora.gateway.text import StopMatcher, TextDecoder, TokenTable, decode_all
from support.gateway_house import byte_tokenizer

BYTES = byte_tokenizer()
TABLE = TokenTable(BYTES)


def decode(ids: list[int], *, skip_special: bool = True) -> list[str]:
    decoder = TextDecoder(TABLE, skip_special=skip_special)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """All text that a matcher lets out of these pieces."""
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out += text
        if stopped:
            return out, True
    text, stopped = matcher.flush()
    return out + text, stopped


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: cut before the stop that begins first."""
    found = [i for stop in stops if (i := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


@given(st.text())
def test_incremental_text_is_the_text(text: str) -> None:
    assert "".join(decode(BYTES.encode(text).ids, skip_special=False)) == text


@given(st.lists(st.integers(3, 299), max_size=30))
def test_any_tokens_decode_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    ids = [i for i in ids if i < BYTES.get_vocab_size()]
    assert "".join(decode(ids)) == BYTES.decode(ids)


def test_a_character_comes_out_with_its_last_byte() -> None:
    ids = BYTES.encode("a🦊b").ids
    assert len(ids) == 6
    assert decode(ids) == ["a", "", "", "", "🦊", "b", ""]


def test_a_character_cut_by_the_end_becomes_one_replacement() -> None:
    ids = BYTES.encode("a🦊").ids[:-1]
    assert "".join(decode(ids)) == "a\ufffd"


def test_special_tokens_are_silent_unless_wanted() -> None:
    ids = [*BYTES.encode("fox").ids, 2]
    assert "".join(decode(ids)) == "fox"
    assert "".join(decode(ids, skip_special=False)) == "fox<|im_end|>"
    assert decode_all(TABLE, ids) == "fox<|im_end|>"


def test_a_part_of_a_character_is_labelled_by_its_bytes() -> None:
    first = BYTES.encode("é").ids[0]
    assert TABLE.label(first) == "bytes:\\xc3"
    assert TABLE.token_bytes(first) == b"\xc3"


def test_ids_beyond_the_tokenizer_are_silent() -> None:
    assert TABLE.token_bytes(1_000_000) == b""


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces written as a mark, bytes as <0xNN>, one leading space stripped."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁the", "▁fox", "es", "▁"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_sentencepiece_keeps_the_space_before_a_continuation() -> None:
    table = TokenTable(sentencepiece_like())
    fox, es = 258, 259
    assert [table.label(i) for i in (fox, es)] == [" fox", "es"]
    euro = [1 + b for b in "€".encode()]
    assert decode_all(table, [257, fox, es, *euro]) == " the foxes€"


def test_word_level_tokens_are_parted_by_spaces() -> None:
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "fox": 1}, unk_token="the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert decode_all(TokenTable(tokenizer), [0, 1]) == " the fox"


QUICK = "The quick brown fox jumps"


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["own fox"], "The quick br"),
        (["\nUser:"], QUICK),
        (["x", "quick brown"], "The "),
        (["The"], ""),
        (["jumps!"], QUICK),
        (["quick brown fox jumps over", "brown"], "The quick "),
    ],
)
def test_the_cut_is_just_before_the_earliest_stop(stops: list[str], text: str) -> None:
    for width in (1, 2, 3, len(QUICK)):
        pieces = [QUICK[i : i + width] for i in range(0, len(QUICK), width)]
        assert cut(pieces, stops) == (text, text != QUICK)


def test_text_that_cannot_be_a_stop_is_not_held_back() -> None:
    matcher = StopMatcher(["own fox"])
    assert matcher.push("The brown").text == "The br"
    assert matcher.push(" dog").text == "own dog"


@given(
    st.lists(st.text("ab", max_size=4), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_a_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    assert cut(pieces, stops) == first_stop("".join(pieces), stops)
