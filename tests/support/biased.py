"""Packed adapters whose modules have biases of lora_B: what is added is the delta of x, and the bias whatever x is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard, Site, manifest_digest
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore
from infinilora.weights.ingest import ingest
from infinilora.weights.peft import TENSORS_FILE
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import open_tensors
from support.pools import Packed

SCALE = 2
"""What `write_peft_adapter` gives every adapter: alpha is twice the rank."""


class Biased(Packed):
    """`biases`: by module, as the file has them."""

    def __init__(self, digest: Digest, path: Path, card: BaseCard, biases: dict[str, NDArray[np.float32]]) -> None:
        super().__init__(digest, path, card)
        self._biases = biases

    @override
    def delta(self, layer: int, site: Site, x: NDArray[np.float32]) -> NDArray[np.float64]:
        parts = self.card.geometry()[layer, site].parts
        vectors = [SCALE * self._biases.get(p.module, np.zeros(p.out_dim)).astype(np.float64) for p in parts]
        return super().delta(layer, site, x) + np.concatenate(vectors)


def pack_biased(
    work: Path, blobs: BlobStore, card: BaseCard, *, seed: int, rank: int, targets: Sequence[str]
) -> Biased:
    """Make a random adapter of dense modules with `lora_bias`, ingest it and put it into the store."""
    source = write_peft_adapter(
        work / f"peft-{seed}", card, rank=rank, targets=targets, seed=seed, config={"lora_bias": True}
    )
    file, dice = open_tensors(source / TENSORS_FILE), np.random.default_rng(seed)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    biases: dict[str, NDArray[np.float32]] = {}
    for name in [name for name in tensors if name.endswith(".lora_B.weight")]:
        bias = dice.standard_normal((tensors[name].shape[0],), np.float32)
        tensors[name.replace(".weight", ".bias")] = bias
        biases[name.removesuffix(".lora_B.weight").removeprefix("base_model.model.")] = bias
    write_tensors(source / TENSORS_FILE, tensors)
    path = work / f"packed-{seed}"
    digest = manifest_digest(ingest(source, card, path))
    blobs.put_file(keys.packed(digest), path)
    return Biased(digest, path, card, biases)
