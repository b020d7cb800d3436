"""The addresses that services listen on, `host:port`, of IPv4 or IPv6."""

import socket

from infinilora.protocol.errors import InvalidRequest, Unavailable

BACKLOG = 2048
MAX_PORT = 65_535


def parse_address(address: str) -> tuple[str, int]:
    """Host, without the brackets that an IPv6 one has, and port. InvalidRequest where it is none."""
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdecimal() and int(port) <= MAX_PORT
    if not host or not is_port or (":" in host and not is_bracketed):
        raise InvalidRequest(
            f"found {address!r}; wanted host:port, such as 127.0.0.1:7000 or [::1]:7000, the port from 0 to {MAX_PORT}"
        )
    return host.strip("[]"), int(port)


def listen_on(address: str) -> tuple[socket.socket, str]:
    """A socket that listens there, and its address with the port that it has (0 takes a free one).

    Raises InvalidRequest for what is no address, Unavailable where it cannot be bound.
    """
    host, port = parse_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Unavailable(f"cannot listen on {address}: {error}") from error
    # Connections have it from here: asyncio does not set it where the protocol was left to the kernel, and an answer in
    # two pieces, or the next token of a stream, would wait 40 ms for the acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener, f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
