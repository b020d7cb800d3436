"""The published comparison, simulated: 16 GPUs, 512 adapters, Zipf 1.2, five models. Nothing of it is measured here.

    coupled         16 GPUs of engines; what the weights leave is shared by adapters and keys and values
    disaggregated    8 GPUs of engines with keys and values alone, 8 of one LoRA group of 4 x 2 shards

First tokens are decode-first tokens, as in the publication: prompts arrive prefilled.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from infinilora.planner.constants import FILE as SPEEDS_FILE
from infinilora.planner.constants import Constant, Constants, read_constants
from infinilora.planner.simulate.costs import BaseCost, Costs, DeltaCost, LoadCost
from infinilora.planner.simulate.fleet import Fleet
from infinilora.planner.simulate.load import Load
from infinilora.planner.simulate.outcome import Outcome, Slo
from infinilora.planner.simulate.run import serviceable_rate
from infinilora.planner.simulate.scenario import Way

FILE = Path(__file__).with_name("published.json")
NUMBER_BYTES = 2
ADAPTERS, ZIPF = 512, 1.2
WAYS = (Way("coupled", "load"), Way("coupled", "warm"), Way("coupled", "home"), Way("disaggregated", "warm"))
WARMUP = 0.25


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A base of experts: `gpus` of an engine, `width` of an expert, `active` parameters and `kv_bytes` of a token."""

    name: str
    gpus: int
    layers: int
    hidden_size: int
    width: int
    experts: int
    top_k: int
    rank: int
    weight_bytes: float
    active: float
    kv_bytes: int

    @property
    def adapter_bytes(self) -> int:
        """A and B of gate, up and down of every expert."""
        numbers = self.layers * self.experts * 3 * (self.hidden_size + self.width) * self.rank
        return numbers * NUMBER_BYTES

    @property
    def row_bytes(self) -> int:
        """On the wire for a token: x and the experts' activations out, two deltas each and a summed one back."""
        numbers = 2 * self.hidden_size + self.top_k * 3 * self.width
        return self.layers * numbers * NUMBER_BYTES


class House(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """published.json."""

    source: str
    gpus: int
    server_gpus: int
    expert_parallel: int
    layer_parallel: int
    gpu_bytes: Constant
    flops: Constant
    overhead_s: Constant
    hidden: Constant
    lora_share: Constant
    prompt: Constant
    output: Constant
    models: tuple[Model, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One model and way: the rate served within the SLO, over that of coupled:load where both are above 0."""

    model: str
    way: str
    slots: int
    rate: float
    gain: float | None
    outcome: Outcome | None


def read_house() -> House:
    return msgspec.json.decode(FILE.read_bytes(), type=House)


def fleet_of(house: House, model: Model, way: Way) -> Fleet:
    """Its memory shared out; engines of whole instances."""
    free_bytes = int(model.gpus * house.gpu_bytes.value - model.weight_bytes)
    is_coupled = way.mode == "coupled"
    lora_bytes = int(free_bytes * house.lora_share.value) if is_coupled else 0
    gpus = house.gpus - (0 if is_coupled else house.server_gpus)
    return Fleet(
        mode=way.mode,
        routing=way.routing,
        engines=gpus // model.gpus,
        max_running=256,
        step_tokens=2048,
        kv_tokens=min((free_bytes - lora_bytes) // model.kv_bytes, 1 << 26),
        engine_bytes=max(lora_bytes, 1),
        group_bytes=int(house.server_gpus * house.gpu_bytes.value),
        host_bytes=1 << 50,
        is_host_warm=True,
    )


def costs_of(house: House, model: Model, way: Way, speeds: Constants) -> Costs:
    """Rooflines of the published hardware; the formulas are in docs/decisions/0011-simulator.md."""

    def told(value: float) -> Constant:
        return Constant(value, house.source)

    memory, link = speeds.memory_bytes_per_s.value, speeds.link_bytes_per_s.value
    across, stages, calls = house.expert_parallel, house.layer_parallel, 2 * model.layers
    trip_s = 2 * (speeds.call_s.value + (across - 1) * speeds.peer_s.value)
    launch_s, row_s = speeds.launch_s.value, model.row_bytes / link
    loading_gpus = model.gpus if way.mode == "coupled" else house.server_gpus
    return Costs(
        name=f"{model.name}, {way.name}",
        is_measured=False,
        base=BaseCost(
            fixed_s=told(house.overhead_s.value + model.weight_bytes / (model.gpus * memory)),
            row_s=told(2 * model.active / (model.gpus * house.flops.value)),
            token_s=told(0.0),
            context_s=told(model.kv_bytes / (model.gpus * memory)),
            floor_s=told(0.0),
        ),
        local=DeltaCost(told(calls * launch_s), told(0.0), told(1 / (model.gpus * memory))),
        remote=DeltaCost(
            told(calls * (trip_s + launch_s)), told(row_s / min(model.gpus, across)), told(1 / (across * memory))
        ),
        service=DeltaCost(
            told(calls * launch_s / stages), told(row_s / (across * stages)), told(1 / (across * stages * memory))
        ),
        load=LoadCost(
            latency_s=told(0.002),
            store_bytes_per_s=speeds.store_bytes_per_s,
            host_bytes_per_s=told(loading_gpus * speeds.host_bytes_per_s.value),
            first_layer_share=told(1 / model.layers),
        ),
        read_share=told(model.top_k / model.experts),
        hidden=house.hidden,
        gateway_s=told(0.002),
        lease_s=told(0.001),
        wire_bytes_per_row=told(model.row_bytes),
    )


def published(
    *, num_requests: int, seed: int, models: frozenset[str] = frozenset(), tell: Callable[[Row], None] = lambda _: None
) -> list[Row]:
    """Search the rate of every model and way; each row is told as it is found."""
    house, speeds = read_house(), read_constants(SPEEDS_FILE)
    load = Load(
        rate=8.0,
        requests=num_requests,
        adapters=ADAPTERS,
        zipf=ZIPF,
        prompt=int(house.prompt.value),
        prompt_cv=1.0,
        output=int(house.output.value),
        output_cv=1.0,
        is_prefilled=True,
        warmup=WARMUP,
    )
    rows: list[Row] = []
    for model in house.models:
        if models and model.name not in models:
            continue
        first = 0.0
        for way in WAYS:
            fleet, costs = fleet_of(house, model, way), costs_of(house, model, way, speeds)
            sizes = [model.adapter_bytes] * ADAPTERS
            rate, outcome = serviceable_rate(fleet, costs, sizes, load, Slo(), seed=seed)
            first = rate if way == WAYS[0] else first
            pool_bytes = fleet.engine_bytes * fleet.engines if way.mode == "coupled" else fleet.group_bytes
            row = Row(
                model=model.name,
                way=way.name,
                slots=pool_bytes // model.adapter_bytes,
                rate=rate,
                gain=rate / first if first else None,
                outcome=outcome,
            )
            rows.append(row)
            tell(row)
    return rows
