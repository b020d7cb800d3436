"""The door of the `tcp` back-end: accepts the sockets of links, and gives each to whoever expects its secret."""

import hmac
import logging
import socket
import threading

from infinilora.link.errors import LinkTimeout
from infinilora.link.layout import SECRET_BYTES
from infinilora.link.tcp import tune

logger = logging.getLogger(__name__)

REST_S = 0.1
"""How long accepting rests when the process is out of descriptors or memory."""


class TcpListener:
    """Owns one thread, and one more for each connection that has not shown its secret yet.

    A connection that shows no expected secret within `opening_timeout_s` is closed.
    """

    def __init__(self, host: str, port: int, *, opening_timeout_s: float = 5.0) -> None:
        """OSError where that cannot be bound. An IPv6 wildcard takes IPv4 as well, where the machine can."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._sock = socket.create_server((host, port), family=family, dualstack_ipv6=is_dual)
        self.host, self.port = self._sock.getsockname()[:2]
        self._opening_timeout_s = opening_timeout_s
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._expected: dict[bytes, socket.socket | None] = {}
        self._thread = threading.Thread(target=self._accept, name="link-listener", daemon=True)
        self._thread.start()

    def expect(self, secret: bytes) -> None:
        with self._changed:
            self._expected[secret] = None

    def take(self, secret: bytes, timeout_s: float) -> socket.socket:
        """Wait for the socket that showed the secret; nobody else can show it afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: self._expected.get(secret) is not None, timeout_s)
            sock = self._expected.pop(secret, None)
        if sock is None:
            raise LinkTimeout(f"the engine did not open its link within {timeout_s:.1f} s")
        return sock

    def forget(self, secret: bytes) -> None:
        with self._changed:
            sock = self._expected.pop(secret, None)
        if sock is not None:
            sock.close()

    def close(self) -> None:
        """Stop accepting. Links already given out live on; a connection that nobody has taken ends."""
        self._closed.set()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        finally:
            self._sock.close()
        self._thread.join()
        with self._changed:
            untaken = [sock for sock in self._expected.values() if sock is not None]
            self._expected.clear()
        for sock in untaken:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if self._closed.wait(REST_S):
                    return
                logger.warning("link not accepted", extra={"reason": str(error)})
                continue
            opening = threading.Thread(target=self._admit, args=(sock,), name="link-opening", daemon=True)
            opening.start()

    def _admit(self, sock: socket.socket) -> None:
        sock.settimeout(self._opening_timeout_s)
        try:
            shown = _read_secret(sock)
            tune(sock)
        except OSError:
            sock.close()
            return
        with self._changed:
            for secret, taken in self._expected.items():
                if hmac.compare_digest(secret, shown) and taken is None:
                    self._expected[secret] = sock
                    self._changed.notify_all()
                    return
        sock.close()


def _read_secret(sock: socket.socket) -> bytes:
    shown = b""
    while len(shown) < SECRET_BYTES:
        part = sock.recv(SECRET_BYTES - len(shown))
        if not part:
            break
        shown += part
    return shown
