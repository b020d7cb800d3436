"""`adapter check` as a person runs it: a real checkpoint, real adapters, no server."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from infinilora.cli.__main__ import app
from infinilora.cli.terminal import REFUSED, UNREACHABLE
from support.cases import Files, Oracle, config, keyed, make_base, modules

USAGE = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base("L", tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def check(adapter: Path, model: Path, *options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["adapter", "check", str(adapter), "--model", str(model), *options])
    return done.exit_code, done.stdout, done.stderr


def test_a_good_adapter_is_told_module_by_module(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    q0, q1 = modules("q_proj")
    loras = oracle.loras([q0], rank=8) | oracle.loras([q1], rank=4)
    settings = config(r=4, lora_alpha=6, target_modules=["q_proj"], rank_pattern={"layers.0.self_attn.q_proj": 8})
    adapter = Files(settings, keyed(loras)).write(tmp_path / "a")
    code, out, err = check(adapter, model)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert [q0, "qkv", "8", "0.75", "2.0", "kB", "packed"] in rows
    assert [q1, "qkv", "4", "1.5", "1.0", "kB", "packed"] in rows
    assert "can be served on tiny-llama exactly: sha256:" in out

    code, out, _ = check(adapter, model, "--json")
    told = json.loads(out)
    assert (code, told["servable"], told["error"]) == (0, True, None)
    report = told["report"]
    assert report["self_test_error"] < 1e-6
    assert [(row["module"], row["num_bytes"]) for row in report["plan"]] == [(q0, 2048), (q1, 1024)]


def test_the_model_directory_answers_what_an_engine_would(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 32)}
    settings = config(r=4, target_modules=["q_proj"], trainable_token_indices=[7, 3])
    adapter = Files(settings, keyed(oracle.loras(modules("q_proj"))) | rows).write(tmp_path / "a")
    code, out, err = check(adapter, model)
    assert (code, err) == (0, "")
    rows_told = [line.split() for line in out.splitlines()]
    assert ["model.embed_tokens", "embed", "2", "1", "1.3", "kB", "packed"] in rows_told
    assert "can be served on tiny-llama exactly" in out


def test_what_is_refused_is_told_in_the_words_of_registration(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    tensors = keyed(oracle.loras(modules("q_proj", "v_proj")))
    adapter = Files(config(use_qalora=True), tensors).write(tmp_path / "a")
    code, out, err = check(adapter, model)
    assert code == REFUSED
    assert "can be served" not in out
    assert "adapter_invalid: adapter_config.json" in err
    assert "use_qalora" in err
    code, out, _ = check(adapter, model, "--json")
    told = json.loads(out)
    assert (code, told["servable"], told["error"]["code"]) == (REFUSED, False, "adapter_invalid")


def test_the_gateways_limit_of_rank_can_be_asked_for(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    settings = config(r=65, lora_alpha=65, target_modules=["q_proj"])
    adapter = Files(settings, keyed(oracle.loras(modules("q_proj"), rank=65))).write(tmp_path / "a")
    assert check(adapter, model)[0] == 0
    assert check(adapter, model, "--max-rank", "65")[0] == 0
    code, _, err = check(adapter, model, "--max-rank", "64")
    assert code == REFUSED
    assert "found 65; wanted at most 64 (INFINILORA_MAX_RANK)" in " ".join(err.split())
    assert check(adapter, model, "--max-rank", "0")[0] == USAGE


def test_where_the_model_cannot_be_read_nobody_knows(oracle: Oracle, tmp_path: Path) -> None:
    adapter = Files(config(), keyed(oracle.loras(modules("q_proj", "v_proj")))).write(tmp_path / "a")
    code, out, err = check(adapter, tmp_path / "none")
    assert (code, out) == (UNREACHABLE, "")
    assert "cannot be described" in err
    assert "config.json" in err


def test_an_adapter_of_another_base_names_both_shapes(oracle: Oracle, tmp_path: Path) -> None:
    other = make_base("M", tmp_path / "mixtral")
    adapter = Files(config(target_modules=["gate_proj"]), keyed(oracle.loras(modules("gate_proj")))).write(
        tmp_path / "a"
    )
    code, _, err = check(adapter, other)
    assert code == REFUSED
    assert "model.layers.0.mlp.gate_proj" in err
    assert "mixtral" in err


def test_what_depends_on_the_bases_numbers_is_asked_of_the_directory(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    loras = oracle.loras(modules("q_proj"))
    lengths = {f"base_model.model.{module}.lora_magnitude_vector": torch.full((32,), 3.0) for module in loras}
    settings = config(target_modules=["q_proj"], use_dora=True)
    adapter = Files(settings, keyed(loras) | lengths).write(tmp_path / "a")
    code, out, _ = check(adapter, model, "--json")
    told = json.loads(out)
    assert (code, told["servable"], told["error"]) == (0, True, None)
    manifest = told["report"]["manifest"]
    assert all(part["has_colscale"] for site in manifest["sites"] for part in site["parts"])
