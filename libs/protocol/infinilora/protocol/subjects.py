"""Every NATS subject in one place. Pure string building; the tokens are checked by `ids.check_name`."""

from infinilora.protocol.control import ProcessKind

ADAPTER_EVENTS = "infinilora.events.adapter"
PLACEMENT_EVENTS = "infinilora.events.placement-change"
DEATHS = "infinilora.events.death"
TRAFFIC = "infinilora.events.traffic"
ADVICE = "infinilora.events.advice"
SLO_ALERTS = "infinilora.events.slo"
USAGE = "infinilora.usage"
USAGE_STREAM = "infinilora-usage"


def heartbeat(kind: ProcessKind, process_id: str) -> str:
    return f"infinilora.beat.{kind}.{process_id}"


def heartbeats(kind: ProcessKind | None = None) -> str:
    """The pattern for all beats, or for those of one kind."""
    return f"infinilora.beat.{kind or '*'}.*"


def commands(kind: ProcessKind, process_id: str) -> str:
    return f"infinilora.command.{kind}.{process_id}"


def admin(coordinator_id: str) -> str:
    """Where a coordinator takes an operator's acts that another has authenticated."""
    return f"infinilora.admin.{coordinator_id}"
