"""An rdma link between the services, on a loopback fabric, and what takes its place where a card fails."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor
from typing_extensions import override

from infinilora.engine.lora.interface import StepLost
from infinilora.engine.lora.remote import RemoteLora
from infinilora.link.errors import LinkClosed
from infinilora.protocol.errors import Unavailable
from support.every_site import Case, every_site, inputs, is_right, living, make_case, outputs, rows_of
from support.loopback_fabric import LoopbackTransport, Make, loopback_fabrics
from support.lora_inside import FIRST_LIFE, remote
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def absent(known: dict[bytes, LoopbackTransport], region: Tensor, staging: Tensor) -> LoopbackTransport:
    raise Unavailable("no rdma link: this card is not there")


class Foreign(LoopbackTransport):
    """Does not know the other's card."""

    @override
    def connect(self, card: bytes) -> None:
        raise LinkClosed("the card of the peer is of another network")


class Breaking(LoopbackTransport):
    """Says after some messages that the link is broken."""

    good = 5

    @override
    def put(self, at: int, peer_at: int, num_bytes: int, tag: int) -> None:
        if tag >= self.good:
            raise LinkClosed(f"the link broke: the write of message {tag} is ERR")
        super().put(at, peer_at, num_bytes, tag)


class Losing(Breaking):
    """Loses all but some messages, and says nothing."""

    @override
    def put(self, at: int, peer_at: int, num_bytes: int, tag: int) -> None:
        if tag < self.good:
            super().put(at, peer_at, num_bytes, tag)


async def check_every_site(case: Case, lora: RemoteLora) -> None:
    for (layer, site), y in (await every_site(lora, case)).items():
        is_right(case, layer, site, y)


async def lost_in(case: Case, lora: RemoteLora) -> int:
    """Steps through the sites until one of them loses its rows: how many site calls went well."""
    plan = lora.begin(await rows_of(lora, case))
    assert plan is not None
    done = 0
    try:
        for geometry in case.card.sites:
            x, routing = inputs(case, geometry.site, geometry.in_dim)
            ticket = lora.submit(plan, geometry.layer, geometry.site, x, routing)
            await asyncio.to_thread(lora.add, ticket, outputs(geometry.site, geometry.out_dim))
            done += ticket is not None
    except StepLost:
        return done
    finally:
        lora.end(plan)
        for packed in case.adapters:
            lora.drop(packed.digest)
    pytest.fail("no call was lost")


async def test_deltas_over_an_rdma_link_of_the_services_are_right(tmp_path: Path) -> None:
    case = make_case("qwen2_moe", tmp_path)
    fabrics = loopback_fabrics(LoopbackTransport, LoopbackTransport)
    async with living() as service, remote(case, service, "rdma", fabrics=fabrics) as lora:
        await check_every_site(case, lora)


@pytest.mark.parametrize(
    ("of_engine", "of_server", "why"),
    [
        (absent, LoopbackTransport, "this card is not there"),
        (LoopbackTransport, absent, "the rdma link was not opened"),
        (Foreign, LoopbackTransport, "of another network"),
        (LoopbackTransport, Foreign, "of another network"),
    ],
    ids=["the engine has no card", "the server has none", "the engine knows no way", "the server knows none"],
)
async def test_a_link_that_cannot_be_opened_is_opened_over_tcp(
    of_engine: Make, of_server: Make, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = make_case("llama", tmp_path)
    fabrics = loopback_fabrics(of_engine, of_server)
    async with living() as service, remote(case, service, "tcp", fabrics=fabrics) as lora:
        assert why in reason_of_falling_back(caplog)
        await check_every_site(case, lora)


@pytest.mark.parametrize("card", [Breaking, Losing], ids=["breaks", "loses"])
@pytest.mark.parametrize("fails", ["engine", "server"])
async def test_a_link_that_fails_later_is_opened_again_over_tcp(
    fails: str, card: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = make_case("llama", tmp_path)
    fabrics = loopback_fabrics(*(card if fails == end else LoopbackTransport for end in ("engine", "server")))
    async with living() as service, remote(case, service, "rdma", fabrics=fabrics) as lora:
        assert await lost_in(case, lora) > 0
        await eventually(lambda: lora.open_links == {"g": "tcp"}, "the link is open over tcp")
        assert reason_of_falling_back(caplog)
        await check_every_site(case, lora)


async def test_a_group_that_comes_back_is_offered_rdma_again(tmp_path: Path) -> None:
    case = make_case("llama", tmp_path)
    cards = [Foreign, LoopbackTransport]

    def repaired(known: dict[bytes, LoopbackTransport], region: Tensor, staging: Tensor) -> LoopbackTransport:
        return cards.pop(0)(known, region, staging)

    fabrics = loopback_fabrics(repaired, LoopbackTransport)
    async with living() as service, remote(case, service, "tcp", fabrics=fabrics) as lora:
        (group,) = lora._groups._known.values()
        for life, backend in ((FIRST_LIFE, "tcp"), ("j", "rdma")):
            lora.update_groups([replace(group, incarnation=life)])
            before = lora._groups._links["g"]
            before.die("the test has it so")
            await eventually(lambda: lora._groups._links.get("g") not in (None, before), "there is another link")  # noqa: B023
            assert lora.open_links == {"g": backend}
        await check_every_site(case, lora)


def reason_of_falling_back(caplog: pytest.LogCaptureFixture) -> str:
    said = [r for r in caplog.records if r.name.endswith("lora.offers") and r.levelno == logging.WARNING]
    assert len(said) == 1, [r.message for r in said]
    return str(vars(said[0])["reason"])
