"""The planner's door: everything a person can say, as it was said, to a plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from infinilora.coordinator.provision.fleet import Goal
from infinilora.planner.constants import FILE, Tier, read_constants
from infinilora.planner.picture import check_picture, line_of, write_picture
from infinilora.planner.plan import Means, Plan, make_plan
from infinilora.planner.workload import Law, Served, by_file, by_law, number_bytes_of, ranks_of, targets_of
from infinilora.protocol.errors import InvalidRequest

OPTIONS = {"ttft_s": "slo-ttft", "tpot_s": "slo-tpot"}
"""Where the policy's word is not the option's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The options of `infinilora plan`. Either `workload`, or the six before it."""

    model: str = ""
    adapters: int = 0
    zipf: float = 1.2
    rate: float = 0.0
    residence: float = 0.0
    rank: str = ""
    workload: Path | None = None
    targets: str = "all"
    dtype: str = "BF16"
    slo_ttft: float = 0.25
    slo_tpot: float = 0.1
    iar: float = 0.95
    margin: float = 0.1
    gpu_bytes: float = 80e9
    gpu_price: float = 0.0
    engines: int = 0
    spare_groups: int = 0
    cold_from: str = "host"
    constants: Path | None = None
    picture: Path | None = None


def answer(wish: Wish) -> Plan:
    """Plan, and draw if asked to. InvalidRequest names the option, what was found and what was wanted."""
    try:
        return _answer(wish)
    except InvalidRequest as error:
        if error.param is None:
            raise
        option = OPTIONS.get(error.param, error.param).replace("_", "-")
        raise InvalidRequest(f"--{option}: {error.message}", param=error.param) from None


def _answer(wish: Wish) -> Plan:
    if wish.picture:
        check_picture(wish.picture)
    goal = Goal(wish.iar, wish.slo_ttft, wish.slo_tpot, wish.margin)
    means = Means(wish.gpu_bytes, wish.engines, wish.spare_groups, wish.gpu_price, _tier(wish.cold_from))
    served = _served(wish)
    plan = make_plan(served, goal, means, read_constants(wish.constants or FILE))
    if wish.picture:
        lines = [line_of(one, base) for one, base in zip(served, plan.bases, strict=True)]
        write_picture(wish.picture, lines, wish.iar)
    return plan


def _served(wish: Wish) -> list[Served]:
    targets, number_bytes = targets_of(wish.targets), number_bytes_of(wish.dtype)
    if wish.workload:
        for name in ("model", "adapters", "rate", "residence", "rank"):
            if getattr(wish, name):
                raise InvalidRequest(f"found --{name} beside it; wanted one or the other", param="workload")
        return by_file(wish.workload, targets=targets, number_bytes=number_bytes)
    law = Law(wish.model, wish.adapters, wish.zipf, wish.rate, wish.residence, ranks_of(wish.rank))
    return [by_law(law, targets=targets, number_bytes=number_bytes)]


def _tier(text: str) -> Tier:
    for tier in get_args(Tier):
        if text == tier:
            found: Tier = tier
            return found
    raise InvalidRequest(f"found {text!r}; wanted {' or '.join(get_args(Tier))}", param="cold_from")
