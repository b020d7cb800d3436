"""make bench-cold: first token of a cold adapter on an idle system, over a warm one: at most 150 ms more.

Every prompt is new, so that no prefix cache answers; each adapter is cold exactly once.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import many_adapters
from harness import ROOT, demo_model, median, one, prompts, register, report, run, served

COLD, PROMPT = 12, 32


async def main() -> None:
    model = demo_model()
    cold, warm, demo = [], [], {}
    with TemporaryDirectory(prefix="infinilora-adapters-") as root:
        adapters = many_adapters(Path(root), model, count=COLD, rank=16, dtype=torch.bfloat16)
        roots = Path(f"{root}:{ROOT / 'examples' / 'adapters'}")
        fresh = iter(prompts(4 * COLD + 16, PROMPT, seed=3))
        async with served(model, lora="remote", adapters=roots) as stack:
            shipped = {n: ROOT / "examples" / "adapters" / n for n in ("json", "pirate")}
            await register(stack, adapters | shipped)
            await one(stack, "base", next(fresh))
            for name in adapters:
                cold.append(1e3 * (await one(stack, name, next(fresh))).ttft_s)
                warm += [1e3 * (await one(stack, name, next(fresh))).ttft_s for _ in range(2)]
            for name in shipped:
                first = 1e3 * (await one(stack, name, next(fresh))).ttft_s
                then = median([1e3 * (await one(stack, name, next(fresh))).ttft_s for _ in range(3)])
                demo[name] = {"cold_ms": round(first, 1), "warm_ms": round(then, 1)}
    print(f"cold {[round(c) for c in cold]} ms\nwarm {[round(w) for w in warm]} ms\ndemo {demo}", flush=True)
    extra = max(d["cold_ms"] - d["warm_ms"] for d in demo.values())
    report(
        "bench-cold",
        extra,
        150,
        met=extra <= 150,
        unit="ms of TTFT, cold minus warm, worst demo adapter",
        demo=demo,
        random_rank16_cold_ms=round(median(cold), 1),
        random_rank16_warm_ms=round(median(warm), 1),
        n=COLD,
    )


if __name__ == "__main__":
    run(main())
