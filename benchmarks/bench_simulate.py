"""make bench-simulate: requests per minute of wall time that the simulator plays, on one core.

512 adapters, Zipf 1.2, 40 requests a second that run for about six seconds: the example of `infinilora plan`. Each mode
in turn; the value is the slowest mode's median.
"""

import argparse
import os
import time

from harness import median, report

from infinilora.planner.constants import FILE, read_constants
from infinilora.planner.simulate.load import Load, requests_of
from infinilora.planner.simulate.outcome import Slo
from infinilora.planner.simulate.published import costs_of, fleet_of, read_house
from infinilora.planner.simulate.run import simulate
from infinilora.planner.simulate.scenario import Way

ADAPTERS, TARGET = 512, 200_000.0
WAYS = (Way("coupled", "load"), Way("coupled", "home"), Way("disaggregated", "warm"))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    house, speeds = read_house(), read_constants(FILE)
    model = next(m for m in house.models if m.name == "mixtral-8x7b")
    load = Load(rate=40.0, requests=chosen.requests, adapters=ADAPTERS, prompt=128, output=200, output_cv=0.5)
    requests, sizes = requests_of(load, 1), [model.adapter_bytes] * ADAPTERS
    rates: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for _ in range(chosen.rounds + 1):  # the first warms up
        for way in WAYS:
            fleet, costs = fleet_of(house, model, way), costs_of(house, model, way, speeds)
            start = time.perf_counter()
            simulate(fleet, costs, sizes, requests, Slo())
            rates[way.name].append(chosen.requests / (time.perf_counter() - start) * 60)
    medians = {name: median(found[1:]) for name, found in rates.items()}
    for name, found in medians.items():
        print(f"{name}: {found:,.0f} requests a minute", flush=True)
    report(
        "bench-simulate",
        min(medians.values()),
        TARGET,
        unit="simulated requests per minute of wall time, the slowest of three ways",
        adapters=ADAPTERS,
        requests=chosen.requests,
        by_way={name: round(found) for name, found in medians.items()},
        load_average=[round(value, 2) for value in os.getloadavg()],
        n=chosen.rounds,
    )


if __name__ == "__main__":
    main()
