"""A loopback proxy before a real S3 server: it logs what is asked, and does to answers what a test tells it to.

    proxy.fault(Fault(status=503), times=2)       # the next two requests are answered by 503 and go no further
    proxy.fault(Fault(cut_after=100))             # 100 bytes of the answer's body, then the connection is closed
    with proxy.held(): ...                        # requests that match wait until the block ends

The Host header goes through unchanged, so that signatures hold.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from typing_extensions import override

HELD_S = 30.0
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@dataclass(frozen=True)
class Seen:
    """A request as it came, and the status that its sender was given (0: none)."""

    method: str
    path: str
    headers: dict[str, str]
    status: int


@dataclass(frozen=True)
class Fault:
    """What is done to a request of `method` whose path holds `path`; what is not set is left alone."""

    method: str = "GET"
    path: str = ""
    status: int | None = None
    """Answer this, with `body`, without asking the server."""
    body: str = ""
    content_type: str = "application/xml"
    cut_after: int | None = None
    """Bytes of the body that are sent before the connection is closed."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the answer that are replaced, Content-Length included."""

    def meets(self, method: str, path: str) -> bool:
        return self.method == method and self.path in path


class S3Proxy:
    """A server on a free port. `seen` is in the order in which requests were answered."""

    def __init__(self, upstream_port: int) -> None:
        self.seen: list[Seen] = []
        self._upstream_port = upstream_port
        self._lock = threading.Lock()
        self._faults: list[tuple[Fault, int]] = []
        self._holding: tuple[str, str, threading.Event] | None = None
        self.num_held = threading.Semaphore(0)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="s3-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def url(self, bucket: str) -> str:
        return f"s3://{bucket}?endpoint={self.endpoint}&region=us-east-1"

    def fault(self, fault: Fault, *, times: int = 1) -> None:
        with self._lock:
            self._faults.append((fault, times))

    @contextmanager
    def held(self, path: str = "", *, method: str = "GET") -> Iterator[None]:
        """Requests of `method` whose path holds `path` go no further within the block; `num_held` counts them."""
        event = threading.Event()
        self._holding = (method, path, event)
        try:
            yield
        finally:
            self._holding = None
            event.set()

    def asked(self, method: str, path: str = "") -> list[Seen]:
        with self._lock:
            return [seen for seen in self.seen if seen.method == method and path in seen.path]

    def wait_held(self) -> None:
        if not self.num_held.acquire(timeout=HELD_S):
            raise TimeoutError("no request came to be held")

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for at, (fault, times) in enumerate(self._faults):
                if fault.meets(method, path):
                    self._faults[at : at + 1] = [(fault, times - 1)] if times > 1 else []
                    return fault
        return None

    def wait_if_held(self, method: str, path: str) -> None:
        holding = self._holding
        if holding and method == holding[0] and holding[1] in path:
            self.num_held.release()
            holding[2].wait(HELD_S)

    def note(self, seen: Seen) -> None:
        with self._lock:
            self.seen.append(seen)

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self._upstream_port, timeout=HELD_S)
        try:
            link.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                link.putheader(name, value)
            link.endheaders(body)
            answer = link.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            link.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(proxy: S3Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            proxy.wait_if_held(self.command, self.path)
            fault = proxy.take_fault(self.command, self.path) or Fault()
            if fault.status is not None:
                status, headers, data = fault.status, {"Content-Type": fault.content_type}, fault.body.encode()
            else:
                status, headers, data = proxy.forward(self.command, self.path, asked, body)
            proxy.note(Seen(self.command, self.path, {k.lower(): v for k, v in asked.items()}, status))
            self._answer(fault, status, headers, data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - the library's names

        def _answer(self, fault: Fault, status: int, headers: dict[str, str], data: bytes) -> None:
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
            told = {"Content-Length": length, **{k: v for k, v in headers.items() if k.lower() not in _HOP_BY_HOP}}
            for name, value in fault.headers.items():
                told = {k: v for k, v in told.items() if k.lower() != name.lower()} | {name: value}
            self.send_response_only(status)
            for name, value in told.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data if fault.cut_after is None else data[: fault.cut_after])
            if fault.cut_after is not None or fault.headers:
                self.close_connection = True

        @override
        def log_message(self, format: str, *args: object) -> None:
            """The log is `seen`."""

    return Handler
