"""From the step thread to the asyncio loop: each sequence's events, delivered once a step in one wake-up."""

import asyncio

from infinilora.engine.events import Event, Sink

Mailbox = asyncio.Queue[Event]


class Mailboxes:
    """Collects what sinks are told during a step; `flush` hands it all over. Made on the asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: list[tuple[Mailbox, Event]] = []

    def open(self) -> tuple[Mailbox, Sink]:
        """A mailbox to read on the loop, and its sink for the step thread."""
        mailbox: Mailbox = asyncio.Queue()
        return mailbox, lambda event: self._told.append((mailbox, event))

    def flush(self) -> None:
        """For the step thread, after each round."""
        if self._told and not self._loop.is_closed():
            told, self._told = self._told, []
            self._loop.call_soon_threadsafe(_deliver, told)


def _deliver(told: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in told:
        mailbox.put_nowait(event)
