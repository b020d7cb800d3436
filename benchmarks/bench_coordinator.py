"""A thousand members beat at one coordinator: what share of a core it takes to hear them and to lead.

A real coordinator process on real NATS and Redis. Beats come from another process, spread evenly over the interval as
they are where a thousand processes beat on their own: of a LoRA server one in ten (with so many adapters resident), the
rest engines. CPU seconds of the coordinator's process count, so that a neighbour does not; they are read once all
members are alive, and again some seconds later, when all must be alive still and nobody may have died.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from harness import report

from infinilora.protocol import subjects
from infinilora.protocol.control import Beat, EngineLoad, GroupLoad
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.bus import NatsBus

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.procs import NatsServer, Server, ValkeyServer, free_port

MAX_SHARE = 0.30
BASE = Fingerprint(digest_of(b"base"))
LORA_SERVERS = 10
"""One in so many."""
SETTLE_S = 60.0


def member(number: int, resident: int) -> Beat:
    """What one of them says. Digests are of the length that they have."""
    digests = tuple(digest_of(f"{number} {n}".encode()) for n in range(resident))
    if number % LORA_SERVERS == 0:
        load = GroupLoad(bytes_free=1, bytes_total=10**9, leases=4, resident=digests)
        return Beat(
            kind="lora-server", id=f"l{number}", incarnation="a", seq=0, state="ready", base=BASE, load=load,
            group=f"g{number}", address=f"10.0.0.{number % 250}:1",
        )  # fmt: skip
    engine = EngineLoad(running=9, waiting=1, kv_blocks_free=100, kv_blocks_total=200, digests=digests[:8])
    address = f"10.0.1.{number % 250}:1"
    return Beat(
        kind="engine", id=f"e{number}", incarnation="a", seq=0, state="ready", base=BASE, load=engine, address=address
    )


async def beat_for_ever(url: str, num_members: int, resident: int, interval_s: float) -> None:
    """The members' process: each beats once an interval, one after the other."""
    beats = [member(number, resident) for number in range(num_members)]
    slices, seq = 50, 0
    async with NatsBus(url, name="members") as bus:
        begin = time.monotonic()
        while True:
            seq += 1
            for part in range(slices):
                for beat in beats[part::slices]:
                    await bus.publish(subjects.heartbeat(beat.kind, beat.id), with_seq(beat, seq))
                due = begin + (seq - 1 + (part + 1) / slices) * interval_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))


def with_seq(beat: Beat, seq: int) -> Beat:
    return Beat(**{field: getattr(beat, field) for field in beat.__struct_fields__} | {"seq": seq})


@contextmanager
def running(server: Server) -> Iterator[None]:
    server.start()
    try:
        yield
    finally:
        server.kill()


@contextmanager
def process(*command: str, **settings: str) -> Iterator[int]:
    """A child that is ended with the block; its process id."""
    environment = {**os.environ, **{f"INFINILORA_{key}": value for key, value in settings.items()}}
    with subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.DEVNULL) as child:
        try:
            yield child.pid
        finally:
            child.kill()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def healths(port: int) -> list[str]:
    fleet: dict[str, Any] = httpx.get(f"http://127.0.0.1:{port}/v1/fleet", timeout=10, trust_env=False).json()
    is_wanted = fleet["is_leading"] and not fleet["is_frozen"]
    return [m["health"] for m in fleet["members"] if m["kind"] != "coordinator"] if is_wanted else []


def measure(options: argparse.Namespace) -> tuple[float, float]:
    """CPU seconds of the coordinator a second, and the seconds they were counted over."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats, valkey = NatsServer(home / "nats"), ValkeyServer(home / "valkey")
        stack.enter_context(running(nats))
        stack.enter_context(running(valkey))
        numbers = (options.members, options.resident, options.beat_ms)
        stack.enter_context(process(__file__, "--beat-at", nats.url, *flags(*numbers)))
        port = free_port()
        pid = stack.enter_context(
            process(
                "-m", "infinilora.coordinator", NATS_URL=nats.url, REDIS_URL=valkey.url, STORE_URL=f"file://{home}/s",
                LISTEN=f"127.0.0.1:{port}", COORDINATOR_ID="c1", BEAT_MS=str(options.beat_ms),
            )
        )  # fmt: skip
        wait_until_all_are_alive(port, options.members)
        cpu, begin = cpu_s(pid), time.monotonic()
        time.sleep(options.seconds)
        spent, took = cpu_s(pid) - cpu, time.monotonic() - begin
        found = healths(port)
        if len(found) != options.members or "dead" in found:
            raise SystemExit(f"of {options.members} members {len(found)} are known, {found.count('dead')} dead")
    return spent / took, took


def flags(members: int, resident: int, beat_ms: int) -> list[str]:
    return ["--members", str(members), "--resident", str(resident), "--beat-ms", str(beat_ms)]


def wait_until_all_are_alive(port: int, count: int) -> None:
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        time.sleep(0.5)
        try:
            if healths(port) == ["alive"] * count:
                return
        except httpx.HTTPError:
            continue
    raise SystemExit(f"not all of {count} members were alive within {SETTLE_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--resident", type=int, default=100, help="adapters that a LoRA server holds")
    parser.add_argument("--beat-ms", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--beat-at", default="", help="be the members' process, at this broker")
    options = parser.parse_args()
    if options.beat_at:
        asyncio.run(beat_for_ever(options.beat_at, options.members, options.resident, options.beat_ms / 1000))
        return
    shares = sorted(measure(options)[0] for _ in range(options.n))
    for share in shares:
        print(f"{options.members} members: {100 * share:5.1f} % of a core")
    report(
        "bench-coordinator",
        shares[len(shares) // 2],
        MAX_SHARE,
        met=shares[len(shares) // 2] <= MAX_SHARE,
        unit="share of one core, median; smaller is better",
        members=options.members,
        resident=options.resident,
        beat_ms=options.beat_ms,
        n=options.n,
        each=[round(share, 3) for share in shares],
    )


if __name__ == "__main__":
    main()
