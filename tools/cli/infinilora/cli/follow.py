"""Follows the coordinator's desired counts on this machine: the back-end `local` of scaling.

Level-triggered: what should be is read again and again, so nothing that is missed has to be remembered. While the
coordinator does not answer, all stays as it is. Nobody has this machine run more than whoever started the system
allowed, a count that is set by hand included: a slip of an operator's hand must not end the machine.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import httpx
import msgspec

from infinilora.cli.stack import Stack
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.scale import Desired

EVERY_S = 1.0
TIMEOUT_S = 2.0


class _Shown(msgspec.Struct):
    desired: tuple[Desired, ...] = ()


class Range(NamedTuple):
    """How many engines and groups this machine may be made to run: the least, and the most."""

    engines: tuple[int, int]
    groups: tuple[int, int]

    def settings(self) -> dict[str, str]:
        """What the coordinator is told."""
        (min_engines, max_engines), (min_groups, max_groups) = self
        limits = {
            "SCALER": "local",
            "MIN_ENGINES": min_engines,
            "MAX_ENGINES": max_engines,
            "MIN_GROUPS": min_groups,
            "MAX_GROUPS": max_groups,
        }
        return {f"INFINILORA_{name}": str(value) for name, value in limits.items()}


async def follow(
    stack: Stack, on_event: Callable[[str, str], None], *, within: Range, every_s: float = EVERY_S
) -> None:
    """Have the stack run as many engines and groups as there should be, at most the range. Runs for ever."""
    most_engines, most_groups = within.engines[1], within.groups[1]
    told: Desired | None = None
    while True:
        await asyncio.sleep(every_s)
        desired = await read(stack)
        if desired is None:
            continue
        if desired != told and (desired.engines > most_engines or desired.groups > most_groups):
            wanted = f"{desired.engines} engines and {desired.groups} groups are wanted"
            on_event("scaling", f"{wanted}; at most {most_engines} and {most_groups} run on this machine")
        told = desired
        try:
            await stack.set_engines(min(desired.engines, most_engines))
            await stack.set_groups(min(desired.groups, most_groups))
        except (InfiniLoraError, OSError) as error:  # no port, no process: what runs goes on, and it is tried again
            on_event("scaling", str(error))


async def read(stack: Stack) -> Desired | None:
    """What should be of the base that is served here; None while nobody says."""
    try:
        async with httpx.AsyncClient(base_url=stack.coordinator_url, timeout=TIMEOUT_S, trust_env=False) as http:
            answer = await http.get("/v1/scale")
        shown = msgspec.json.decode(answer.content, type=_Shown) if answer.is_success else _Shown()
    except (httpx.HTTPError, msgspec.MsgspecError):
        return None
    return next((one for one in shown.desired if one.model == stack.served_name), None)
