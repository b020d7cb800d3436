"""A process that speaks as a LoRA server group and computes nothing: beats, and has what it is told to stage.

    python -m support.beating_group NATS_URL GROUP BASE BEAT_MS ROWS_PER_S

To be killed and stopped by tests of the control plane, which sees nothing else of a LoRA server.
"""

import asyncio
import secrets
import sys

from infinilora.protocol import subjects
from infinilora.protocol.control import Beat, Command, CommandReply, Drain, Evict, Forget, GroupLoad, Pin, Stage
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.members import Heart

BYTES = 1_000_000


class Group:
    """What it holds, and whether it takes work."""

    def __init__(self, name: str, base: Fingerprint, rows_per_s: float) -> None:
        self._name = name
        self._base = base
        self._rows_per_s = rows_per_s
        self._incarnation = secrets.token_hex(4)
        self._resident: set[Digest] = set()
        self._is_draining = False

    def beat(self) -> Beat:
        resident = tuple(sorted(self._resident))
        load = GroupLoad(bytes_free=BYTES, bytes_total=BYTES, resident=resident, rows_per_s=self._rows_per_s)
        return Beat(
            kind="lora-server",
            id=f"{self._name}-0",
            incarnation=self._incarnation,
            seq=0,
            state="draining" if self._is_draining else "ready",
            base=self._base,
            group=self._name,
            load=load,
        )

    async def obey(self, command: Command) -> CommandReply:
        match command.body:
            case Stage(digest=digest):
                self._resident.add(digest)
            case Evict(digest=digest) | Forget(digest=digest):
                self._resident.discard(digest)
            case Drain(draining=draining):
                self._is_draining = draining
            case Pin():
                pass
        return CommandReply(command_id=command.command_id)


async def main(url: str, name: str, base: str, beat_ms: str, rows_per_s: str) -> None:
    group = Group(name, Fingerprint(base), float(rows_per_s))
    async with NatsBus(url) as bus:
        await bus.serve(subjects.commands("lora-server", f"{name}-0"), Command, group.obey)
        await Heart(url, group.beat, interval_s=int(beat_ms) / 1000).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
