"""Every broken adapter is refused with file, tensor, found and wanted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from infinilora.protocol.errors import AdapterInvalid, SourceNotFound
from infinilora.weights.check import plan_adapter
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.ingest import ingest
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import Array, open_tensors
from support.cards import make_card, tiny_cards

CARD = tiny_cards()["llama"]
QWEN2 = tiny_cards()["qwen2_moe"]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
Tensors = dict[str, Array]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_peft_adapter(tmp_path / "adapter", CARD, rank=4, targets=["q_proj", "down_proj"])


def change_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    file = open_tensors(directory / TENSORS_FILE)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    change(tensors)
    write_tensors(directory / TENSORS_FILE, tensors)


def change_config(directory: Path, **changes: Any) -> None:
    config = msgspec.json.decode((directory / CONFIG_FILE).read_bytes())
    (directory / CONFIG_FILE).write_bytes(msgspec.json.encode(config | changes))


def refusal(directory: Path, **options: Any) -> str:
    out = directory / "out.packed"
    with pytest.raises(AdapterInvalid) as refused:
        ingest(directory, options.pop("card", CARD), out, **options)
    assert not out.exists()
    assert not list(directory.glob("*.part"))
    assert "found" in refused.value.message
    assert "wanted" in refused.value.message
    return refused.value.message


def poke(name: str, value: float) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[name][1, 2] = value

    return change


def rename(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (poke(A, np.nan), [A, "1 of 128"]),
        (poke(B, np.inf), [B, "NaN or infinite"]),
        (lambda t: t.pop(B), [Q0.removeprefix("base_model.model."), "lora_A alone", A, "lora_B"]),
        (lambda t: t.pop(A), ["lora_B alone", B, "lora_A"]),
        (lambda t: t.update({A: t[A][:, :-1]}), [A, "[4, 31]", "[4, 32]"]),
        (lambda t: t.update({A: t[A][:3], B: t[B][:, :3]}), [A, "[3, 32]", "[4, 32]"]),
        (lambda t: t.update({B: t[B][:-8]}), [B, "[24, 4]", "[32, 4]"]),
        (lambda t: t.update({A: t[A].reshape(2, 2, 32)}), [A, "[2, 2, 32]", "[4, 32]"]),
        (rename(A, A.removeprefix("base_model.model.")), [A.removeprefix("base_model.model."), "'base_model.model.'"]),
        (lambda t: t.update({A: t[A].T}), [A, "[32, 4], transposed?", "[4, 32]"]),
        (rename(A, A.replace("q_proj", "z_proj")), ["lora_B alone", B]),
        (lambda t: t.update({f"{Q0}.lora_magnitude_vector.weight": t[A]}), ["DoRA", "lora_magnitude_vector"]),
        (lambda t: t.update({f"{Q0}.lora_B.bias": t[A]}), ["a bias", "lora_B.bias"]),
        (lambda t: t.update({f"{Q0}.base_layer.weight": t[A]}), ["a copy of base weights"]),
        (lambda t: t.update({"base_model.model.lm_head.modules_to_save.weight": t[A]}), ["lm_head"]),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": np.ones((131, 32), np.float32)}),
            ["the whole of lm_head, [131, 32]", "[128, 32]", "a vocabulary of 128", "modules_to_save"],
        ),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.weight": np.ones((131, 32), np.float32)}),
            ["the whole of embed_tokens, [131, 32]", "[128, 32]"],
        ),
        (lambda t: t.update({"medusa_head.0.0.linear.weight": t[A]}), ["a Medusa head"]),
        (lambda t: t.update({"speculator.head.weight": t[A]}), ["a speculator"]),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[A]}),
            ["embedding", "embed_tokens"],
        ),
        (lambda t: t.clear(), ["no LoRA tensors", "at least one LoRA pair"]),
        (
            lambda t: t.update({name: np.ones((0,), np.float32) for name in t}),
            ["no LoRA tensors", "8 tensors, all empty", "at least one LoRA pair"],
        ),
    ],
)
def test_a_broken_tensor_is_named(adapter: Path, change: Callable[[Tensors], Any], names: list[str]) -> None:
    change_tensors(adapter, change)
    message = refusal(adapter)
    for name in [TENSORS_FILE, *names]:
        assert name in message


def with_pair(tensors: Tensors, module: str, in_dim: int = 32, out_dim: int = 32) -> None:
    tensors[f"base_model.model.{module}.lora_A.weight"] = np.ones((4, in_dim), np.float32)
    tensors[f"base_model.model.{module}.lora_B.weight"] = np.ones((out_dim, 4), np.float32)


def test_a_module_of_another_base_is_named(adapter: Path) -> None:
    change_tensors(adapter, lambda t: with_pair(t, "model.layers.7.self_attn.q_proj"))
    message = refusal(adapter)
    assert "model.layers.7.self_attn.q_proj" in message
    assert "tiny-llama (2 layers" in message


def test_a_module_that_the_configuration_does_not_target_is_named(adapter: Path) -> None:
    change_tensors(adapter, lambda t: with_pair(t, "model.layers.0.self_attn.o_proj"))
    message = refusal(adapter)
    assert "model.layers.0.self_attn.o_proj" in message
    assert "does not target" in message


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"]},
        {"exclude_modules": ["down_proj"]},
        {"target_modules": r".*q_proj"},
    ],
)
def test_every_module_that_no_target_covers_is_listed(adapter: Path, config: dict[str, Any]) -> None:
    change_config(adapter, **config)
    message = refusal(adapter)
    assert "2 modules with tensors" in message
    for layer in range(2):
        assert f"model.layers.{layer}.mlp.down_proj" in message
        assert f"model.layers.{layer}.self_attn.q_proj" not in message


def test_a_long_list_of_modules_is_cut_and_counted(tmp_path: Path) -> None:
    card = make_card("llama", num_layers=30)
    directory = write_peft_adapter(tmp_path / "a", card, rank=1, targets=["q_proj"], config={"target_modules": []})
    message = refusal(directory, card=card)
    assert "(30 in all)" in message
    assert len(message) < 1000


def test_a_layer_without_any_tensor_is_refused(adapter: Path) -> None:
    change_tensors(adapter, lambda t: [t.pop(name) for name in list(t) if "layers.1." in name])
    message = refusal(adapter)
    assert "layers 1: found no tensors at all" in message
    assert "model.layers.1.self_attn.q_proj" in message


def test_a_layer_that_is_not_targeted_may_be_empty(adapter: Path) -> None:
    change_tensors(adapter, lambda t: [t.pop(name) for name in list(t) if "layers.1." in name])
    change_config(adapter, layers_to_transform=[0])
    assert plan_adapter(read_adapter(adapter), CARD).warnings == ()


def test_whole_modules_are_refused_by_the_configurations_word_too(adapter: Path) -> None:
    change_config(adapter, modules_to_save=["lm_head", "embed_tokens"])
    message = refusal(adapter)
    assert "modules_to_save: found 'lm_head', and no tensor of it" in message
    change_tensors(adapter, lambda t: t.update({"base_model.model.lm_head.weight": np.ones((131, 32), np.float32)}))
    assert "lm_head, [131, 32]" in refusal(adapter)


def test_a_bias_that_the_configuration_announces_must_be_there(adapter: Path) -> None:
    change_config(adapter, lora_bias=True)
    assert "found no lora_B.bias; wanted one: adapter_config.json sets lora_bias" in refusal(adapter)


def test_a_bias_on_experts_is_refused_by_name(tmp_path: Path) -> None:
    card = tiny_cards()["mixtral"]
    config = {"lora_bias": True}
    directory = write_peft_adapter(tmp_path / "a", card, rank=4, targets=["down_proj"], config=config)
    biases = {n: n.replace("lora_B.weight", "lora_B.bias") for n in open_tensors(directory / TENSORS_FILE).tensors}
    ones = {bias: np.ones((32,), np.float32) for name, bias in biases.items() if bias != name}
    change_tensors(directory, lambda t: t.update(ones))
    message = refusal(directory, card=card)
    assert "experts.0.down_proj.lora_B.bias" in message
    assert "lora_bias on dense projections only" in message


def test_an_adapter_of_a_wider_base_is_refused(tmp_path: Path) -> None:
    other = make_card("llama", hidden=64)
    message = refusal(write_peft_adapter(tmp_path / "wide", other, rank=4))
    assert "found [64, 4]; wanted [32, 4]" in message


def test_a_shared_experts_gate_of_another_width_is_refused(tmp_path: Path) -> None:
    directory = write_peft_adapter(tmp_path / "a", QWEN2, rank=4, config={"target_modules": "all-linear"})
    change_tensors(directory, lambda t: with_pair(t, "model.layers.0.mlp.shared_expert_gate", out_dim=2))
    message = refusal(directory, card=QWEN2)
    assert "shared_expert_gate" in message
    assert "found [2, 4]; wanted [1, 4]" in message


def test_an_expert_that_the_base_does_not_have_is_refused(tmp_path: Path) -> None:
    directory = write_peft_adapter(tmp_path / "a", QWEN2, rank=4)
    change_tensors(directory, lambda t: with_pair(t, "model.layers.0.mlp.experts.4.down_proj", in_dim=24))
    assert "experts.4.down_proj" in refusal(directory, card=QWEN2)


def test_one_projection_under_two_names_is_refused(tmp_path: Path) -> None:
    card = tiny_cards()["mixtral"]
    config = {"target_modules": ["w1", "gate_proj"]}
    directory = write_peft_adapter(tmp_path / "a", card, rank=4, targets=["gate_proj"], config=config)
    change_tensors(directory, lambda t: with_pair(t, "model.layers.0.block_sparse_moe.experts.1.w1", out_dim=48))
    message = refusal(directory, card=card)
    assert "a second pair" in message
    assert "experts.1.w1" in message


def test_scales_of_experts_that_no_factor_bridges_are_refused(tmp_path: Path) -> None:
    config = {"alpha_pattern": {r"experts\.2\..*": 1e30}}
    directory = write_peft_adapter(
        tmp_path / "a", tiny_cards()["mixtral"], rank=4, targets=["down_proj"], config=config
    )
    message = refusal(directory, card=tiny_cards()["mixtral"])
    assert "experts.2.down_proj" in message
    assert "2.5e+29 beside 2" in message


def test_a_rank_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    directory = write_peft_adapter(tmp_path / "a", CARD, rank=16)
    assert "found 16; wanted at most 8" in refusal(directory, max_rank=8)


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "a web page"),
        (b"\n<html>Sign in</html>", "a web page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an error message"),
        (b"", "no LoRA tensors (an empty file)"),
    ],
)
def test_what_stands_in_for_a_weight_file_is_named(adapter: Path, content: bytes, kind: str) -> None:
    (adapter / TENSORS_FILE).write_bytes(content)
    message = refusal(adapter)
    assert TENSORS_FILE in message
    assert kind in message


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_tensor_file_is_refused(adapter: Path, keep: int) -> None:
    data = (adapter / TENSORS_FILE).read_bytes()
    (adapter / TENSORS_FILE).write_bytes(data[:keep])
    assert TENSORS_FILE in refusal(adapter)


def test_the_truncated_tensor_is_named(adapter: Path) -> None:
    data = (adapter / TENSORS_FILE).read_bytes()
    (adapter / TENSORS_FILE).write_bytes(data[:-1])
    message = refusal(adapter)
    assert "layers.1.self_attn.q_proj.lora_B.weight" in message
    assert "truncated" in message


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "pytorch_model.PTH"])
def test_a_pickle_is_refused_by_name_and_never_opened(adapter: Path, name: str) -> None:
    (adapter / TENSORS_FILE).rename(adapter / name)
    message = refusal(adapter)
    assert name in message
    assert "pickle" in message


def tensor_of(shape: list[int]) -> bytes:
    """A header whose one tensor has this shape, and four bytes."""
    return json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (b"[]", ["header"]),
        (b"{\xff}", ["header"]),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', ["tensor x bytes", "8 bytes"]),
        (b'{"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', ["tensor x shape"]),
        (tensor_of([9223372036854775807] * 100_000), ["tensor x shape", "100000 sizes", "at most 8"]),
        (tensor_of([0, 1 << 70]), ["tensor x shape", "at most 281474976710656 values"]),
        (tensor_of([0, *[1 << 40] * 3]), ["tensor x shape", "4 sizes"]),
        (b'{"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}', ["tensor x dtype", "I64", "F32"]),
        (b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}}', ["tensor x bytes"]),
        (
            b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            b' "y": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}',
            ["tensor y bytes"],
        ),
    ],
)
def test_a_header_that_lies_is_refused(adapter: Path, header: bytes, names: list[str]) -> None:
    (adapter / TENSORS_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    message = refusal(adapter)
    for name in [TENSORS_FILE, *names]:
        assert name in message


def test_bytes_that_belong_to_no_tensor_are_refused(adapter: Path) -> None:
    data = (adapter / TENSORS_FILE).read_bytes()
    (adapter / TENSORS_FILE).write_bytes(data + b"more")
    assert "the end of the last tensor" in refusal(adapter)


def test_a_header_longer_than_the_file_is_refused(adapter: Path) -> None:
    (adapter / TENSORS_FILE).write_bytes((1 << 40).to_bytes(8, "little") + bytes(64))
    assert f"{1 << 40} in a file of 72 bytes" in refusal(adapter)


@pytest.mark.parametrize("content", [b"", b"not json", b"[1]", b"\xff"])
def test_a_configuration_that_is_no_json_object_is_refused(adapter: Path, content: bytes) -> None:
    (adapter / CONFIG_FILE).write_bytes(content)
    assert CONFIG_FILE in refusal(adapter)


def missing(directory: Path) -> str:
    with pytest.raises(SourceNotFound) as refused:
        read_adapter(directory)
    assert "found none" in refused.value.message
    return refused.value.message


def test_a_missing_file_is_named_and_its_neighbours_are_not(adapter: Path) -> None:
    (adapter / TENSORS_FILE).rename(adapter / "secret-project.safetensors")
    message = missing(adapter)
    assert TENSORS_FILE in message
    assert "secret-project" not in message
    (adapter / CONFIG_FILE).rename(adapter / "other.json")
    message = missing(adapter)
    assert CONFIG_FILE in message
    assert "other.json" not in message


def test_a_directory_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    assert CONFIG_FILE in missing(tmp_path / "absent")


def test_an_adapter_below_the_directory_is_not_found(adapter: Path) -> None:
    adapter.rename(adapter.with_name("run1"))
    assert "run1" not in missing(adapter.parent)


def test_a_directory_of_medusa_heads_is_refused_by_name(adapter: Path) -> None:
    (adapter / CONFIG_FILE).unlink()
    (adapter / "config.json").write_bytes(msgspec.json.encode({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    message = refusal(adapter)
    assert "config.json: medusa_num_heads" in message
    assert "Medusa" in message


def test_narrowing_to_a_wider_or_unknown_type_is_refused(adapter: Path) -> None:
    assert "F64" in refusal(adapter, narrow="F64")
    change_tensors(adapter, lambda t: t.update({n: v.astype(np.float16) for n, v in t.items()}))
    assert "BF16 for a file of F16" in refusal(adapter, narrow="BF16")


def test_narrowing_that_overflows_is_refused(adapter: Path) -> None:
    change_tensors(adapter, poke(A, 1e6))
    message = refusal(adapter, narrow="F16")
    assert A in message
    assert "65504" in message


def test_an_mlp_of_a_base_that_has_experts_only_is_not_found_among_what_is_wanted(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["gate_proj", "up_proj", "down_proj"])
    found, _, wanted = refusal(source, card=tiny_cards()["qwen3_moe"]).partition("; wanted ")
    assert found.endswith("found module model.layers.0.mlp.down_proj")
    assert " mlp.experts.{expert}.down_proj," in wanted
    assert " mlp.down_proj" not in wanted


@pytest.mark.parametrize(("half", "rows"), [("lora_A", slice(2, 3)), ("lora_B", slice(None))])
def test_values_too_small_for_f16_are_refused_by_tensor_and_served_as_bf16(
    adapter: Path, half: str, rows: slice
) -> None:
    """One rank is enough: the other factor may be large there."""

    def shrink(tensors: Tensors) -> None:
        factor = tensors[f"{Q0}.{half}.weight"]
        (factor if half == "lora_A" else factor.T)[rows] *= np.float32(2.0**-26)

    change_tensors(adapter, shrink)
    said = refusal(adapter, narrow="F16")
    assert f"{Q0}.{half}.weight narrowed to F16: found values so small that" in said
    assert "without narrowing" in said
    assert ingest(adapter, CARD, adapter / "packed", narrow="BF16").dtype == "BF16"
