"""The base card: what gateway and ingest know of a base model, and the fingerprint that names it.

    python -m infinilora.engine.prepare DIR [--name NAME]     prints the card as JSON

The fingerprint is a sha256 over what decides the numbers: the architecture, and of every tensor its name, shape, dtype
and the sha256 of its bytes. Two directories with the same weights, however sharded, have one fingerprint; one other
element is another. All weights are read for it, by as many threads as there are cores (0003 says what that costs).
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from infinilora.engine.model.checkpoint import Checkpoint, RandomTensors, TensorSource
from infinilora.engine.model.names import EMBED, LM_HEAD, site_geometry, tensor_shapes
from infinilora.engine.model.spec import ModelSpec, read_spec
from infinilora.protocol.adapter import FINGERPRINT_VERSION, BaseCard, Table
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.ids import Fingerprint

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NOT_IDENTITY = ("eos_token_ids", "bos_token_id", "max_position", "file_dtype")
"""Facts of a spec that leave the weights' meaning as it is."""


class Sum(NamedTuple):
    """A tensor by its values: the sha256 of its bytes in `dtype`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str


def base_card(spec: ModelSpec, source: TensorSource, *, directory: Path, name: str, max_len: int) -> BaseCard:
    """Reads every tensor. The directory is read for the names of the tokenizer's files only."""
    files = tuple(f for f in TOKENIZER_FILES if (directory / f).is_file())
    sums = tensor_sums(spec, source)
    return BaseCard(
        fingerprint=_fingerprint(spec, sums),
        fingerprint_version=FINGERPRINT_VERSION,
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
        tables=_tables(spec, sums),
    )


def fingerprint(spec: ModelSpec, source: TensorSource) -> Fingerprint:
    """The identity of a base model. Reads every tensor."""
    return _fingerprint(spec, tensor_sums(spec, source))


def tensor_sums(spec: ModelSpec, source: TensorSource) -> dict[str, Sum]:
    """Of every tensor of the model, by its name in a checkpoint that has experts one by one."""
    names = sorted(tensor_shapes(spec))
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="hash-weights") as pool:
        return dict(zip(names, pool.map(lambda name: _sum(source.get(name)), names), strict=True))


def _sum(tensor: Tensor) -> Sum:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return Sum(tensor.dtype, tuple(tensor.shape), hashlib.sha256(data).hexdigest())


def _fingerprint(spec: ModelSpec, sums: Mapping[str, Sum]) -> Fingerprint:
    """Typed, length-prefixed parts, so that no two models spell the same bytes."""
    state = hashlib.sha256()
    facts = {k: v for k, v in asdict(spec).items() if k not in _NOT_IDENTITY}
    _part(state, f"fingerprint {FINGERPRINT_VERSION}".encode())
    _part(state, msgspec.json.encode(facts, order="sorted"))
    for name, found in sorted(sums.items()):
        _part(state, f"{name} {list(found.shape)} {found.dtype} {found.sha256}".encode())
    return Fingerprint("sha256:" + state.hexdigest())


def _part(state: "hashlib._Hash", data: bytes) -> None:
    state.update(len(data).to_bytes(8, "little"))
    state.update(data)


def _tables(spec: ModelSpec, sums: Mapping[str, Sum]) -> dict[str, Table]:
    embedding = _table(sums[EMBED])
    head = embedding if spec.tied_embeddings else _table(sums[LM_HEAD])
    return {EMBED.removesuffix(".weight"): embedding, LM_HEAD.removesuffix(".weight"): head}


def _table(found: Sum) -> Table:
    return Table(dtype=_DTYPE_NAMES[found.dtype], shape=found.shape, sha256=found.sha256)


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
