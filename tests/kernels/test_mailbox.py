"""Messages from mailbox to mailbox on one stream: every payload, every slot, and launches that are replayed."""

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from support.links import random_rows

if TYPE_CHECKING:
    from infinilora.kernels.mailbox import Mailbox

F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32
NUM_BUFFERS, BUFFER_BYTES = 3, 4096


class Pair:
    """Two ends in one process, and what keeps their memory."""

    def __init__(self, device: str, *, limit_ns: int = 1_000_000_000) -> None:
        from infinilora.kernels import mailbox

        size = mailbox.region_bytes(NUM_BUFFERS, BUFFER_BYTES)
        self.regions = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self.notes = [torch.zeros(mailbox.NUM_NOTES, dtype=torch.int64) for _ in range(2)]
        if device != "cpu":
            self.notes = [notes.pin_memory() for notes in self.notes]
        self.a, self.b = (self._end(mailbox.Mailbox, i, device, limit_ns) for i in (0, 1))

    def _end(self, kind: "type[Mailbox]", i: int, device: str, limit_ns: int) -> "Mailbox":
        sent, taken = (torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2))
        mine, peer = self.regions[i].data_ptr(), self.regions[1 - i].data_ptr()
        return kind(
            region=mine,
            peer=peer,
            num_buffers=NUM_BUFFERS,
            buffer_bytes=BUFFER_BYTES,
            sent=sent,
            taken=taken,
            notes=self.notes[i].data_ptr(),
            limit_ns=limit_ns,
            num_programs=3,
        )

    def noted(self) -> list[int]:
        if self.regions[0].device.type == "cuda":
            torch.cuda.synchronize()
        return [value for notes in self.notes for value in notes.tolist()]


@pytest.mark.parametrize(("wire", "held"), [(F32, F32), (BF16, BF16), (F16, F16), (I32, I32), (BF16, F32)])
def test_a_payload_arrives_as_it_was_sent(device: str, wire: torch.dtype, held: torch.dtype) -> None:
    pair = Pair(device)
    for rows, cols in ((1, 1), (3, 100), (0, 5), (2, 7), (5, 64)):
        x = (random_rows(rows, cols + 3, seed=rows) * 100).to(wire).to(device)[:, 1:-2]
        out = torch.full((rows, cols + 4), 7, dtype=held, device=device)
        pair.a.push(x)
        pair.b.take(out[:, 2:-2], wire, add=False)
        assert torch.equal(out[:, 2:-2], x.to(held))
        assert bool((out[:, :2] == 7).all() and (out[:, -2:] == 7).all())
    assert not any(pair.noted())


def test_a_payload_is_added_in_fp32(device: str) -> None:
    pair, x, y = Pair(device), random_rows(3, 20).to(device), random_rows(3, 20, seed=1).to(device)
    wanted = y + x
    pair.b.push(x)
    pair.a.take(y, F32, add=True)
    assert torch.equal(y, wanted)


def test_a_sender_waits_for_room_and_says_when_there_is_none(device: str) -> None:
    pair, x = Pair(device, limit_ns=1_000_000), random_rows(2, 8).to(device)
    for _ in range(NUM_BUFFERS):
        pair.a.push(x)
    assert not any(pair.noted())
    before = pair.regions[1].clone()
    pair.a.push(x + 1)
    assert pair.noted() == [NUM_BUFFERS + 1, 0, 0, 0, 0, 0]
    assert torch.equal(pair.regions[1], before), "what found no room was written all the same"


def test_after_a_fault_nothing_is_waited_for_or_published(device: str) -> None:
    """The payload that comes too late is not joined: who waited has given the step up."""
    pair, x, y = Pair(device, limit_ns=1_000_000), random_rows(2, 8).to(device), torch.zeros(2, 8, device=device)
    pair.b.take(y, F32, add=True)
    pair.a.push(x)
    pair.a.push(x)
    pair.b.take(y, F32, add=True)
    credit = pair.regions[0][:8].view(torch.int64)
    assert pair.noted() == [0, 0, 0, 1, 0, 0]
    assert not y.any()
    assert int(credit[0]) == 0, "a slot was given back by an end that has failed"


def test_an_end_whose_peer_sent_nothing_does_not_wait_for_room_there_either(device: str) -> None:
    """A step at a server that hangs costs one wait, not one for each direction."""
    pair, x, y = Pair(device), random_rows(2, 8).to(device), torch.zeros(2, 8, device=device)
    pair.a.take(y, F32, add=True, limit_ns=1_000_000)
    patient = dataclasses.replace(pair.a, limit_ns=1 << 62)
    for _ in range(NUM_BUFFERS + 1):
        patient.push(x)
    assert pair.noted() == [1, 0, 0, 0, 0, 0]
    assert not pair.regions[1].any(), "a payload was published by an end that has failed"


def test_an_answer_with_anothers_tag_is_not_taken(device: str) -> None:
    pair, x, y = Pair(device), random_rows(2, 8).to(device), torch.zeros(2, 8, device=device)
    pair.a.push(x, tag=0)
    pair.a.push(x, tag=2)
    pair.b.take(y, F32, add=False)
    pair.b.take(y, F32, add=True)
    assert torch.equal(y, x)
    assert pair.noted() == [0, 0, 0, 0, 0, 2]


def test_a_status_is_noted_and_the_next_message_is_taken(device: str) -> None:
    pair, x, y = Pair(device), random_rows(2, 8).to(device), torch.zeros(2, 8, device=device)
    pair.a.push(x[:, :0], status=1)
    pair.a.push(x)
    pair.b.take(y, F32, add=True)
    assert not y.any()
    pair.b.take(y, F32, add=True)
    assert torch.equal(y, x)
    assert pair.noted() == [0, 0, 0, 0, 1, 0]


@pytest.mark.gpu
def test_a_captured_graph_sends_the_next_message_each_time() -> None:
    pair, x, y = Pair("cuda"), random_rows(4, 64).cuda(), torch.zeros(4, 64, device="cuda")

    def exchange() -> None:
        pair.a.push(x)
        pair.b.take(y, F32, add=True)

    exchange()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange()
    wanted: Tensor = y.clone()
    for step in range(3 * NUM_BUFFERS):
        x.copy_(random_rows(4, 64, seed=step))
        graph.replay()
        wanted += x
        assert torch.equal(y, wanted)
    assert not any(pair.noted())
