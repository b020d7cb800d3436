"""Free TCP ports of the loopback address, for servers that other processes must find again after a crash.

They are taken below the range that the kernel hands out to outgoing connections (32768 and up on Linux), so
that none of those sits on the port while its server starts again.
"""

import asyncio
import errno
import json
import random
import socket
import time
from pathlib import Path

from infinilora.protocol.errors import Conflict, Unavailable

HOST = "127.0.0.1"
LOWEST, HIGHEST = 11_000, 22_000
SHADOW = 10_000
"""SeaweedFS listens for gRPC this far above each of its ports, so both must be free."""
TRIES = 200
PATIENCE_S = 1.0


def free_ports(count: int) -> list[int]:
    """`count` different ports that are free now, and so are those SHADOW above them."""
    dice = random.SystemRandom()
    found: list[int] = []
    for _ in range(TRIES * count):
        port = dice.randrange(LOWEST, HIGHEST)
        if port not in found and is_free(port) and is_free(port + SHADOW):
            found.append(port)
            if len(found) == count:
                return found
    raise Unavailable(f"no {count} free ports between {LOWEST} and {HIGHEST} on {HOST}")


def kept_ports(file: Path, name: str, count: int) -> list[int]:
    """The ports that `name` had in the start before, if all are free, else new ones; written down in `file`.

    SeaweedFS names a part of its data after its port, and a person may have bookmarked one.
    """
    kept: dict[str, list[int]] = json.loads(file.read_text()) if file.is_file() else {}
    ports = kept.get(name, [])
    if len(ports) != count or not all(is_free(p) and is_free(p + SHADOW) for p in ports):
        ports = free_ports(count)
        file.write_text(json.dumps(kept | {name: ports}) + "\n")
    return ports


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
        return True


async def want(port: int) -> int:
    """`port`, or a free one for 0. Raises Conflict when it is taken, and stays so for a moment.

    After a kill -9 the kernel ends the gateway of the system before within that moment.
    """
    if port == 0:
        return free_ports(1)[0]
    deadline = time.perf_counter() + PATIENCE_S
    while not is_free(port):
        if time.perf_counter() > deadline:
            raise Conflict(
                f"port {port} on {HOST} is taken; stop what listens there, or choose another: --port (make up PORT=...)"
            )
        await asyncio.sleep(0.05)
    return port
