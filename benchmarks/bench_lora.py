"""make bench-lora: decode throughput with 16 and 64 rank-16 adapters at 32 streams, remote beside base-only and local.

Ceiling: each step reads the base once and each adapter once, and multiplies every row by both. The floor beside
the figures is that sum over what the machine was measured to do.

Two systems that are alike differ for as long as they live (bench_attached.py), so both are started anew for every
pair, in turned order, and the figures are medians over pairs.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import many_adapters
from harness import THREADS, decode, demo_model, median, register, report, run, served

from infinilora.bench.floors import measure

STREAMS, ADAPTERS, RANK, TOKENS, PAIRS, ROUNDS = 32, 16, 16, 96, 5, 2
MANY, OF_BASE, OF_LOCAL = 64, 0.78, 0.92
BASE_PARAMETERS, ADAPTER_PARAMETERS = 134_515_008, 4_884_480


def floors(adapter_bytes: int, in_step: int) -> tuple[float, float]:
    """Tokens per second at best: base alone, and with every adapter of a step read once."""
    machine = measure(THREADS)
    base = machine.floor_s(num_bytes=4 * BASE_PARAMETERS, flops=2 * BASE_PARAMETERS * STREAMS)
    lora = machine.floor_s(
        num_bytes=in_step * ADAPTER_PARAMETERS * adapter_bytes, flops=2 * ADAPTER_PARAMETERS * STREAMS
    )
    return STREAMS / base, STREAMS / (base + lora)


async def one_pair(model: Path, root: Path, adapters: dict[str, Path], *, is_turned: bool) -> dict[str, float]:
    """Medians in tokens per second over interleaved rounds, on two systems started here."""
    names = list(adapters)
    rates: dict[str, list[float]] = {"base": [], "remote": [], "local": []}
    async with AsyncExitStack() as stacks:
        started = {}
        for lora in ("local", "remote") if is_turned else ("remote", "local"):
            started[lora] = stack = await stacks.enter_async_context(served(model, lora=lora, adapters=root))
            await register(stack, adapters)
            await decode(stack, names, streams=STREAMS, tokens=8, seed=0)
        runs = [("base", "remote", ["base"]), ("remote", "remote", names), ("local", "local", names)]
        for turn in range(ROUNDS):
            for kind, lora, models in runs[turn % 3 :] + runs[: turn % 3]:
                rates[kind].append(
                    await decode(started[lora], models, streams=STREAMS, tokens=TOKENS, seed=10 * turn + 1)
                )
            print({k: round(v[-1], 1) for k, v in rates.items()}, flush=True)
    return {k: median(v) for k, v in rates.items()}


async def compare(count: int, dtype: torch.dtype, pairs: int) -> dict[str, object]:
    """The medians over pairs of each ratio, and of the rates."""
    model = demo_model()
    with TemporaryDirectory(prefix="infinilora-adapters-") as root:
        base_floor, lora_floor = floors(dtype.itemsize, min(count, STREAMS))
        adapters = many_adapters(Path(root), model, count=count, rank=RANK, dtype=dtype)
        found = [await one_pair(model, Path(root), adapters, is_turned=bool(pair % 2)) for pair in range(pairs)]
    over = {key: [rates["remote"] / rates[key] for rates in found] for key in ("base", "local")}
    results: dict[str, object] = {
        **{key: round(median([rates[key] for rates in found]), 1) for key in found[0]},
        "floor_base": round(base_floor, 1),
        "floor_lora": round(lora_floor, 1),
    }
    for key, ratios in over.items():
        results[f"remote_over_{key}"] = round(median(ratios), 3)
        results[f"remote_over_{key}_pairs"] = [round(r, 3) for r in ratios]
    print(count, dtype, results, flush=True)
    return results


async def main() -> None:
    bf16 = await compare(ADAPTERS, torch.bfloat16, PAIRS)
    many = await compare(MANY, torch.bfloat16, 2)
    fp32 = await compare(ADAPTERS, torch.float32, 1)
    over_base, over_local = (float(str(bf16[f"remote_over_{key}"])) for key in ("base", "local"))
    report(
        "bench-lora",
        over_base,
        OF_BASE,
        met=over_base >= OF_BASE and over_local >= OF_LOCAL,
        unit="remote decode throughput over base-only, 16 adapters in bf16; and at least 0.92 of local",
        streams=STREAMS,
        rank=RANK,
        pairs=PAIRS,
        rounds=ROUNDS,
        adapters_16_bf16=bf16,
        adapters_64_bf16=many,
        adapters_16_fp32=fp32,
    )


if __name__ == "__main__":
    run(main())
