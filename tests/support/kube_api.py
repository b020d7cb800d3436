"""A Kubernetes API of one namespace on loopback: the scale subresource as apps/v1 has it, and who may use it.

It answers as the real one does: 401 without the token, 404 of what is not there, 415 of a patch of no known type, a
count of 0 left out, and a resourceVersion that every change raises; 409 of a patch of another version than is there.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

NAMESPACE, TOKEN = "serving", "a-token"
PATCHES = ("application/merge-patch+json", "application/strategic-merge-patch+json")


@dataclass
class KubeApi:
    """`replicas` by `kind/name`; `asked`: method and path of every request."""

    replicas: dict[str, int]
    url: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    is_broken: bool = False
    version: int = 1
    after_read: Callable[[], None] | None = None
    """What somebody else does once a count has been read."""

    def write(self, target: str, replicas: int) -> None:
        self.replicas[target] = replicas
        self.version += 1

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        self.asked.append((method, path))
        if self.is_broken:
            return 503, status(503, "ServiceUnavailable")
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, status(401, "Unauthorized")
        prefix = f"/apis/apps/v1/namespaces/{NAMESPACE}/"
        target = path.removeprefix(prefix).removesuffix("/scale")
        if not path.startswith(prefix) or not path.endswith("/scale") or target not in self.replicas:
            return 404, status(404, "NotFound")
        if method == "PATCH":
            if headers.get("content-type") not in PATCHES:
                return 415, status(415, "UnsupportedMediaType")
            patch = json.loads(body)
            replicas, version = patch["spec"]["replicas"], patch.get("metadata", {}).get("resourceVersion")
            if not isinstance(replicas, int) or replicas < 0:
                return 422, status(422, "Invalid")
            if version not in (None, str(self.version)):
                return 409, status(409, "Conflict")
            self.write(target, replicas)
        told = self._scale(target)
        if method == "GET" and self.after_read is not None:
            self.after_read()
        return 200, told

    def _scale(self, target: str) -> dict[str, Any]:
        count = self.replicas[target]
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {
                "name": target.partition("/")[2],
                "namespace": NAMESPACE,
                "resourceVersion": str(self.version),
            },
            "spec": {"replicas": count} if count else {},
            "status": {"replicas": count, "selector": "app=infinilora"},
        }


def status(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}


@contextmanager
def a_kube_api(**replicas: int) -> Iterator[KubeApi]:
    """`engines=2` is the StatefulSet `engines` with two replicas."""
    api = KubeApi({f"statefulsets/{name}": count for name, count in replicas.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        do_PATCH = do_GET  # noqa: N815 - http.server's

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            code, told = api.answer(self.command, self.path, self.headers, body)
            raw = json.dumps(told).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        @override
        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
