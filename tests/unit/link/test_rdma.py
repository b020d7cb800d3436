import gc
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from typing_extensions import override

from infinilora.link import rdma
from infinilora.link.engine_end import EngineEnd
from infinilora.link.errors import LinkClosed, LinkTimeout
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.link.rdma import Fabric
from infinilora.link.server_end import ServerEnd
from infinilora.protocol.errors import InvalidRequest, Unavailable
from support.links import Answering, random_rows, rule
from support.loopback_fabric import LoopbackTransport, loopback_fabric


def _settings(fabric: Fabric | None) -> LinkSettings:
    return LinkSettings(directory=None, num_buffers=2, buffer_bytes=4096, rdma=fabric)


def _opened(fabric: Fabric) -> tuple[EngineEnd, ServerEnd]:
    opener = Opener(_settings(fabric))
    opening = opener.choose(Offers(_settings(fabric)).wire)
    assert opening.chosen["backend"] == "rdma"
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(opening.wait, 5)
        engine = attach(opening.chosen, opening.secret, _settings(fabric))
        opener.close()
        return engine, server.result()


def test_an_opened_link_works_and_gives_its_memory_back() -> None:
    made: list[LoopbackTransport] = []
    whole = loopback_fabric()

    def make(region: torch.Tensor, staging: torch.Tensor) -> rdma.Transport:
        transport = whole.open(region, staging)
        assert isinstance(transport, LoopbackTransport)
        made.append(transport)
        return transport

    engine, server = _opened(Fabric(whole.device, make))
    serving = Answering(server)
    x, out = random_rows(3, 8), torch.zeros(3, 8)
    engine.send_plan(1, [])
    engine.wait(engine.submit(1, 0, 0, x, 8), out, deadline_s=10, add=True)
    torch.testing.assert_close(out, rule(0, 0, x, 8, None, None))
    engine.close()
    serving.join()
    del engine, server, serving
    gc.collect()
    assert [transport.is_closed for transport in made] == [True, True]


def test_a_server_without_a_fabric_chooses_tcp() -> None:
    opener = Opener(_settings(None))
    assert opener.choose(Offers(_settings(loopback_fabric())).wire).chosen["backend"] == "tcp"
    opener.close()


def test_a_choice_that_was_not_offered_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'rdma'; wanted one that was offered"):
        attach({"backend": "rdma"}, bytes(32), _settings(None))


def test_a_header_whose_payload_never_comes_is_a_timeout_and_nothing_is_added() -> None:
    transports: list[LoopbackTransport] = []
    known: dict[bytes, LoopbackTransport] = {}

    class Losing(LoopbackTransport):
        """Loses what the server sends: the second end of the link."""

        @override
        def put(self, at: int, peer_at: int, num_bytes: int, tag: int) -> None:
            if self is not transports[1]:
                super().put(at, peer_at, num_bytes, tag)

    def make(region: torch.Tensor, staging: torch.Tensor) -> rdma.Transport:
        transports.append(Losing(known, region, staging))
        return transports[-1]

    sizes = rdma.Sizes(num_buffers=2, buffer_bytes=4096)
    engine, server = _two_ends(Fabric(torch.device("cpu"), make), sizes)
    serving = Answering(server)
    y = torch.zeros(3, 8)
    engine.send_plan(1, [])
    with pytest.raises(LinkTimeout, match="the payload of message 0 did not come"):
        engine.wait(engine.submit(1, 0, 0, random_rows(3, 8), 8), y, deadline_s=0.2, add=True)
    assert not y.any()
    engine.quarantine()
    serving.join()


def _two_ends(fabric: Fabric, sizes: rdma.Sizes) -> tuple[EngineEnd, ServerEnd]:
    """The engine's transport is made first."""
    mine, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(rdma.engine_end, fabric, mine, sizes, timeout_s=5)
        mine_made = theirs.recv(1, socket.MSG_PEEK)
        assert mine_made
        server = rdma.server_end(fabric, theirs, sizes, timeout_s=5)
        return engine.result(), server


@pytest.mark.parametrize("card", [b"", b"\xff\xff\xff\x7f", b"\x20\x00\x00\x00short"])
def test_a_peer_that_does_not_introduce_itself_is_a_closed_link(card: bytes) -> None:
    mine, theirs = socket.socketpair()
    theirs.sendall(card)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosed):
        rdma.engine_end(loopback_fabric(), mine, rdma.Sizes(num_buffers=2, buffer_bytes=64), timeout_s=5)
    theirs.close()


def test_a_missing_nixl_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from infinilora.link.rdma_nixl import nixl_fabric

    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(Unavailable, match=r"no rdma link: the package nixl cannot be used .*pip install nixl"):
        nixl_fabric(torch.device("cpu"))


class CardGone(Exception):
    """As NIXL's errors: one class for each status code, with no base of their own."""


class Agent:
    """One of NIXL's, whose card is gone: what is named in `fails` raises."""

    backends = ("UCX",)
    plugin_list = ("UCX",)

    def __init__(self, *fails: str) -> None:
        self.fails = set(fails)

    def __getattr__(self, name: str) -> Callable[..., object]:
        def answer(*_: object) -> object:
            if name in self.fails:
                raise CardGone(name)
            return b"metadata" if name in ("get_agent_metadata", "add_remote_agent") else "DONE"

        return answer


def nixl_of(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """The fabric over a package whose agents are this one."""
    from infinilora.link.rdma_nixl import nixl_fabric

    package, api, bindings = (ModuleType(name) for name in ("nixl", "nixl._api", "nixl._bindings"))
    vars(api).update(nixl_agent=lambda *_: agent, nixl_agent_config=lambda **_: None)
    vars(bindings).update(nixlRemoteDisconnectError=CardGone, an_other=3)
    vars(package).update(_api=api, _bindings=bindings)
    for module in (package, api, bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return nixl_fabric(torch.device("cpu"))


@pytest.mark.parametrize(
    "fails", ["register_memory", "add_remote_agent", "initialize_xfer", "transfer", "check_remote_xfer_done"]
)
def test_whatever_nixl_raises_is_the_end_of_the_link_and_of_nothing_else(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent()
    fabric = nixl_of(agent, monkeypatch)
    sound = exchanged(fabric)
    agent.fails = {fails, "deregister_memory", "remove_remote_agent"}
    with pytest.raises(LinkClosed, match=f"the link broke: nixl: CardGone: {fails}"):
        exchanged(fabric)
    sound.close()


def exchanged(fabric: Fabric) -> rdma.Transport:
    """A transport to itself, after one message."""
    region, staging = torch.zeros(2, 64, dtype=torch.uint8)
    made = fabric.open(region, staging)
    made.connect(made.card)
    made.put(0, 0, 64, 8)
    assert made.has_come(8)
    return made
