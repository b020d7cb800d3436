"""make bench-packed: one large adapter into the host tier, packed and verified, against its PEFT file tensor by tensor.

The adapter has Qwen3-30B-A3B's shape: 48 layers, q, k, v and 128 experts of three projections each: 37,152 tensors.
Both roads end in host memory with the same numbers in the layout that a step computes with, and that is checked: the
packed file as the loader takes it (from the disk cache, every block against its sha256), and the PEFT file as engines
that keep adapters in their process take it (each tensor by its name into memory of its own, then the experts of a
projection stacked, B turned; nothing verified). Both files are in the page cache. The host tier's memory was written to
before, as that of a running server was.
"""

import json
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import median, report
from safetensors import safe_open

from infinilora.engine.model.names import site_geometry
from infinilora.engine.model.spec import read_spec
from infinilora.pool.bind import site_weights
from infinilora.pool.cache import DiskCache
from infinilora.pool.host import HostTier
from infinilora.pool.tiers import Tiers
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.ids import Digest, Fingerprint, digest_of
from infinilora.protocol.ingest import MAX_RANK
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.weights.check import plan_adapter
from infinilora.weights.packed import PackedHeader, packed_ranges, read_header, write_packed
from infinilora.weights.peft import read_adapter
from infinilora.weights.synth import write_peft_adapter

RANKS, RANK, ROUNDS, TARGET = (2, 4, 8), 4, 5, 5.0
TARGETS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
NUM_TENSORS = 37_152
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 151_645,
    "torch_dtype": "bfloat16",
}

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


def main() -> None:
    found = {rank: measure(rank) for rank in RANKS}
    tensors, packed, num_bytes = found[RANK]
    report(
        "bench-packed",
        tensors / packed,
        TARGET,
        unit="times faster into host memory than tensor by tensor",
        tensor_by_tensor_s=round(tensors, 4),
        packed_s=round(packed, 4),
        packed_gb_per_s=round(num_bytes / packed / 1e9, 2),
        rank=RANK,
        file_bytes=num_bytes,
        num_tensors=NUM_TENSORS,
        times_faster_by_rank={rank: round(t / p, 2) for rank, (t, p, _) in found.items()},
        n=ROUNDS,
    )


def measure(rank: int) -> tuple[float, float, int]:
    """(median seconds tensor by tensor, median seconds packed, bytes of the PEFT file)."""
    with TemporaryDirectory(prefix="infinilora-bench-") as work:
        card = card_of(Path(work))
        peft = write_peft_adapter(Path(work) / "peft", card, rank=rank, targets=TARGETS, dtype="BF16")
        cache, header = packed_cache(peft, card, Path(work))
        host = HostTier(2 * header.file_bytes, is_pinned=False)
        modules = [
            (part.module, site.num_experts)
            for site in card.sites
            for part in site.parts
            if part.module.rpartition(".")[2] in TARGETS
        ]
        file = peft / "adapter_model.safetensors"
        tensor_s, packed_s = [], []
        for _ in range(ROUNDS + 1):  # the first warms the page cache and the tier's pages
            seconds, stacked = load_tensors(file, modules)
            tensor_s.append(seconds)
            packed_s.append(load_packed(cache, host, header.digest))
            check_same(stacked, card, host, header.digest)
            del stacked
        num_bytes = file.stat().st_size
    print(f"rank {rank}: tensor by tensor {tensor_s[1:]} s, packed {packed_s[1:]} s", flush=True)
    return median(tensor_s[1:]), median(packed_s[1:]), num_bytes


def card_of(work: Path) -> BaseCard:
    (work / "config.json").write_text(json.dumps(CONFIG))
    spec = read_spec(work)
    return BaseCard(
        fingerprint=Fingerprint(digest_of(b"qwen3-30b-a3b by shape")),
        name="qwen3-30b-a3b",
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        hidden_dim=spec.hidden_dim,
        vocab_size=spec.vocab_size,
        max_model_len=4096,
        dtype="BF16",
        eos_token_ids=spec.eos_token_ids,
        sites=site_geometry(spec),
    )


def packed_cache(peft: Path, card: BaseCard, work: Path) -> tuple[DiskCache, PackedHeader]:
    """A disk cache that holds the adapter, packed, and its header."""
    path = work / "packed"
    with path.open("wb") as out:
        write_packed(plan_adapter(read_adapter(peft), card, max_rank=MAX_RANK), out)
    with path.open("rb") as file:
        header = read_header(file)
    cache = DiskCache(work / "cache", 8 << 30)
    path.rename(cache.path(header.digest))
    return cache, header


def load_packed(cache: DiskCache, host: HostTier, digest: Digest) -> float:
    """Seconds until every layer lies in the host tier, verified."""
    host.forget(digest)
    start = time.perf_counter()
    source = Tiers(DirectoryBlobs(Path("/nowhere")), cache, host).open_near(digest)
    for layer in range(source.header.manifest.num_layers + 1):
        source.hold_layer(layer)
    source.commit()
    source.close()
    return time.perf_counter() - start


Stacked = dict[tuple[str, str], torch.Tensor]
"""(module, half) -> A [r, in] or B turned [r, out]; with `{expert}` in the module, of all experts: [E, r, ...]."""


def load_tensors(path: Path, modules: list[tuple[str, int]]) -> tuple[float, Stacked]:
    """Seconds until all is loaded and the experts of each projection are stacked. `modules`: (name, experts)."""
    start = time.perf_counter()
    loaded: dict[tuple[str, str], torch.Tensor] = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a mapping
            found = _NAME.fullmatch(key)
            assert found is not None
            tensor = file.get_tensor(key)
            loaded[found["module"], found["half"]] = tensor.clone() if found["half"] == "A" else tensor.T.contiguous()
    num_loaded, stacked = len(loaded), {}
    for module, experts in modules:
        for half in ("A", "B"):
            names = [module.replace("{expert}", str(expert)) for expert in range(experts)]
            one = [loaded.pop((name, half)) for name in names or [module]]
            stacked[module, half] = torch.stack(one) if experts else one[0]
    seconds = time.perf_counter() - start
    assert num_loaded == NUM_TENSORS
    return seconds, stacked


def check_same(stacked: Stacked, card: BaseCard, host: HostTier, digest: Digest) -> None:
    held = host.open(digest)
    assert held is not None
    geometry = card.geometry()
    for layer in range(card.num_layers):
        at = 0
        for entry, _, num_bytes in packed_ranges(held.whole, layer):
            parts = site_weights(entry, held.whole.manifest.dtype, held.layer(layer)[at : at + num_bytes])
            modules = {part.name: part.module for part in geometry[layer, entry.site].parts}
            for part, packed in zip(entry.parts, parts, strict=True):
                assert torch.equal(packed.a, stacked[modules[part.name], "A"])
                assert torch.equal(packed.bt, stacked[modules[part.name], "B"])
            at += num_bytes
    host.close(held)


if __name__ == "__main__":
    main()
