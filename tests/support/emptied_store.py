"""A store that loses everything while somebody reads it."""

from typing_extensions import override

from infinilora.runtime.memory import MemoryStore


class Emptied(MemoryStore):
    """Is emptied once, in the middle of a reading."""

    is_due = False

    @override
    async def journal(self, key: str, after: int, limit: int) -> list[tuple[str, int]]:
        if self.is_due:
            self.is_due = False
            self.empty()
        return await super().journal(key, after, limit)
