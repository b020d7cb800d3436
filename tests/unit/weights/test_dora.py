"""DoRA from files to packed vectors: what the base's output becomes equals the explicit W', and all else is refused.

The base is a set of random matrices here, and its answers are computed by the definition, in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from infinilora.protocol.adapter import BaseCard, Manifest, SiteEntry, manifest_digest
from infinilora.protocol.errors import AdapterInvalid, Internal
from infinilora.weights.check import plan_adapter
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.exports import MLX_TENSORS_FILE
from infinilora.weights.facts import Facts, FactsWanted
from infinilora.weights.factsfile import AnswerHead, Question, answer_bytes
from infinilora.weights.ingest import run
from infinilora.weights.packed import packed_ranges, part_arrays, part_biases, part_colscales, read_header, write_packed
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.plan import AdapterPlan, Dora, Factor, PartPlan
from infinilora.weights.reference import EXACT, Retest, decode_reference, reference_file
from infinilora.weights.selftest import self_test
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import Array, TensorFile, open_tensors
from support.cards import make_card

CARD = make_card("llama", heads=4, kv_heads=1, head_dim=6, hidden=24, intermediate=31, vocab_size=40, outer=True)
"""Widths at which no vector fills a multiple of 64 bytes."""
TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]
BIASED = ("q_proj", "k_proj", "v_proj", "down_proj")
PREFIX = "base_model.model."
RANK = 3
ZERO_ROW = 5
Module = tuple[Array, Array | None]


def base(card: BaseCard = CARD) -> dict[str, Module]:
    """W [out, in] and, of some, b [out], of every dense module."""
    dice, found = np.random.default_rng(1), {}
    for site in card.sites:
        for part in site.parts:
            w = dice.standard_normal((part.out_dim, site.in_dim)).astype(np.float32)
            b = dice.standard_normal(part.out_dim).astype(np.float32)
            found[part.module] = (w, b if part.module.endswith(BIASED) else None)
    return found


BASE = base()


def dora(
    directory: Path, card: BaseCard = CARD, *, targets: list[str] = TARGETS, dtype: str = "F32", **config: Any
) -> Path:
    """An adapter of scale 2 (unless the config says otherwise) with a magnitude for each of its modules."""
    settings = {"use_dora": True, **config}
    write_peft_adapter(directory, card, rank=RANK, targets=targets, dtype=dtype, std=0.3, config=settings)
    change(directory, lambda tensors: tensors.update(_magnitudes(tensors)))
    return directory


def _magnitudes(tensors: dict[str, Array]) -> dict[str, Array]:
    dice = np.random.default_rng(3)
    return {
        name.replace("lora_B.weight", "lora_magnitude_vector"): dice.uniform(0.5, 9, len(b)).astype(b.dtype)
        for name, b in tensors.items()
        if name.endswith("lora_B.weight")
    }


def tensors_of(directory: Path, name: str = TENSORS_FILE) -> dict[str, Array]:
    file = open_tensors(directory / name)
    return {key: np.array(file.read(key)) for key in file.tensors}


def change(directory: Path, edit: Callable[[dict[str, Array]], Any]) -> None:
    tensors = tensors_of(directory)
    edit(tensors)
    write_tensors(directory / TENSORS_FILE, tensors)


def answers(questions: dict[str, Question], path: Path, card: BaseCard = CARD, known: dict[str, Module] = BASE) -> Path:
    """What an engine says, by the definition."""
    found = {}
    for name, question in questions.items():
        w, bias = known[question.ask.module]
        a, b = (question.tensors[half].astype(np.float64) for half in "ab")
        lengths = np.linalg.norm(w.astype(np.float64) + question.ask.scale * (b @ a), axis=1)
        empty = np.zeros(0, np.float32)
        found[name] = {"norms": lengths.astype(np.float32), "bias": empty if bias is None else bias}
    path.write_bytes(answer_bytes(AnswerHead(base=card.fingerprint, is_tied=False), found))
    return path


def asked(directory: Path, card: BaseCard = CARD) -> dict[str, Question]:
    with pytest.raises(FactsWanted) as wanted:
        plan_adapter(read_adapter(directory), card)
    return wanted.value.questions


def packed(directory: Path, out: Path, **options: Any) -> Any:
    """The report of `run`, with the answers that it asks for."""
    wish = {"narrow": None, "max_rank": 512, **options}
    return run(directory, CARD, out, facts=answers(asked(directory), out.with_suffix(".facts")), **wish)


def outputs(path: Path, card: BaseCard = CARD, known: dict[str, Module] = BASE) -> dict[str, Array]:
    """Of each packed part: y * colscale + (scale * (x A^T) Bt + bias), where y = x W^T + b is the base's; float64."""
    found = {}
    with path.open("rb") as file:
        header = read_header(file)
        for layer in range(card.num_layers + 1):
            for entry, offset, num_bytes in packed_ranges(header, layer):
                file.seek(offset)
                data, kind = np.frombuffer(file.read(num_bytes), np.uint8), header.manifest.dtype
                geometry = card.geometry()[entry.layer, entry.site]
                modules = {part.name: part.module for part in geometry.parts}
                vectors = part_biases(entry, kind, data), part_colscales(entry, kind, data)
                for part, (a, bt), *scaled in zip(entry.parts, part_arrays(entry, kind, data), *vectors, strict=True):
                    delta = part.scale * (inputs(entry.in_dim) @ a.astype(np.float64).T) @ bt.astype(np.float64)
                    found[modules[part.name]] = _after(known[modules[part.name]], delta, *scaled)
    return found


