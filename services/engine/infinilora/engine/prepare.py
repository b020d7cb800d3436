"""The base card: what gateway and ingest know of a base model, and the fingerprint that names it.

    python -m infinilora.engine.prepare DIR [--name NAME]     prints the card as JSON

The fingerprint is a sha256 over what decides the numbers: the architecture, the table of tensors, and a sample
of every tensor's bytes. Two directories with the same weights, however sharded, have one fingerprint.
"""

import argparse
import hashlib
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from infinilora.engine.model.checkpoint import Checkpoint, RandomTensors, TensorSource
from infinilora.engine.model.names import EMBED, LM_HEAD, site_geometry, tensor_shapes
from infinilora.engine.model.spec import ModelSpec, read_spec
from infinilora.protocol.adapter import BaseCard, Table
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.ids import Fingerprint

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

_SAMPLE_BYTES = 4096
_HASHED_ROWS = 1024
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NOT_IDENTITY = ("eos_token_ids", "bos_token_id", "max_position", "file_dtype")
"""Facts of a spec that leave the weights' meaning as it is."""


def base_card(spec: ModelSpec, source: TensorSource, *, directory: Path, name: str, max_len: int) -> BaseCard:
    files = tuple(f for f in TOKENIZER_FILES if (directory / f).is_file())
    return BaseCard(
        fingerprint=fingerprint(spec, source),
        name=name,
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        hidden_dim=spec.hidden_dim,
        vocab_size=spec.vocab_size,
        max_model_len=max_len,
        dtype=spec.file_dtype,
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
        tokenizer_files=files,
        sites=site_geometry(spec),
        tables=_tables(spec, source),
    )


def _tables(spec: ModelSpec, source: TensorSource) -> dict[str, Table]:
    embedding = _table(source.get(EMBED))
    head = embedding if spec.tied_embeddings else _table(source.get(LM_HEAD))
    return {EMBED.removesuffix(".weight"): embedding, LM_HEAD.removesuffix(".weight"): head}


def _table(tensor: Tensor) -> Table:
    state = hashlib.sha256()
    for start in range(0, len(tensor), _HASHED_ROWS):
        state.update(tensor[start : start + _HASHED_ROWS].contiguous().view(torch.uint8).numpy().data)
    return Table(dtype=_DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), sha256=state.hexdigest())


def fingerprint(spec: ModelSpec, source: TensorSource) -> Fingerprint:
    """Typed, length-prefixed parts, so that no two models spell the same bytes."""
    state = hashlib.sha256()
    facts = {k: v for k, v in asdict(spec).items() if k not in _NOT_IDENTITY}
    _part(state, msgspec.json.encode(facts, order="sorted"))
    for name, shape in sorted(tensor_shapes(spec).items()):
        tensor = source.get(name)
        _part(state, f"{name} {list(shape)} {tensor.dtype}".encode())
        _part(state, _sample(tensor))
    return Fingerprint("sha256:" + state.hexdigest())


def _part(state: "hashlib._Hash", data: bytes) -> None:
    state.update(len(data).to_bytes(8, "little"))
    state.update(data)


def _sample(tensor: Tensor) -> bytes:
    """About 4 KiB spread evenly over the tensor, its first element among them."""
    flat = tensor.contiguous().view(-1)
    step = max(1, flat.numel() * flat.element_size() // _SAMPLE_BYTES)
    return flat[::step].contiguous().view(torch.uint8).numpy().tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m infinilora.engine.prepare", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--name", default=None, help="served name; the directory's name if absent")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    args = parser.parse_args()
    try:
        spec = read_spec(args.directory)
        source = RandomTensors(spec) if args.load_format == "dummy" else Checkpoint(args.directory, spec)
        name = args.name or args.directory.resolve().name
        card = base_card(spec, source, directory=args.directory, name=name, max_len=spec.max_exact_len)
    except InfiniLoraError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(card).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
