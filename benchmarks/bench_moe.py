"""make bench-moe: as bench-lora, on a mixture of experts (SmolLM2 upcycled: 4 experts, top-2), adapters on all.

Remote decode throughput at 32 streams: at least 0.70 of base-only and 0.92 of `local`, which has the same kernels.
Two round trips a layer at the experts' sites, and two at attention's; `h` comes back from `down`, not top_k x h.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import EXPERTS, many_adapters, num_parameters
from bench_lora import ADAPTERS, PAIRS, RANK, ROUNDS, STREAMS, one_pair
from harness import THREADS, demo_model, median, report, run
from safetensors import safe_open

from infinilora.bench.floors import measure

OF_BASE, OF_LOCAL = 0.70, 0.92
ACTIVE = 2 / 4
"""Of the experts' multiply-adds; at 32 rows every expert is read."""


def floors(model: Path, adapter: Path, dtype: torch.dtype) -> dict[str, float]:
    """Tokens per second at best: base alone, and with every adapter read once a step."""
    machine, experts, others = measure(THREADS), 0, 0
    with safe_open(model / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a mapping
            size = 1
            for dim in file.get_slice(key).get_shape():
                size *= dim
            if ".experts." in key:
                experts += size
            else:
                others += size
    base_s = machine.floor_s(num_bytes=4 * (experts + others), flops=2 * STREAMS * (ACTIVE * experts + others))
    own = num_parameters(adapter)
    lora_s = machine.floor_s(num_bytes=ADAPTERS * own * dtype.itemsize, flops=2 * STREAMS * ACTIVE * own)
    return {"floor_base": round(STREAMS / base_s, 1), "floor_lora": round(STREAMS / (base_s + lora_s), 1)}


async def main() -> None:
    model, dtype = demo_model("smollm2-moe"), torch.bfloat16
    with TemporaryDirectory(prefix="infinilora-adapters-") as root:
        adapters = many_adapters(Path(root), model, count=ADAPTERS, rank=RANK, dtype=dtype, targets=EXPERTS)
        least = floors(model, adapters["a00"], dtype)
        print(least, flush=True)
        found = [await one_pair(model, Path(root), adapters, is_turned=bool(pair % 2)) for pair in range(PAIRS)]
    over = {key: [rates["remote"] / rates[key] for rates in found] for key in ("base", "local")}
    over_base, over_local = (median(over[key]) for key in ("base", "local"))
    report(
        "bench-moe",
        over_base,
        OF_BASE,
        met=over_base >= OF_BASE and over_local >= OF_LOCAL,
        unit="remote decode throughput over base-only; and at least 0.92 of local",
        streams=STREAMS,
        adapters=ADAPTERS,
        rank=RANK,
        pairs=PAIRS,
        rounds=ROUNDS,
        over_local=round(over_local, 3),
        over_base_pairs=[round(r, 3) for r in over["base"]],
        over_local_pairs=[round(r, 3) for r in over["local"]],
        **{key: round(median([rates[key] for rates in found]), 1) for key in found[0]},
        **least,
    )


if __name__ == "__main__":
    run(main())
