"""make bench-step: where the time of a decode step goes: kernels, link, exposed wait, Python, idle.

A system for each case, its engine with a timeline (engine/timeline.py), 32 streams and one: base alone, 16 adapters of
rank 16 in a LoRA server, the same with the halves of a step taking turns. What a case costs without a timeline is
measured first, so that the figures can be scaled to it.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import many_adapters
from harness import decode, demo_model, register, report, run, served

from infinilora.bench.timeline import Parts, parts_of, read

ADAPTERS, RANK, TOKENS = 16, 16, 48
CASES = {"base": ("none", "off"), "remote": ("remote", "off"), "remote in halves": ("remote", "on")}


async def profile(case: str, streams: int, model: Path, adapters: dict[str, Path], root: Path) -> Parts:
    """Parts of a step, on a system started for this alone."""
    lora, ping_pong = CASES[case]
    names = list(adapters) if lora != "none" else ["base"]
    env = {"INFINILORA_PING_PONG": ping_pong}
    with TemporaryDirectory(prefix="infinilora-profile-") as work:
        path = Path(work) / "timeline.json"
        for timeline in ({}, {"INFINILORA_TIMELINE": str(path)}):
            async with served(model, lora=lora, adapters=root, **env, **timeline) as stack:
                if lora != "none":
                    await register(stack, adapters)
                await decode(stack, names, streams=streams, tokens=8, seed=0)
                rate = await decode(stack, names, streams=streams, tokens=TOKENS, seed=1)
            said = "with a timeline" if timeline else "without"
            print(f"{case}, {streams} streams, {said}: {1e3 * streams / rate:.2f} ms a step", flush=True)
        parts = parts_of(read(path), decode_rows=streams)
    print(f"{case}, {streams} streams: " + ", ".join(f"{n} {ms:.2f} ms ({share:.0%})" for n, ms, share in parts.rows()))
    return parts


async def main() -> None:
    model = demo_model()
    found: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="infinilora-adapters-") as root:
        adapters = many_adapters(Path(root), model, count=ADAPTERS, rank=RANK, dtype=torch.bfloat16)
        for streams in (32, 1):
            for case in CASES:
                parts = await profile(case, streams, model, adapters, Path(root))
                found[f"{case}, {streams} streams"] = {name: round(ms, 2) for name, ms, _ in parts.rows()}
    remote = found["remote, 32 streams"]
    share = remote["exposed wait"] / remote["step"]
    report("bench-step", share, 0.1, met=share <= 0.1, unit="exposed wait over a step of 32 streams", ms=found)


if __name__ == "__main__":
    run(main())
