"""The gateway's socket."""

import socket

from infinilora.gateway.__main__ import _listen


def test_the_next_token_of_a_stream_does_not_wait_for_an_acknowledgement() -> None:
    with _listen("127.0.0.1:0") as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
