"""make bench-rank-split: when a rank-space split of expert LoRA would pay, by the bytes that it moves (decision 0007).

Nothing is timed: each line is how fast a link must not be, against the engine's memory, for a split to save time,
where a step's rows are dealt to so many adapters. A link of one host is memory itself, 1; NVLink beside HBM is 0.1.
"""

from harness import report

from infinilora.bench.rank_split import Experts, Step, break_even, kept_share, wire_bytes

MODELS = {
    "Qwen3-30B-A3B": Experts(width=2048, expert_width=768, num_experts=128, topk=8),
    "Mixtral-8x7B": Experts(width=4096, expert_width=14336, num_experts=8, topk=2),
}
RANKS = (16, 64)
STEPS = ((1, 1), (16, 16), (64, 64), (64, 8), (64, 1), (512, 8), (512, 1), (2048, 1))
NVLINK_OVER_HBM = 450e9 / 4e12
"""One way over NVLink 4, and what kernels reach of an H200's memory (its sheet says 4.8e12)."""
DECODE_ROWS = 64


def main() -> None:
    found: dict[str, float] = {}
    for name, experts in MODELS.items():
        for rank in RANKS:
            split, whole = wire_bytes(experts, rank), wire_bytes(experts, experts.expert_width)
            print(
                f"{name}, rank {rank}: {split} of {whole} bytes a token, {kept_share(experts):.0%} of an adapter kept"
            )
            for rows, adapters in STEPS:
                ratio = break_even(experts, Step(rows, adapters, rank))
                found[f"{name} rank {rank}, {rows} rows of {adapters}"] = round(ratio, 4)
                pays = "pays over NVLink" if ratio > NVLINK_OVER_HBM else "does not pay over NVLink"
                print(f"  {rows:5} rows of {adapters:2} adapters: below {ratio:.4f} of memory bandwidth; {pays}")
    most = max(break_even(MODELS["Qwen3-30B-A3B"], Step(DECODE_ROWS, a, 64)) for a in (8, 64))
    report(
        "bench-rank-split",
        most,
        NVLINK_OVER_HBM,
        met=most < NVLINK_OVER_HBM,
        unit="break-even link bandwidth over memory bandwidth, Qwen3, 64 decoding rows of 8 to 64 adapters, rank 64; "
        "met: over NVLink whole rows, the only way there is, are the better",
        cases=found,
    )


if __name__ == "__main__":
    main()
