"""make bench-base: base-only decode throughput of one engine at 1, 8 and 32 streams, beside the machine's floor.

Each step reads every weight once and multiplies every row by it: the floor of a step is the weights' bytes over
measured bandwidth, or the multiply-adds over the measured peak, whichever takes longer. Greedy, SmolLM2-135M,
fp32, the engine's own step loop in this process (no HTTP): what the machine's cores do is all the engine's.
"""

import argparse
import time
from pathlib import Path

from harness import THREADS, demo_model, median, prompts, report

from infinilora.bench.floors import Machine, measure
from infinilora.engine.assemble import LoadedModel, ModelOptions, load_model, make_loop
from infinilora.engine.events import Event, Produced
from infinilora.engine.lora.none import NoLora
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.sequence import SamplingParams, Sequence

STREAMS = (1, 8, 32)
PROMPT, WARM, ROUNDS = 16, 8, 3
TARGET = 0.5


def decode_rate(model: LoadedModel, *, streams: int, tokens: int, seed: int) -> float:
    """Tokens per second of all streams together, from the first step in which all of them decode."""
    told: list[float] = []

    def hear(event: Event) -> None:
        if isinstance(event, Produced):
            told.append(time.perf_counter())

    loop = make_loop(model, NoLora(), Limits(max_running=streams, step_tokens=512))
    params = SamplingParams(max_tokens=WARM + tokens)
    for i, prompt in enumerate(prompts(streams, PROMPT, seed=seed)):
        loop.submit(Sequence(f"s{i}", prompt, len(prompt), params=params), hear)
    loop.start()
    while loop.load.running or loop.load.waiting or len(told) < streams * (WARM + tokens):
        time.sleep(0.02)
    loop.stop()
    loop.check_idle()
    return streams * tokens / (told[-1] - told[streams * WARM - 1])


def floor_rate(machine: Machine, parameters: int, *, streams: int) -> float:
    return streams / machine.floor_s(num_bytes=4 * parameters, flops=2 * parameters * streams)


def num_parameters(model: LoadedModel) -> int:
    """Weights read in a step: all matrices, the head (tied or not) among them."""
    spec = model.decoder.spec
    layer = spec.hidden_dim * (spec.qkv_dim + spec.q_dim + 3 * spec.mlp_dim)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_dim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model = load_model(ModelOptions(directory=args.model or demo_model(), threads=args.threads, max_model_len=1024))
    rows, worst = {}, 1e9
    machines: list[Machine] = []
    for streams in STREAMS:
        rates, floors, ratios = [], [], []
        for turn in range(ROUNDS):
            machines.append(measure(args.threads))  # in each round: a shared machine drifts
            rates.append(decode_rate(model, streams=streams, tokens=args.tokens, seed=turn))
            floors.append(floor_rate(machines[-1], num_parameters(model), streams=streams))
            ratios.append(rates[-1] / floors[-1])
        ratio = median(ratios)
        rows[streams] = {
            "tokens_per_s": round(median(rates), 1),
            "floor": round(median(floors), 1),
            "ratio": round(ratio, 3),
        }
        print(f"{streams:3} streams: {rows[streams]}", flush=True)
        worst = min(worst, ratio) if streams in (1, 32) else worst
    report(
        "bench-base",
        worst,
        TARGET,
        unit="decode throughput over the floor, the worse of 1 and 32 streams",
        streams=rows,
        threads=args.threads,
        gb_per_s=round(median([machine.read_bytes_per_s for machine in machines]) / 1e9, 1),
        gflop_per_s=round(median([machine.flops_per_s for machine in machines]) / 1e9, 1),
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
