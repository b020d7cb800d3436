"""make bench-peft: against transformers + PEFT mixed-batch generation, same model, adapters, prompts and cores.

The baseline is `model.generate(adapter_names=[...])` on one batch of 32 prompts with 16 adapters; its decode
throughput leaves the prefill out, as ours does.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import many_adapters
from harness import THREADS, decode, demo_model, median, prompts, register, report, run, served

STREAMS, ADAPTERS, RANK, TOKENS, PROMPT, ROUNDS = 32, 16, 16, 48, 16, 3


def baseline(model: str, root: str) -> None:
    """Runs in a process of its own: prints decode tokens per second of PEFT's mixed batch."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    names = sorted(p.name for p in Path(root).iterdir())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    peft = PeftModel.from_pretrained(base, f"{root}/{names[0]}", adapter_name=names[0])
    for name in names[1:]:
        peft.load_adapter(f"{root}/{name}", adapter_name=name)
    peft.eval()
    ids = torch.tensor(prompts(STREAMS, PROMPT, seed=1))
    rows = [names[i % len(names)] for i in range(STREAMS)]

    def generate(tokens: int) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            peft.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                adapter_names=rows,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - start

    generate(2)
    short, long = generate(1), generate(TOKENS + 1)
    print(json.dumps({"tokens_per_s": STREAMS * TOKENS / (long - short)}))


def run_baseline(model: Path, root: Path) -> float:
    done = subprocess.run(
        [sys.executable, __file__, str(model), str(root)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])


async def main() -> None:
    model = demo_model()
    ours, theirs = [], []
    with TemporaryDirectory(prefix="infinilora-adapters-") as root:
        adapters = many_adapters(Path(root), model, count=ADAPTERS, rank=RANK, dtype=torch.float32)
        async with served(model, lora="remote", adapters=Path(root)) as stack:
            await register(stack, adapters)
            await decode(stack, list(adapters), streams=STREAMS, tokens=8, seed=0)
            for turn in range(ROUNDS):
                ours.append(
                    await decode(stack, list(adapters), streams=STREAMS, tokens=TOKENS, seed=turn + 1, prompt=PROMPT)
                )
                theirs.append(run_baseline(model, Path(root)))
                print(f"ours {ours[-1]:.1f}, transformers + PEFT {theirs[-1]:.1f} tokens/s", flush=True)
    report(
        "bench-peft",
        median([a / b for a, b in zip(ours, theirs, strict=True)]),
        5.0,
        unit="decode throughput over transformers + PEFT mixed batch",
        ours=round(median(ours), 1),
        peft=round(median(theirs), 1),
        streams=STREAMS,
        adapters=ADAPTERS,
        rank=RANK,
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        baseline(sys.argv[1], sys.argv[2])
    else:
        run(main())
