"""The site calls under way on a link that answers in order, whatever carries their payloads."""

from collections import deque

from infinilora.link.errors import LinkError
from infinilora.link.frame import Flag, Header
from infinilora.link.ports import Ticket


class Outstanding:
    """What is still to be sent, and what the server owes: oldest first; None where nobody waits for it any more.

    A chunk takes a buffer of each direction from `next_chunk` until its answer was taken: that is its credit.
    """

    def __init__(self, num_buffers: int) -> None:
        self._num_buffers = num_buffers
        self._queue: deque[Ticket] = deque()
        self._answers: deque[tuple[int, Ticket | None]] = deque()
        self._sequence = 0
        self.stale = 0

    def add(self, ticket: Ticket) -> None:
        self._queue.append(ticket)

    def next_chunk(self) -> tuple[Ticket, slice, Header] | None:
        """(ticket, its rows, their header) of the next chunk, if there is credit for it; now it counts as sent."""
        if not self._queue or len(self._answers) >= self._num_buffers:
            return None
        ticket = self._queue[0]
        start, rows = ticket.chunk(ticket.sent)
        header = ticket.chunk_header(ticket.sent, self._sequence, 0)
        self._answers.append((self._sequence, ticket))
        self._sequence += 1
        ticket.sent += 1
        if ticket.sent == ticket.chunks:
            self._queue.popleft()
        return ticket, slice(start, start + rows), header._replace(payload_bytes=site_bytes(header))

    def next_answer(self, ticket: Ticket) -> tuple[int, slice | None]:
        """(sequence, rows of the ticket) of the answer that comes next; no rows: it is stale, and counted."""
        sequence, owner = self._answers.popleft()
        if owner is None:
            self.stale += 1
            return sequence, None
        if owner is not ticket:
            raise LinkError("a site call was waited for before an earlier one")
        start, rows = ticket.chunk(ticket.received)
        ticket.received += 1
        return sequence, slice(start, start + rows)

    def number(self, count: int) -> range:
        """Sequences of calls that are sent, answered and taken outside of this object's sight."""
        first, self._sequence = self._sequence, self._sequence + count
        return range(first, self._sequence)

    def drop_stale(self) -> int:
        """Forget the answers that nobody waits for: how many are now to be taken and dropped, before any other."""
        count = sum(owner is None for _, owner in self._answers)
        for _ in range(count):
            self._answers.popleft()
        self.stale += count
        return count

    def abandon(self) -> None:
        self._answers = deque((sequence, None) for sequence, _ in self._answers)
        self._queue.clear()

    @property
    def in_flight(self) -> int:
        return len(self._answers)


def site_bytes(header: Header) -> int:
    """The payload of a SITE frame with these fields."""
    routed = bool(header.flags & Flag.HAS_IDS) + bool(header.flags & Flag.HAS_WEIGHTS)
    if not routed:
        return header.rows * header.row_bytes(header.in_cols)
    return header.ids_offset + routed * header.rows * header.topk * 4
