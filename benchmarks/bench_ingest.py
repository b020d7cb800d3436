"""make bench-ingest: registering a 200 MB adapter's files, over reading, hashing and writing them: at most 2.5 times.

The worker is started as the gateway starts it, confined, for each round: what it costs to start is in the figure.
Rounds alternate with the plain copy; both sides find the files in the page cache and leave writing back to it.
"""

import hashlib
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import median, report, run

from infinilora.gateway.ingest import IngestLimits, pack_adapter
from infinilora.protocol.adapter import PARTS, BaseCard, PartGeometry, Site, SiteGeometry
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.weights.synth import write_peft_adapter

LAYERS, HIDDEN, KV, INTERMEDIATE = 32, 4096, 1024, 14336
RANK = 38
"""200 MB in BF16 over all linear projections of a dense model of 8 billion parameters."""
ROUNDS = 7
CHUNK_BYTES = 8 << 20
TARGET = 2.5


async def main() -> None:
    card = dense_card()
    with TemporaryDirectory(prefix="infinilora-bench-") as root, TemporaryDirectory(prefix="infinilora-bench-") as out:
        source, work = write_peft_adapter(Path(root), card, rank=RANK, dtype="BF16", seed=1), Path(out)
        size = size_of(source)
        plain, ingests = [], []
        for number in range(ROUNDS + 1):
            plain_s, ingest_s = copy_hashed(source, work), await ingest(source, card, work)
            if number:  # the first warms both up
                plain.append(plain_s)
                ingests.append(ingest_s)
            print(f"read, hash and write {plain_s:.3f} s   ingest {ingest_s:.3f} s", flush=True)
    ratio = median([b / a for a, b in zip(plain, ingests, strict=True)])
    report(
        "bench-ingest",
        ratio,
        TARGET,
        met=ratio <= TARGET,
        megabytes=round(size / 1e6, 1),
        plain_s=round(median(plain), 3),
        ingest_s=round(median(ingests), 3),
        n=ROUNDS,
    )


def size_of(source: Path) -> int:
    return sum(file.stat().st_size for file in source.iterdir())


def copy_hashed(source: Path, work: Path) -> float:
    """Seconds to read every file, hash it and write it again."""
    started_s = time.perf_counter()
    for file in source.iterdir():
        digest = hashlib.sha256()
        with file.open("rb") as data, (work / "copy").open("wb") as out:
            while chunk := data.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
        digest.hexdigest()
    return time.perf_counter() - started_s


async def ingest(source: Path, card: BaseCard, work: Path) -> float:
    """Seconds from files to a packed file that passed its self-test."""
    started_s = time.perf_counter()
    await pack_adapter(source, card, work, IngestLimits())
    return time.perf_counter() - started_s


def dense_card() -> BaseCard:
    """A dense model's card, with the widths above."""
    widths = {"q": HIDDEN, "k": KV, "v": KV, "o": HIDDEN, "gate": INTERMEDIATE, "up": INTERMEDIATE, "down": HIDDEN}
    inputs = {Site.QKV: HIDDEN, Site.O: HIDDEN, Site.GATE_UP: HIDDEN, Site.DOWN: INTERMEDIATE}

    def site(layer: int, kind: Site) -> SiteGeometry:
        parts, offset = [], 0
        block = "self_attn" if kind in (Site.QKV, Site.O) else "mlp"
        for name in PARTS[kind]:
            parts.append(PartGeometry(name, f"model.layers.{layer}.{block}.{name}_proj", widths[name], offset))
            offset += widths[name]
        return SiteGeometry(layer, kind, inputs[kind], offset, 0, tuple(parts))

    return BaseCard(
        fingerprint=Fingerprint(digest_of(b"bench-ingest")),
        name="dense-8b",
        model_type="llama",
        num_layers=LAYERS,
        hidden_dim=HIDDEN,
        vocab_size=128_000,
        max_model_len=8192,
        dtype="BF16",
        eos_token_ids=(2,),
        sites=tuple(site(layer, kind) for layer in range(LAYERS) for kind in inputs),
    )


if __name__ == "__main__":
    run(main())
