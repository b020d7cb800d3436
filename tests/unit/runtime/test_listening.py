"""The socket of a service that streams."""

import socket

from infinilora.runtime.listening import listen_on


def test_the_next_token_of_a_stream_does_not_wait_for_an_acknowledgement() -> None:
    listener, _ = listen_on("127.0.0.1:0")
    with listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
