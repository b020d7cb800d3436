"""Ports that are free now, and the same ones again at the next start."""

import asyncio
import socket
from pathlib import Path

import pytest

from infinilora.cli import ports
from infinilora.protocol.errors import Conflict


def test_ports_are_different_and_lie_below_those_of_outgoing_connections() -> None:
    found = ports.free_ports(8)
    assert len(set(found)) == 8
    assert all(port + ports.SHADOW < 32_768 for port in found)


def test_a_program_gets_the_ports_it_had(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    first = ports.kept_ports(file, "store", 4)
    other = ports.kept_ports(file, "nats", 1)
    assert ports.kept_ports(file, "store", 4) == first
    assert ports.kept_ports(file, "nats", 1) == other


def test_a_port_that_was_taken_meanwhile_is_not_used_again(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    (port,) = ports.kept_ports(file, "nats", 1)
    with socket.socket() as other:
        other.bind((ports.HOST, port))
        other.listen()
        assert ports.kept_ports(file, "nats", 1) != [port]


async def test_a_taken_port_is_refused_with_a_way_out() -> None:
    with socket.socket() as other:
        other.bind((ports.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(Conflict, match=f"port {port} .* is taken; .*--port"):
            await ports.want(port)
    assert await ports.want(port) == port


async def test_a_port_whose_holder_is_just_dying_is_waited_for() -> None:
    with socket.socket() as other:
        other.bind((ports.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        asyncio.get_running_loop().call_later(0.2, other.close)
        assert await ports.want(port) == port
