"""Whatever an engine asks of a link is answered or refused, or ends that link: never the process behind it."""

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from infinilora.kernels.batch import Part
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.errors import LinkClosed, LinkRefused
from infinilora.link.frame import DTYPES, Flag, Header, Kind, PlanSegment
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import InvalidRequest
from support.served_link import COLS, WAIT_S, Link, living

COLUMNS = (0, 1, 2, 6, COLS, 12, 16, 20, 40)
NUMBERS = (0, 1, 2, 3, 5, COLS, 2**31 - 1, 2**31, 2**32 - 1)
KINDS: dict[str, dict[str, Any]] = {"shm": {}, "tcp, narrow": {"directory": None, "narrowing": "always"}}


def bind_all(kernels: SlotKernels) -> None:
    """Some weights at every kind of site."""
    for site, (in_dim, out_dim) in {Site.DOWN: (16, COLS), Site.QKV: (COLS, 20), Site.EMBED: (30, COLS)}.items():
        part = Part(torch.ones(2, in_dim), torch.ones(2, out_dim), 1.0, 0)
        kernels.bind(1, 0, site, (part,), in_dim, out_dim)
    for site, (in_dim, out_dim) in {Site.MOE_GATE_UP: (COLS, 6), Site.MOE_DOWN: (6, COLS)}.items():
        part = Part(torch.ones(3, 2, in_dim), torch.ones(3, 2, out_dim), 1.0, 0)
        kernels.bind(1, 0, site, (part,), in_dim, out_dim)


def shape_of(dice: random.Random) -> Header:
    flags = dice.choice([0, 0, Flag.HAS_IDS, Flag.ROUTED, Flag.HAS_IDS | Flag.HAS_ROWS])
    first, last, begin, end = (dice.choice(NUMBERS) if dice.random() < 0.25 else 0 for _ in range(4))
    shape = Header(
        Kind.SITE,
        flags=flags,
        site=dice.randrange(len(Site) + 2),
        row_start=dice.choice(NUMBERS),
        rows=dice.randrange(1, 7),
        in_cols=dice.choice(COLUMNS),
        out_cols=dice.choice(COLUMNS),
        in_begin=first,
        in_end=last,
        out_begin=begin,
        out_end=end,
        topk=dice.randrange(1 + bool(flags & Flag.HAS_ROWS), 4) if flags else 0,
        dtype=dice.randrange(len(DTYPES)),
    )
    if dice.random() < 0.15:
        runs = [(dice.choice(NUMBERS), dice.choice(NUMBERS)) for _ in range(dice.randrange(2, 4))]
        return shape.asking(runs)._replace(out_cols=shape.out_cols)
    return shape


def ask(link: Link, dice: random.Random) -> None:
    """One strange call; the answer is not looked at."""
    shape, layer, number = shape_of(dice), dice.choice([0, 0, 0, 1, 5, 2**32 - 1]), dice.choice([-1, 0, 2, 3, 1 << 30])
    try:
        ticket = link.engine.prepare(shape)
    except InvalidRequest:
        return
    dtype = DTYPES[shape.dtype]
    x, out = torch.ones(shape.rows, shape.in_cols, dtype=dtype), torch.zeros(shape.rows, shape.out_cols, dtype=dtype)
    ids = torch.full((shape.rows, shape.topk), number, dtype=torch.int32) if shape.flags & Flag.HAS_IDS else None
    weights = torch.ones(shape.rows, shape.topk) if shape.flags & Flag.HAS_WEIGHTS else None
    link.engine.send_plan(1, [PlanSegment(1, 3, 1, 7)])
    link.engine.send(ticket, 1, layer, x, ids, weights)
    with contextlib.suppress(LinkRefused):
        link.engine.wait(ticket, out, deadline_s=WAIT_S, add=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strange_call_is_answered_or_refused_or_ends_its_link_alone(kind: str, tmp_path: Path) -> None:
    kernels = SlotKernels(num_slots=4, num_layers=2)
    bind_all(kernels)
    dice, num_ended = random.Random(11), 0
    for _ in range(20):
        with living(tmp_path, kernels, num_buffers=2, buffer_bytes=4096, **KINDS[kind]) as link:
            try:
                for _ in range(20):
                    ask(link, dice)
                link.engine.send_plan(1, [PlanSegment(1, 3, 1, 7)])
                assert link.call()[1, 0] == 16.0, "it serves on"
            except LinkClosed:
                num_ended += 1
    assert num_ended < 20
