"""Facts of a checkpoint: against arithmetic without rounding, and what is no question about it."""

import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal, getcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infinilora.engine.facts import Facts, _norm_in_order, rounded, row_norms
from infinilora.engine.model.checkpoint import Checkpoint
from infinilora.engine.model.spec import read_spec
from infinilora.engine.prepare import base_card
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import InvalidRequest, Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.weights.facts import Facts as Asking
from infinilora.weights.facts import FactsWanted
from infinilora.weights.factsfile import Ask, Question, row_hashes, write_request
from infinilora.weights.tensorfile import Array
from support.tiny_models import TinyModel

EMBED, HEAD, Q = "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"
DICE = np.random.default_rng(4)
A, B = DICE.standard_normal((3, 32)).astype(np.float32), DICE.standard_normal((32, 3)).astype(np.float32)


def card_of(directory: Path) -> BaseCard:
    spec = read_spec(directory)
    return base_card(spec, Checkpoint(directory, spec), directory=directory, name="tiny", max_len=64)


def facts_of(directory: Path) -> Facts:
    spec = read_spec(directory)
    return Facts(spec, Checkpoint(directory, spec), card_of(directory).fingerprint)


def answered(directory: Path, root: Path, ask: Callable[[Asking], Any]) -> Any:
    """What `ask` gets of a planner's facts, once an engine of the directory has answered; and the planner's facts."""
    card, facts = card_of(directory), facts_of(directory)
    asking = Asking(card)
    assert ask(asking) is None
    with pytest.raises(FactsWanted) as wanted:
        asking.check_answered()
    write_request(root / "request", card.fingerprint, wanted.value.questions)
    questions = facts.read(root / "request")
    answers = {name: facts.answer(question) for name, question in questions.items()}
    (root / "answer").write_bytes(facts.file(questions, answers))
    known = Asking(card, root / "answer")
    found = ask(known)
    known.check_answered()
    return found, known


def exact_norm(w: Array, a: Array, b: Array, scale: float) -> np.float32:
    """|w + scale · b·a| of one row, in fractions, rounded once."""
    getcontext().prec = 60
    terms = [
        Fraction(float(w[k]))
        + Fraction(scale) * sum(Fraction(float(b[r])) * Fraction(float(a[r, k])) for r in range(len(a)))
        for k in range(len(w))
    ]
    total = sum(term * term for term in terms)
    root = (Decimal(total.numerator) / Decimal(total.denominator)).sqrt()
    near = np.float32(float(root))
    candidates = (np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf)))
    return min(candidates, key=lambda value: abs(Decimal(float(value)) - root))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_norms_are_those_of_arithmetic_without_rounding(
    tiny: Callable[[str], TinyModel], tmp_path: Path, name: str
) -> None:
    directory = tiny(name).directory
    weight = tiny(name).hf.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    b = np.resize(B, (len(weight), 3))
    norms, _ = answered(directory, tmp_path, lambda facts: facts.norms(Q, A, b, 1.5))
    wanted = [exact_norm(w, A, b_row, 1.5) for w, b_row in zip(weight, b, strict=True)]
    assert norms.lengths.dtype == np.float32
    assert norms.lengths.tolist() == wanted
    plain = np.linalg.norm(weight.astype(np.float64), axis=1)
    assert np.abs(norms.lengths - plain).max() > 0.1  # a norm of W alone would be another


def test_a_norm_does_not_depend_on_how_the_rows_are_cut() -> None:
    weight, a = torch.from_numpy(DICE.standard_normal((300, 70))), DICE.standard_normal((9, 70)).astype(np.float32)
    b = DICE.standard_normal((300, 9)).astype(np.float32)
    together = row_norms(weight, a, b, 0.7)
    alone = [row_norms(weight[i : i + 1], a, b[i : i + 1], 0.7)[0] for i in range(300)]
    in_order = [
        np.float32(_norm_in_order(weight[i].numpy(), a.astype(np.float64), b[i] * np.float64(0.7))) for i in range(300)
    ]
    assert together.tolist() == alone == in_order


def _always(norm: float, _row: int) -> float:
    return norm


@pytest.mark.parametrize("norm", [1.0, 3.0 * 2.0**-100, 12345.678])
def test_machines_that_differ_in_the_last_bits_of_fp64_say_the_same(norm: float) -> None:
    """They lie on either side of the middle of two numbers of fp32, or on it."""
    low = np.float32(norm)
    middle = (float(low) + float(np.nextafter(low, np.float32(np.inf)))) / 2
    seen = middle * (1 + np.arange(-8, 9) * 2.0**-52)
    assert len(set(seen.astype(np.float32).tolist())) == 2
    for again in (seen[0], seen[-1]):
        assert set(rounded(seen, partial(_always, again)).tolist()) == {float(np.float32(again))}
    apart = middle * (1 + np.array([-1, 1]) * 2.0**-30)
    assert rounded(apart, lambda _: 99.0).tolist() == apart.astype(np.float32).tolist()


