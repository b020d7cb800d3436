"""Messages over a socket between two processes of one engine: a length, then msgpack. Its end is the peer's death."""

import contextlib
import socket
import struct
import threading

import msgspec

from infinilora.engine.shards.messages import Order, Report

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end. `send` from any thread, `recv` from one. Closed by whoever holds it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Order | Report)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Order | Report) -> None:
        """Raises OSError where the peer is gone."""
        data = self._encoder.encode(message)
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def recv(self) -> Order | Report | None:
        """The next message; None when the peer is gone."""
        head = self._read(_LENGTH.size)
        data = None if head is None else self._read(_LENGTH.unpack(head)[0])
        return None if data is None else self._decoder.decode(data)

    def close(self) -> None:
        """End it for both, and wake a `recv` of this end."""
        with contextlib.suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray | None:
        data = bytearray(num_bytes)
        view, at = memoryview(data), 0
        while at < num_bytes:
            try:
                got = self._socket.recv_into(view[at:])
            except OSError:  # reset, or closed here
                return None
            if not got:
                return None
            at += got
        return data
