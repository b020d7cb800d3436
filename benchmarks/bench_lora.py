"""make bench-lora: decode throughput with 16 rank-16 adapters at 32 streams, remote beside base-only and local.

Ceiling: each step reads the base once and each adapter once, and multiplies every row by both. The floor beside
the figures is that sum over what the machine was measured to do.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import many_adapters
from harness import THREADS, decode, demo_model, median, register, report, run, served

from infinilora.bench.floors import measure

STREAMS, ADAPTERS, RANK, TOKENS, ROUNDS = 32, 16, 16, 96, 3
BASE_PARAMETERS, ADAPTER_PARAMETERS = 134_515_008, 4_884_480


def floors(adapter_bytes: int) -> tuple[float, float]:
    """Tokens per second at best: base alone, and with every adapter read once a step."""
    machine = measure(THREADS)
    base = machine.floor_s(num_bytes=4 * BASE_PARAMETERS, flops=2 * BASE_PARAMETERS * STREAMS)
    lora = machine.floor_s(
        num_bytes=ADAPTERS * ADAPTER_PARAMETERS * adapter_bytes, flops=2 * ADAPTER_PARAMETERS * STREAMS
    )
    return STREAMS / base, STREAMS / (base + lora)


async def compare(dtype: torch.dtype, root: Path) -> dict[str, float]:
    """Medians over interleaved rounds, in tokens per second."""
    model = demo_model()
    adapters = many_adapters(root, model, count=ADAPTERS, rank=RANK, dtype=dtype)
    names = list(adapters)
    rates: dict[str, list[float]] = {"base": [], "remote": [], "local": []}
    async with (
        served(model, lora="remote", adapters=root) as remote,
        served(model, lora="local", adapters=root) as local,
    ):
        for stack in (remote, local):
            await register(stack, adapters)
            await decode(stack, names, streams=STREAMS, tokens=8, seed=0)
        for turn in range(ROUNDS):
            seed = 10 * turn
            rates["base"].append(await decode(remote, ["base"], streams=STREAMS, tokens=TOKENS, seed=seed + 1))
            rates["remote"].append(await decode(remote, names, streams=STREAMS, tokens=TOKENS, seed=seed + 2))
            rates["local"].append(await decode(local, names, streams=STREAMS, tokens=TOKENS, seed=seed + 3))
            print({k: round(v[-1], 1) for k, v in rates.items()}, flush=True)
    return {k: median(v) for k, v in rates.items()}


async def main() -> None:
    results = {}
    for label, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with TemporaryDirectory(prefix="infinilora-adapters-") as root:
            base_floor, lora_floor = floors(dtype.itemsize)
            rates = await compare(dtype, Path(root))
        results[label] = {
            **{k: round(v, 1) for k, v in rates.items()},
            "floor_base": round(base_floor, 1),
            "floor_lora": round(lora_floor, 1),
            "remote_over_base": round(rates["remote"] / rates["base"], 3),
            "remote_over_local": round(rates["remote"] / rates["local"], 3),
        }
        print(label, results[label], flush=True)
    bf16 = results["bf16"]
    report(
        "bench-lora",
        bf16["remote_over_base"],
        0.70,
        met=bf16["remote_over_base"] >= 0.70 and bf16["remote_over_local"] >= 0.9,
        unit="remote decode throughput over base-only; and at least 0.9 of local",
        streams=STREAMS,
        adapters=ADAPTERS,
        rank=RANK,
        rounds=ROUNDS,
        adapters_bf16=bf16,
        adapters_fp32=results["fp32"],
    )


if __name__ == "__main__":
    run(main())
