"""What an engine offers a group after a link of theirs has failed."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.offers import GroupOffers
from infinilora.link.open import LinkSettings

MEMORY = cast("Any", object())
ALL = LinkSettings(directory=Path("/dev/shm"), cuda=MEMORY, rdma=MEMORY)
G = Group(name="g", address="a", incarnation="1")


@pytest.mark.parametrize(
    ("backend", "was_open", "wanted"),
    [
        ("rdma", False, replace(ALL, rdma=None)),
        ("rdma", True, replace(ALL, rdma=None)),
        ("cuda", False, replace(ALL, cuda=None)),
        ("cuda", True, ALL),
        ("shm", False, ALL),
        ("tcp", True, ALL),
    ],
)
def test_what_failed_is_not_offered_to_this_life_of_the_group(
    backend: str, was_open: bool, wanted: LinkSettings
) -> None:
    offers = GroupOffers(ALL)
    offers.failed(G, backend, "as the test wants it", was_open=was_open)
    assert offers.to(G) == wanted
    assert offers.to(replace(G, incarnation="2")) == ALL
    assert offers.to(replace(G, name="h")) == ALL


def test_both_may_have_failed() -> None:
    offers = GroupOffers(ALL)
    for backend in ("cuda", "rdma"):
        offers.failed(G, backend, "as the test wants it")
    assert offers.to(G) == replace(ALL, cuda=None, rdma=None)


def test_what_is_offered_alone_is_offered_again() -> None:
    alone = LinkSettings(directory=None, tcp_host=None, cuda=MEMORY)
    offers = GroupOffers(alone)
    offers.failed(G, "cuda", "as the test wants it")
    assert offers.to(G) == alone