def inputs(in_dim: int) -> Array:
    return np.random.default_rng(in_dim).standard_normal((7, in_dim))


def _plain(module: Module) -> Array:
    w, bias = module
    y: Array = inputs(w.shape[1]) @ w.astype(np.float64).T + (0 if bias is None else bias)
    return y


def _after(module: Module, delta: Array, bias: Array | None, colscale: Array | None) -> Array:
    assert colscale is not None
    return _plain(module) * colscale + delta + (0 if bias is None else bias)


def merged(module: Module, a: Array, b: Array, m: Array, scale: float) -> Array:
    """x W'^T + b, W' = m / |W + scale b a| (W + scale b a) row by row."""
    w, bias = module
    adapted = w.astype(np.float64) + scale * (b.astype(np.float64) @ a.astype(np.float64))
    rows = (m.astype(np.float64) / np.linalg.norm(adapted, axis=1))[:, None] * adapted
    y: Array = inputs(w.shape[1]) @ rows.T + (0 if bias is None else bias)
    return y


def is_merged(found: dict[str, Array], tensors: dict[str, Array], scale: float) -> None:
    modules = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith("lora_A.weight")}
    assert found.keys() == {module.removeprefix(PREFIX) for module in modules}
    for module in modules:
        a, b, m = (tensors[f"{module}.{name}"] for name in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"))
        wanted = merged(BASE[module.removeprefix(PREFIX)], a, b, m, scale)
        np.testing.assert_allclose(found[module.removeprefix(PREFIX)], wanted, rtol=1e-5, atol=1e-5, err_msg=module)


# Exact --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_the_output_is_that_of_the_merged_weights(dtype: str, tmp_path: Path) -> None:
    source = dora(tmp_path / "a", dtype=dtype)
    report = packed(source, tmp_path / "packed")
    is_merged(outputs(tmp_path / "packed"), tensors_of(source), 2.0)
    assert report.self_test_error < EXACT
    assert report.manifest.dtype == "F32", "the factors are multiplied into B"
    assert [note.code for note in report.warnings] == ([] if dtype == "F32" else ["widened"])


def test_rslora_and_a_pattern_are_in_the_lengths_too(tmp_path: Path) -> None:
    source = dora(tmp_path / "a", targets=["q_proj"], use_rslora=True, alpha_pattern={"q_proj": 5})
    packed(source, tmp_path / "packed")
    is_merged(outputs(tmp_path / "packed"), tensors_of(source), 5 / RANK**0.5)


def test_magnitudes_of_zero_leave_the_bias(tmp_path: Path) -> None:
    source = dora(tmp_path / "a")
    change(source, lambda tensors: tensors.update({k: 0 * v for k, v in tensors.items() if "magnitude" in k}))
    packed(source, tmp_path / "packed")
    found = outputs(tmp_path / "packed")
    is_merged(found, tensors_of(source), 2.0)
    name = "model.layers.0.self_attn.q_proj"
    _, bias = BASE[name]
    assert bias is not None
    np.testing.assert_allclose(found[name][0], bias, rtol=1e-6)


@pytest.mark.parametrize("name", ["{}.default", "{}.default.weight"])
def test_the_names_of_raw_state_dicts_are_read(name: str, tmp_path: Path) -> None:
    source = dora(tmp_path / "a")
    tensors = tensors_of(source)
    renamed = {key.replace(".weight", ".default.weight"): value for key, value in tensors.items()}
    write_tensors(
        source / TENSORS_FILE,
        {name.format(key) if key.endswith("magnitude_vector") else key: value for key, value in renamed.items()},
    )
    packed(source, tmp_path / "packed")
    is_merged(outputs(tmp_path / "packed"), tensors, 2.0)


@pytest.mark.parametrize(
    ("said", "scales"),
    [
        ({"target_modules": ["qkv_proj"]}, {}),
        (
            {"alpha_pattern": {"k_proj": 1, "layers.1.self_attn.v_proj": 30}},
            {"k_proj": 1, "layers.1.self_attn.v_proj": 30},
        ),
    ],
)
def test_a_fused_module_gives_each_part_its_own_rows(
    said: dict[str, Any], scales: dict[str, float], tmp_path: Path
) -> None:
    apart = dora(tmp_path / "a", targets=["q_proj", "k_proj", "v_proj"])
    tensors, fused = tensors_of(apart), dict[str, Array]()
    for layer in range(CARD.num_layers):
        name = f"{PREFIX}model.layers.{layer}.self_attn.{{}}.{{}}"
        shared = tensors[name.format("q_proj", "lora_A.weight")]
        for part in ("k_proj", "v_proj"):
            tensors[name.format(part, "lora_A.weight")] = shared
        for half in ("lora_B.weight", "lora_magnitude_vector"):
            parts = [tensors[name.format(part, half)] for part in ("q_proj", "k_proj", "v_proj")]
            fused[name.format("qkv_proj", half)] = np.concatenate(parts)
        fused[name.format("qkv_proj", "lora_A.weight")] = shared
    config = msgspec.json.decode((apart / CONFIG_FILE).read_bytes())
    (apart / CONFIG_FILE).write_bytes(msgspec.json.encode(config | said))
    write_tensors(apart / TENSORS_FILE, fused)
    packed(apart, tmp_path / "packed")
    found = outputs(tmp_path / "packed")
    for module, output in found.items():
        alpha = next((alpha for tail, alpha in scales.items() if module.endswith(tail)), config["lora_alpha"])
        own = {key: tensor for key, tensor in tensors.items() if f"{module}." in key}
        is_merged({module: output}, own, alpha / config["r"])
    assert len(found) == 3 * CARD.num_layers


def test_mlx_means_the_same(tmp_path: Path) -> None:
    scale = 0.1  # 0.1 * 3 / 3 is another number
    tensors = tensors_of(dora(tmp_path / "a", targets=["q_proj", "down_proj"]))
    names = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
    turned = {}
    for key, value in tensors.items():
        module, half = next((key.removesuffix(f".{half}"), half) for half in names if key.endswith(half))
        turned[f"{module.removeprefix(PREFIX)}.{names[half]}"] = np.ascontiguousarray(value.T)
    config = {"fine_tune_type": "dora", "lora_parameters": {"rank": RANK, "scale": scale, "dropout": 0.0}}
    source = tmp_path / "mlx"
    source.mkdir()
    (source / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    write_tensors(source / MLX_TENSORS_FILE, turned)
    packed(source, tmp_path / "packed")
    is_merged(outputs(tmp_path / "packed"), tensors, scale)


def test_narrowing_rounds_factors_and_keeps_vectors(tmp_path: Path) -> None:
    source = dora(tmp_path / "a", dtype="BF16")
    report = packed(source, tmp_path / "packed", narrow="BF16")
    assert (report.manifest.dtype, report.manifest.narrowed_from) == ("BF16", "F32")
    assert 0 < report.narrow_error < 2**-6
    for name, found in outputs(tmp_path / "packed").items():
        module = PREFIX + name
        a, b, m = (
            tensors_of(source)[f"{module}.{half}"]
            for half in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        )
        wanted = merged(BASE[name], a, b, m, 2.0)
        assert np.abs(found - wanted).max() < 2**-6 * np.abs(wanted).max()


def test_a_factor_beyond_the_narrow_range_is_named(tmp_path: Path) -> None:
    source = dora(tmp_path / "a", targets=["down_proj"])
    change(source, lambda tensors: tensors.update({k: 1e4 * v for k, v in tensors.items() if "magnitude" in k}))
    change(source, lambda tensors: tensors.update({k: 1e3 * v for k, v in tensors.items() if "lora_B" in k}))
    change(source, lambda tensors: tensors.update({k: v / 1e3 for k, v in tensors.items() if "lora_A" in k}))
    packed(source, tmp_path / "packed")
    with pytest.raises(AdapterInvalid, match=r"down_proj\.lora_.*narrowed to F16"):
        packed(source, tmp_path / "packed", narrow="F16")


def test_narrowing_does_not_ask_of_numbers_that_are_not_narrowed(tmp_path: Path) -> None:
    """Magnitudes stay fp32, and B goes in with its factors: neither is held against the range of F16."""
    source = dora(tmp_path / "a", targets=["down_proj"])
    change(source, lambda tensors: tensors.update({k: 1e6 * v for k, v in tensors.items() if "magnitude" in k}))
    change(source, lambda tensors: tensors.update({k: 1e5 * v for k, v in tensors.items() if "lora_B" in k}))
    change(source, lambda tensors: tensors.update({k: 1e-3 * v for k, v in tensors.items() if "lora_A" in k}))
    with pytest.raises(AdapterInvalid, match=r"down_proj\.lora_B.*narrowed to F16"):
        packed(source, tmp_path / "packed", narrow="F16")
    change(source, lambda tensors: tensors.update({k: 1e-8 * v for k, v in tensors.items() if "magnitude" in k}))
    report = packed(source, tmp_path / "packed", narrow="F16")
    assert report.manifest.dtype == "F16"
    assert report.narrow_error < 2**-8


def test_the_same_file_and_base_give_the_same_bytes(tmp_path: Path) -> None:
    source = dora(tmp_path / "a")
    first, second = (packed(source, tmp_path / name) for name in ("one", "two"))
    assert first.digest == second.digest
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_any_reader_of_safetensors_finds_the_vectors(tmp_path: Path) -> None:
    packed(dora(tmp_path / "a"), tmp_path / "packed")
    with safe_open(tmp_path / "packed", framework="np") as file:
        assert file.get_tensor("0.qkv.q.colscale").shape == (24,)
        assert file.get_tensor("0.qkv.q.bias").shape == (24,)
        names = set(file.keys())
        assert "2.lm_head.lm_head.colscale" in names
        assert "2.lm_head.lm_head.bias" not in names


# Questions and the self-test ----------------------------------------------------------------------


def test_one_question_for_each_projection_of_the_base(tmp_path: Path) -> None:
    questions = asked(dora(tmp_path / "a", targets=["q_proj", "down_proj"]))
    modules = sorted(question.ask.module for question in questions.values())
    assert modules == [f"model.layers.{i}.{m}" for i in range(2) for m in ("mlp.down_proj", "self_attn.q_proj")]
    assert {question.ask.scale for question in questions.values()} == {2.0}


def test_answers_to_another_adapter_are_none_to_this(tmp_path: Path) -> None:
    source, other = dora(tmp_path / "a"), dora(tmp_path / "b")
    change(other, lambda tensors: tensors.update({k: 2 * v for k, v in tensors.items() if "layers.1" in k}))
    told = answers(asked(other), tmp_path / "facts")
    with pytest.raises(FactsWanted) as wanted:
        plan_adapter(read_adapter(source), CARD, facts=Facts(CARD, told))
    assert all("layers.1" in question.ask.module for question in wanted.value.questions.values())


FAULTS: dict[str, Callable[[Dora], Dora]] = {
    "a factor": lambda dora: dora._replace(factors=dora.factors * np.float32(1.001)),
    "one factor": lambda dora: dora._replace(factors=np.where(np.arange(len(dora.factors)) == 3, 0.5, dora.factors)),
    "the bias left out": lambda dora: dora._replace(bias=np.zeros_like(dora.factors)),
    "the bias scaled": lambda dora: dora._replace(bias=dora.bias if dora.bias is None else dora.bias * 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_test_sees_a_wrong_vector(fault: str, tmp_path: Path) -> None:
    source = dora(tmp_path / "a")
    told = answers(asked(source), tmp_path / "facts")
    plan = plan_adapter(read_adapter(source), CARD, facts=Facts(CARD, told))

    def wrong(part: PartPlan) -> PartPlan:
        assert part.dora is not None
        spoilt = FAULTS[fault](part.dora)
        return replace(part, dora=spoilt._replace(factors=spoilt.factors.astype(np.float32)))

    site = plan.sites[0]
    sites = (type(site)(site.geometry, tuple(wrong(part) for part in site.parts)), *plan.sites[1:])
    for name, each in (("right", plan.sites), ("wrong", sites)):
        with (tmp_path / name).open("wb") as file:
            write_packed(AdapterPlan(plan.source, plan.base, plan.num_layers, plan.dtype, each), file)
    assert self_test(source, CARD, tmp_path / "right", told).error < EXACT
    found = self_test(source, CARD, tmp_path / "wrong", told)
    assert found.error > 1e-4
    assert "layer 0 site qkv" in found.where


class Undone(NamedTuple):
    """A B of the file, times what undoes a wrong factor."""

    bt: Factor
    ratio: float

    @property
    def tensor(self) -> str:
        return self.bt.tensor

    def read(self, file: TensorFile, /) -> Array:
        values: Array = self.bt.read(file).astype(np.float32) * np.float32(self.ratio)
        return values


def test_the_self_test_sees_a_wrong_column_scale_beside_a_right_delta(tmp_path: Path) -> None:
    source = dora(tmp_path / "a", targets=["up_proj"])
    told = answers(asked(source), tmp_path / "facts")
    plan = plan_adapter(read_adapter(source), CARD, facts=Facts(CARD, told))
    (part,) = plan.sites[0].parts
    (pair,) = part.pairs
    assert part.dora is not None
    assert pair is not None
    wrong = replace(part, pairs=(replace(pair, bt=Undone(pair.bt, 0.5)),), dora=Dora(2 * part.dora.factors, None))
    sites = (type(plan.sites[0])(plan.sites[0].geometry, (wrong,)), *plan.sites[1:])
    with (tmp_path / "wrong").open("wb") as file:
        write_packed(replace(plan, sites=sites), file)
    found = self_test(source, CARD, tmp_path / "wrong", told)
    assert found.error == pytest.approx(1.0)
    assert found.where == "layer 0 site gate_up part up column scale"


def test_the_self_test_knows_no_lengths_but_those_of_the_files_own_pair(tmp_path: Path) -> None:
    source = dora(tmp_path / "a")
    told = answers(asked(source), tmp_path / "facts")
    run(source, CARD, tmp_path / "packed", narrow=None, max_rank=512, facts=told)
    change(source, lambda tensors: tensors.update({k: 2 * v for k, v in tensors.items() if "layers.1" in k}))
    with pytest.raises(Internal, match=r"no answer about the rows of model\.layers\.1"):
        self_test(source, CARD, tmp_path / "packed", told)


# Refused ------------------------------------------------------------------------------------------


def refused(source: Path, *says: str) -> None:
    with pytest.raises(AdapterInvalid) as error:
        plan_adapter(read_adapter(source), CARD, facts=Facts(CARD, answers(_asked(source), source / "facts")))
    for word in says:
        assert word in error.value.message


def _asked(source: Path) -> dict[str, Question]:
    try:
        plan_adapter(read_adapter(source), CARD)
    except FactsWanted as wanted:
        return wanted.questions
    return {}


def test_a_row_without_a_direction_is_refused(tmp_path: Path) -> None:
    source = dora(tmp_path / "a", targets=["down_proj"])
    module = "model.layers.1.mlp.down_proj"
    w = BASE[module][0].astype(np.float64)
    known = BASE | {module: (np.where(np.arange(len(w))[:, None] == ZERO_ROW, 0, w), None)}
    change(source, lambda tensors: tensors[f"{PREFIX}{module}.lora_B.weight"][ZERO_ROW].fill(0))
    told = answers(asked(source), tmp_path / "facts", known=known)
    with pytest.raises(AdapterInvalid, match=rf"row {ZERO_ROW} of {module}, which is all zeros"):
        plan_adapter(read_adapter(source), CARD, facts=Facts(CARD, told))


def test_a_magnitude_far_beyond_its_row_is_refused(tmp_path: Path) -> None:
    source = dora(tmp_path / "a", targets=["down_proj"])
    change(source, lambda tensors: tensors.update({k: 1e37 * v for k, v in tensors.items() if "magnitude" in k}))
    change(source, lambda tensors: tensors.update({k: 1e4 * v for k, v in tensors.items() if "lora_B" in k}))
    change(source, lambda tensors: tensors.update({k: v / 1e4 for k, v in tensors.items() if "lora_A" in k}))
    refused(source, "down_proj.lora_magnitude_vector", "single precision")


def test_a_rank_beyond_the_limit_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid, match=rf"rank: found {RANK}; wanted at most 2"):
        plan_adapter(read_adapter(dora(tmp_path / "a")), CARD, max_rank=2)


def test_half_of_dora_is_refused(tmp_path: Path) -> None:
    q0 = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    stray, missing, short = (dora(tmp_path / name, targets=["q_proj"]) for name in ("a", "b", "c"))
    config = msgspec.json.decode((stray / CONFIG_FILE).read_bytes())
    (stray / CONFIG_FILE).write_bytes(msgspec.json.encode(config | {"use_dora": False}))
    change(missing, lambda tensors: tensors.pop(q0))
    change(short, lambda tensors: tensors.update({q0: tensors[q0][:-1]}))
    refused(stray, "lora_magnitude_vector", "DoRA", "without use_dora")
    refused(missing, "model.layers.0.self_attn.q_proj", "no magnitude", "use_dora")
    refused(short, q0, "[23]", "[24]")


def test_a_magnitude_without_a_pair_is_refused(tmp_path: Path) -> None:
    source = dora(tmp_path / "a", targets=["q_proj"])
    change(source, lambda t: t.update({f"{PREFIX}model.layers.0.mlp.up_proj.lora_magnitude_vector": np.ones(31, "f4")}))
    refused(source, "magnitude alone", "up_proj")


def test_dora_on_an_embedding_is_refused_by_name(tmp_path: Path) -> None:
    source = dora(tmp_path / "a", targets=["q_proj", "embed_tokens"])
    change(source, lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_magnitude_vector": np.ones(24, np.float32)}))
    refused(source, "DoRA on an embedding", "model.embed_tokens")


def test_an_old_reader_of_version_two_keeps_the_manifest(tmp_path: Path) -> None:
    """Column scales are in version 2 from its first day: no reader of it ever left them out."""
    manifest: Manifest = packed(dora(tmp_path / "a"), tmp_path / "packed").manifest
    assert manifest.pack_version == 2
    assert all(part.has_colscale for site in manifest.sites for part in site.parts)
    assert manifest_digest(manifest) == packed(tmp_path / "a", tmp_path / "again").digest


def test_scaled_columns_are_tested_later_too(tmp_path: Path) -> None:
    packed(dora(tmp_path / "a"), tmp_path / "packed")
    reference = decode_reference(reference_file(tmp_path / "packed").read_bytes())

    def faults(understand: Callable[[SiteEntry], SiteEntry]) -> list[str]:
        with (tmp_path / "packed").open("rb") as file:
            header = read_header(file)
            retest, found = Retest(header.manifest, reference), list[str]()
            for entry in header.manifest.sites:
                file.seek(header.data_start + entry.offset)
                found += retest.faults(understand(entry), 0, file.read(entry.num_bytes))
        return found + retest.missing()

    def unscaled(entry: SiteEntry) -> SiteEntry:
        parts = tuple(msgspec.structs.replace(part, has_colscale=False) for part in entry.parts)
        return msgspec.structs.replace(entry, parts=parts)

    assert faults(lambda entry: entry) == []
    assert len(faults(unscaled)) >= len(reference.parts)
