"""What the ports of `cuda` and `rdma` share: headers go over a control stream, beside payloads that go their own way.

Calls are answered in order. What carries a payload is the back-end's: `_send` on the engine's side, `recv` and `reply`
on the server's.
"""

from abc import ABC, abstractmethod

from infinilora.link.control import MAX_BODY_BYTES, ControlStream
from infinilora.link.errors import LinkClosed
from infinilora.link.frame import NO_TRACE, Header
from infinilora.link.layout import State
from infinilora.link.outstanding import Outstanding
from infinilora.link.ports import Program, Ticket
from infinilora.link.times import SiteTimes
from infinilora.protocol.errors import InvalidRequest


class EngineBeside(ABC):
    """The half of an EnginePort that knows no payload."""

    takes_in_order = True
    narrows = False

    def __init__(self, control: ControlStream, *, num_buffers: int, buffer_bytes: int) -> None:
        self._control = control
        self.buffer_bytes = buffer_bytes
        self._calls = Outstanding(num_buffers)
        self._trace = NO_TRACE

    def lay_out(self, ticket: Ticket) -> None:  # noqa: B027 - nothing is what is to be done
        """Nothing: views are cut as they are needed."""

    def submit(self, ticket: Ticket, step_id: int, layer: int) -> None:
        ticket.begin(step_id, layer, self._trace)
        self._calls.add(ticket)
        self._send()

    @abstractmethod
    def _send(self) -> None:
        """Send all that there is credit for. A broken link is told of by who waits."""

    def send_plan(self, header: Header, body: bytes, *, timeout_s: float) -> None:  # noqa: ARG002 - the stream has its own
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequest(f"a plan of {len(body)} bytes; at most {MAX_BODY_BYTES} fit a control frame")
        self._control.look()
        if not self.is_alive:
            raise LinkClosed("the link is closed")
        self._trace = header.trace
        self._control.send(header, body)

    def abandon(self) -> None:
        self._calls.abandon()

    def mark(self, state: State) -> None:
        self._control.mark(state)

    @property
    def is_alive(self) -> bool:
        return self._control.is_alive

    @property
    def in_flight(self) -> int:
        return self._calls.in_flight

    @property
    def stale(self) -> int:
        return self._calls.stale


class ServerBeside:
    """The half of a ServerPort that knows no payload. A refusal goes in words over the control stream."""

    def __init__(self, control: ControlStream, *, buffer_bytes: int) -> None:
        self._control = control
        self.buffer_bytes = buffer_bytes
        self._refusal = b""

    def use(self, program: Program, times: SiteTimes) -> bool:  # noqa: ARG002 - Python launches or carries these
        return False

    def write_reply(self, header: Header, body: bytes) -> None:  # noqa: ARG002 - it goes beside the payloads
        self._refusal = body

    def skip(self) -> None:
        """Nothing to give back: a plan is copied out of the control stream."""

    def mark(self, state: State) -> None:
        self._control.mark(state)

    @property
    def is_alive(self) -> bool:
        return self._control.is_alive

    @property
    def is_quarantined(self) -> bool:
        return self._control.peer_state == State.QUARANTINED
