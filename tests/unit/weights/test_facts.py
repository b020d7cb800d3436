"""What a planner asks of the base's weights, and which answers it takes."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.weights.facts import Facts, FactsWanted
from infinilora.weights.factsfile import AnswerHead, answer_bytes, read_request, write_request
from infinilora.weights.tensorfile import Array
from support.cards import make_card

CARD = make_card("llama", outer=True)
EMBED, Q = "model.embed_tokens", "model.layers.0.self_attn.q_proj"
INDICES = np.array([4, 2])
ROWS = np.arange(2 * CARD.hidden_dim, dtype=np.float32).reshape(2, -1)


def answer_file(path: Path, answers: dict[str, dict[str, Array]], *, base: Fingerprint = CARD.fingerprint) -> Path:
    path.write_bytes(answer_bytes(AnswerHead(base=base, is_tied=False), answers))
    return path


def name_of(facts: Facts) -> str:
    with pytest.raises(FactsWanted) as wanted:
        facts.check_answered()
    (name,) = wanted.value.questions
    return name


def name_of_rows(indices: Array = INDICES) -> str:
    facts = Facts(CARD)
    assert facts.rows(EMBED, indices) is None
    return name_of(facts)


def test_what_is_not_answered_is_wanted_once(tmp_path: Path) -> None:
    a, b = np.ones((2, 8), np.float32), np.ones((8, 2), np.float32)
    facts = Facts(CARD)
    facts.check_answered()
    for _ in range(2):
        assert facts.rows(EMBED, INDICES) is None
        assert facts.norms(Q, a, b, 2.0) is None
    with pytest.raises(FactsWanted) as wanted:
        facts.check_answered()
    write_request(tmp_path / "request", CARD.fingerprint, wanted.value.questions)
    head, questions = read_request(tmp_path / "request")
    assert head.base == CARD.fingerprint
    assert {question.ask.kind for question in questions.values()} == {"rows", "norms"}
    (norms,) = (question for question in questions.values() if question.ask.kind == "norms")
    assert norms.ask.scale == 2.0
    assert np.array_equal(norms.tensors["b"], b)


def test_a_question_is_written_in_the_same_bytes_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        facts = Facts(CARD)
        facts.rows(EMBED, INDICES)
        with pytest.raises(FactsWanted) as wanted:
            facts.check_answered()
        write_request(tmp_path / name, CARD.fingerprint, wanted.value.questions)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_an_answer_fits_its_own_question_and_no_other(tmp_path: Path) -> None:
    facts = Facts(CARD, answer_file(tmp_path / "answer", {name_of_rows(): {"rows": ROWS}}))
    found = facts.rows(EMBED, INDICES)
    assert found is not None
    assert np.array_equal(found, ROWS)
    facts.check_answered()
    assert facts.rows("lm_head", INDICES) is None
    assert facts.rows(EMBED, INDICES[::-1].copy()) is None
    with pytest.raises(FactsWanted):
        facts.check_answered()


def test_a_scale_makes_another_question() -> None:
    a, b = np.ones((2, 8), np.float32), np.ones((8, 2), np.float32)
    names = set()
    for scale, tensors in ((1.0, (a, b)), (2.0, (a, b)), (1.0, (2 * a, b)), (1.0, (a, 2 * b)), (1.0, (a.T.copy(), b))):
        facts = Facts(CARD)
        facts.norms(Q, *tensors, scale)
        names.add(name_of(facts))
    assert len(names) == 5


def test_an_answer_about_another_base_is_not_taken(tmp_path: Path) -> None:
    path = answer_file(tmp_path / "answer", {name_of_rows(): {"rows": ROWS}}, base=Fingerprint("sha256:other"))
    with pytest.raises(Unavailable, match="another base"):
        Facts(CARD, path)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[:, 1:].copy(), ROWS.reshape(-1)], ids=["fewer", "narrower", "flat"])
def test_an_answer_of_another_shape_is_a_fault_of_ours(tmp_path: Path, rows: Array) -> None:
    facts = Facts(CARD, answer_file(tmp_path / "answer", {name_of_rows(): {"rows": rows}}))
    with pytest.raises(Internal, match=r"rows of model.embed_tokens: found .*; wanted"):
        facts.rows(EMBED, INDICES)


@pytest.mark.parametrize("indices", [[2, 2], [3, 2], [-1, 2], [2, CARD.vocab_size]])
def test_changed_rows_ascend_within_the_table(tmp_path: Path, indices: list[int]) -> None:
    table = np.zeros((CARD.vocab_size, CARD.hidden_dim), np.float32)
    asking = Facts(CARD)
    asking.changed(EMBED, table, limit=9)
    answer = {name_of(asking): {"indices": np.array(indices), "rows": ROWS}}
    with pytest.raises(Internal, match="changed rows"):
        Facts(CARD, answer_file(tmp_path / "answer", answer)).changed(EMBED, table, limit=9)


def test_a_base_that_is_not_finite_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[0, 0] = np.nan
    facts = Facts(CARD, answer_file(tmp_path / "answer", {name_of_rows(): {"rows": rows}}))
    with pytest.raises(Unavailable, match="not finite"):
        facts.rows(EMBED, INDICES)


def test_an_answer_of_another_version_is_refused_by_number(tmp_path: Path) -> None:
    head = msgspec.structs.replace(AnswerHead(base=CARD.fingerprint, is_tied=False), version=9)
    (tmp_path / "answer").write_bytes(answer_bytes(head, {}))
    with pytest.raises(Internal, match="version: found 9; wanted 1"):
        Facts(CARD, tmp_path / "answer")