@pytest.mark.parametrize(("name", "is_tied"), [("llama", False), ("llama-tied", True)])
def test_rows_are_the_tables_own(tiny: Callable[[str], TinyModel], tmp_path: Path, name: str, is_tied: bool) -> None:
    model = tiny(name)
    indices = np.array([7, 0, 127, 7])
    for module, table in ((EMBED, model.hf.model.embed_tokens), (HEAD, model.hf.lm_head)):
        rows, facts = answered(model.directory, tmp_path, partial(Asking.rows, module=module, indices=indices))
        assert np.array_equal(rows, table.weight.detach().numpy()[indices])
        assert facts.is_tied is is_tied


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_changed_rows_are_found_whatever_the_copy_is_kept_in(
    tiny: Callable[[str], TinyModel], tmp_path: Path, dtype: type
) -> None:
    model = tiny("llama")
    base = model.hf.lm_head.weight.detach().numpy()
    table = base.astype(dtype)
    table[[3, 90]] += 0.5
    changed, _ = answered(model.directory, tmp_path, lambda facts: facts.changed(HEAD, table, limit=2))
    assert changed.indices.tolist() == [3, 90]
    assert np.array_equal(changed.rows, base[[3, 90]])
    too_many, _ = answered(model.directory, tmp_path, lambda facts: facts.changed(HEAD, table, limit=1))
    assert too_many.indices.tolist() == [3, 90]
    assert too_many.rows.shape == (0, 32)
    same, _ = answered(model.directory, tmp_path, lambda facts: facts.changed(HEAD, base, limit=1))
    assert same.indices.tolist() == []


def test_a_zero_has_no_sign() -> None:
    assert np.array_equal(row_hashes(np.zeros((1, 4), np.float32)), row_hashes(-np.zeros((1, 4), np.float32)))


NO_QUESTIONS = {
    "a module of another base": Question(Ask(kind="norms", module="model.layers.9.mlp.up_proj"), {"a": A, "b": B}),
    "an embedding's norms": Question(Ask(kind="norms", module=EMBED), {"a": A, "b": B}),
    "another width": Question(Ask(kind="norms", module=Q), {"a": A[:, :-1].copy(), "b": B}),
    "halves of two ranks": Question(Ask(kind="norms", module=Q), {"a": A[:-1], "b": B}),
    "no matrix": Question(Ask(kind="norms", module=Q), {"a": A.reshape(-1), "b": B}),
    "nothing": Question(Ask(kind="norms", module=Q), {"a": A[0, :1].reshape(()), "b": B}),
    "no number": Question(Ask(kind="norms", module=Q, scale=1e400), {"a": A, "b": B}),
    "numbers that are none": Question(Ask(kind="norms", module=Q), {"a": A.astype("<i8"), "b": B}),
    "rows of a projection": Question(Ask(kind="rows", module=Q), {"indices": np.array([1])}),
    "rows beyond the vocabulary": Question(Ask(kind="rows", module=HEAD), {"indices": np.array([128])}),
    "rows before it": Question(Ask(kind="rows", module=HEAD), {"indices": np.array([-1])}),
    "rows that are no numbers": Question(Ask(kind="rows", module=HEAD), {"indices": np.ones(2, np.float32)}),
    "hashes of another vocabulary": Question(
        Ask(kind="changed", module=HEAD), {"hashes": np.zeros((99, 16), np.uint8)}
    ),
    "more rows than are given": Question(
        Ask(kind="changed", module=HEAD, limit=1 << 20), {"hashes": np.zeros((128, 16), np.uint8)}
    ),
}


@pytest.mark.parametrize("what", NO_QUESTIONS)
def test_what_is_no_question_about_this_model_is_refused(
    tiny: Callable[[str], TinyModel], tmp_path: Path, what: str
) -> None:
    directory = tiny("llama").directory
    question = NO_QUESTIONS[what]
    write_request(tmp_path / "request", card_of(directory).fingerprint, {"q": question})
    with pytest.raises(InvalidRequest, match=f"facts request: .*{question.ask.module.replace('.', '.')}|metadata"):
        facts_of(directory).read(tmp_path / "request")


def test_a_question_about_another_base_is_for_another_engine(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    question = Question(Ask(kind="norms", module=Q), {"a": A, "b": B})
    write_request(tmp_path / "request", Fingerprint("sha256:other"), {"q": question})
    with pytest.raises(Unavailable, match="sha256:other"):
        facts_of(tiny("llama").directory).read(tmp_path / "request")


@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_half_a_request_is_refused(tiny: Callable[[str], TinyModel], tmp_path: Path, cut: int) -> None:
    directory = tiny("llama").directory
    write_request(
        tmp_path / "request",
        card_of(directory).fingerprint,
        {"q": Question(Ask(kind="norms", module=Q), {"a": A, "b": B})},
    )
    whole = (tmp_path / "request").read_bytes()
    (tmp_path / "request").write_bytes(whole[:cut])
    with pytest.raises(InvalidRequest, match="facts request"):
        facts_of(directory).read(tmp_path / "request")


def test_the_directory_answers_as_its_engine_does(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    directory = tiny("llama-tied").directory
    answered(directory, tmp_path, lambda facts: facts.rows(HEAD, np.array([2])))
    files = ["--request", tmp_path / "request", "--out", tmp_path / "other"]
    command = [sys.executable, "-m", "infinilora.engine.facts", directory, *files]
    subprocess.run(list(map(str, command)), check=True)
    assert (tmp_path / "other").read_bytes() == (tmp_path / "answer").read_bytes()
