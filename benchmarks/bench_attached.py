"""make bench-attached: base-only traffic with LoRA servers attached, over the same engine with no LoRA (law 5)."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import many_adapters
from harness import decode, demo_model, median, register, report, run, served

STREAMS, TOKENS, ROUNDS = 32, 96, 5


async def main() -> None:
    model = demo_model()
    ratios = []
    with TemporaryDirectory(prefix="infinilora-adapters-") as root:
        adapters = many_adapters(Path(root), model, count=4, rank=16, dtype=torch.bfloat16)
        async with (
            served(model, lora="remote", adapters=Path(root)) as attached,
            served(model, lora="none", adapters=Path(root)) as bare,
        ):
            await register(attached, adapters)
            await decode(attached, list(adapters), streams=4, tokens=8, seed=0)
            await decode(bare, ["base"], streams=4, tokens=8, seed=0)
            for turn in range(ROUNDS):
                order = [attached, bare] if turn % 2 else [bare, attached]
                rates = {s: await decode(s, ["base"], streams=STREAMS, tokens=TOKENS, seed=turn) for s in order}
                ratios.append(rates[attached] / rates[bare])
                print(f"attached {rates[attached]:.1f}, bare {rates[bare]:.1f} tokens/s", flush=True)
    report("bench-attached", median(ratios), 0.98, streams=STREAMS, rounds=ROUNDS, ratios=[round(r, 3) for r in ratios])


if __name__ == "__main__":
    run(main())
