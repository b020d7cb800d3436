"""Commands of the leader to single processes, and what became of each."""

import logging
from uuid import uuid4

from infinilora.coordinator.leader import Leadership
from infinilora.protocol import subjects
from infinilora.protocol.control import Command, CommandReply, Drain, Evict, Forget, Pin, Stage
from infinilora.protocol.errors import InfiniLoraError, StaleEpoch
from infinilora.runtime.bus import Bus
from infinilora.runtime.membership import Member
from infinilora.runtime.metrics import CoordinatorMetrics

logger = logging.getLogger(__name__)

COMMAND_S = 2.0
TAKEN = "taken"


class Orders:
    """Gives them. A process that has heard a younger leader deposes this one."""

    def __init__(self, bus: Bus, leadership: Leadership, metrics: CoordinatorMetrics) -> None:
        self._bus = bus
        self._leadership = leadership
        self._metrics = metrics

    async def give(self, member: Member, body: Stage | Evict | Forget | Pin | Drain, epoch: int) -> str:
        """`TAKEN`, or the code of the error that came instead."""
        command = Command(command_id=uuid4().hex, epoch=epoch, body=body)
        outcome = TAKEN
        try:
            subject = subjects.commands(member.beat.kind, member.beat.id)
            reply = await self._bus.request(subject, command, CommandReply, timeout_s=COMMAND_S)
            outcome = reply.error.code if reply.error else TAKEN
        except InfiniLoraError as error:
            outcome = error.code
            if isinstance(error, StaleEpoch):
                await self._leadership.deposed()
        name, adapter_id = type(body).__name__.lower(), None if isinstance(body, Drain) else body.digest
        self._metrics.commands.labels(body=name, outcome=outcome).inc()
        logger.info(
            "command",
            extra={"body": name, "to": member.beat.id, "adapter_id": adapter_id, "outcome": outcome},
        )
        return outcome
