"""make bench-attached: base-only traffic with LoRA servers attached, over the same engine with no LoRA (law 5).

Two engines that are alike differ by up to 5 % for as long as they live, so both systems are started anew for every
pair, in turned order, and the figure is the median over pairs.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import many_adapters
from harness import decode, demo_model, median, register, report, run, served

STREAMS, TOKENS, PAIRS, ROUNDS = 32, 96, 5, 3


async def one_pair(model: Path, root: Path, adapters: dict[str, Path], *, is_turned: bool) -> float:
    """Attached over bare, the median of interleaved rounds on two systems started here."""
    ratios = []
    async with AsyncExitStack() as stacks:
        started = {}
        for lora in ("none", "remote") if is_turned else ("remote", "none"):
            started[lora] = await stacks.enter_async_context(served(model, lora=lora, adapters=root))
        attached, bare = started["remote"], started["none"]
        await register(attached, adapters)
        await decode(attached, list(adapters), streams=4, tokens=8, seed=0)
        await decode(bare, ["base"], streams=4, tokens=8, seed=0)
        for turn in range(ROUNDS):
            order = [attached, bare] if turn % 2 else [bare, attached]
            rates = {s: await decode(s, ["base"], streams=STREAMS, tokens=TOKENS, seed=turn) for s in order}
            ratios.append(rates[attached] / rates[bare])
            print(f"attached {rates[attached]:.1f}, bare {rates[bare]:.1f} tokens/s", flush=True)
    return median(ratios)


async def main() -> None:
    model = demo_model()
    with TemporaryDirectory(prefix="infinilora-adapters-") as root:
        adapters = many_adapters(Path(root), model, count=4, rank=16, dtype=torch.bfloat16)
        ratios = [await one_pair(model, Path(root), adapters, is_turned=bool(pair % 2)) for pair in range(PAIRS)]
    report(
        "bench-attached",
        median(ratios),
        0.98,
        streams=STREAMS,
        pairs=PAIRS,
        rounds=ROUNDS,
        ratios=[round(r, 3) for r in ratios],
    )


if __name__ == "__main__":
    run(main())
