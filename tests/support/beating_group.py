"""A process that speaks as a LoRA server group and computes nothing: beats, and has what it is told to stage.

    python -m support.beating_group NATS_URL GROUP BASE BEAT_MS

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

    def __init__(self, name: str, base: Fingerprint) -> None:
        self._name = name
        self._base = base
        self._incarnation = secrets.token_hex(4)
        self._resident: set[Digest] = set()
        self._is_draining = False

    def beat(self) -> Beat:
        load = GroupLoad(bytes_free=BYTES, bytes_total=BYTES, resident=tuple(sorted(self._resident)))
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


async def main(url: str, name: str, base: str, beat_ms: str) -> None:
    group = Group(name, Fingerprint(base))
    async with NatsBus(url) as bus:
        await bus.serve(subjects.commands("lora-server", f"{name}-0"), Command, group.obey)
        await Heart(url, group.beat, interval_s=int(beat_ms) / 1000).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
