"""The `cuda` link between two processes: on a GPU where there is one, else its kernels interpreted on shared memory."""

import json
import os
import signal as signals
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import Tensor

from support import links
from support.links import REFUSED_LAYER, rule

if TYPE_CHECKING:
    from infinilora.link.cuda import CudaEngineEnd
    from infinilora.link.ports import Ticket

pytestmark = pytest.mark.timeout(240)

SERVER = Path(__file__).parents[1] / "support" / "cuda_link_server.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIGNALS = ("device", "host")
SILENT_LAYER = 98
LONG_S = 60.0


def random_rows(rows: int, cols: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return links.random_rows(rows, cols, seed, dtype).to(DEVICE)


def zeros(rows: int, cols: int) -> Tensor:
    return torch.zeros(rows, cols, device=DEVICE)


class Linked:
    """An engine's end, and the process that serves it."""

    def __init__(self, directory: Path, signal: str, num_buffers: int, buffer_bytes: int) -> None:
        from infinilora.link.cuda_driver import Regions
        from infinilora.link.open import LinkSettings, Offers, attach
        from support.loopback_memory import memory_of

        self.regions = Regions(memory_of(directory, has_mps=signal == "device"))
        settings = LinkSettings(directory=None, cuda=self.regions)
        sizes = [str(num_buffers), str(buffer_bytes)]
        self.server = subprocess.Popen(
            [sys.executable, str(SERVER), str(directory), *sizes, signal, json.dumps(Offers(settings).wire)],
            env=os.environ | {"PYTHONPATH": str(SERVER.parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.server.stdout is not None
        self.said = self.server.stdout
        told = json.loads(self.said.readline())
        assert (told["chosen"]["backend"], told["chosen"]["signal"]) == ("cuda", signal)
        self.end = cast("CudaEngineEnd", attach(told["chosen"], bytes.fromhex(told["secret"]), settings))


@contextmanager
def linked(
    directory: Path, signal: str = "device", *, num_buffers: int = 3, buffer_bytes: int = 2048
) -> Iterator[Linked]:
    link = Linked(directory, signal, num_buffers, buffer_bytes)
    try:
        yield link
    finally:
        if hasattr(link, "end"):
            link.end.close()
        link.server.wait(30)
        link.said.close()


def finish(link: Linked, tickets: Sequence["Ticket"], y: Tensor, deadline_s: float = LONG_S) -> None:
    """The end of a step: all that was sent joins y, and counts."""
    for ticket in tickets:
        link.end.wait(ticket, y, deadline_s=deadline_s, add=True)
    link.end.verify()


@pytest.mark.parametrize("signal", SIGNALS)
def test_deltas_join_whatever_is_there_call_after_call(signal: str, tmp_path: Path) -> None:
    """More calls than there are buffers, of chunks and of one row, so that every slot is used again."""
    with linked(tmp_path, signal) as link:
        for step, rows in enumerate((1, 20, 7)):
            link.end.send_plan(step, [])
            for layer in range(2):
                x, y = random_rows(rows, 40, seed=step), random_rows(rows, 24, seed=9)
                wanted = y + rule(layer, 2, x, 24, None, None)
                finish(link, [link.end.submit(step, layer, 2, x, 24)], y)
                torch.testing.assert_close(y, wanted)
        assert (link.end.num_outstanding, link.end.in_flight, link.end.stale) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_weights_of_strided_rows_arrive_with_them(dtype: torch.dtype, tmp_path: Path) -> None:
    ids = torch.randint(0, 8, (9, 5), generator=torch.Generator().manual_seed(3)).to(DEVICE)[:, 1:4]
    weights, x = random_rows(9, 3, seed=4), random_rows(9, 33, seed=1, dtype=dtype)[:, 4:28]
    out = torch.full((9, 15), float("nan"), dtype=dtype, device=DEVICE)
    with linked(tmp_path) as link:
        link.end.send_plan(1, [])
        ticket = link.end.submit(1, 4, 5, x, 15, topk_ids=ids, topk_weights=weights)
        link.end.wait(ticket, out, deadline_s=LONG_S, add=False)
        link.end.verify()
    assert torch.equal(out, rule(4, 5, x, 15, ids, weights).to(dtype))


def test_calls_that_are_waited_for_in_the_other_order_join_their_own_rows(tmp_path: Path) -> None:
    with linked(tmp_path) as link:
        link.end.send_plan(1, [])
        x = random_rows(8, 40)
        first, second = (link.end.submit(1, layer, 0, x, 40) for layer in (1, 2))
        late, early = zeros(8, 40), zeros(8, 40)
        link.end.wait(second, late, deadline_s=LONG_S, add=True)
        link.end.wait(first, early, deadline_s=LONG_S, add=True)
        link.end.verify()
    torch.testing.assert_close(early, rule(1, 0, x, 40, None, None))
    torch.testing.assert_close(late, rule(2, 0, x, 40, None, None))


def test_answers_to_an_abandoned_step_join_nothing_of_the_next(tmp_path: Path) -> None:
    with linked(tmp_path) as link:
        link.end.send_plan(1, [])
        link.end.submit(1, 1, 0, random_rows(30, 40), 24)
        sent = link.end.in_flight
        link.end.send_plan(2, [])
        x, y = random_rows(5, 40, seed=2), zeros(5, 24)
        finish(link, [link.end.submit(2, 2, 0, x, 24)], y)
        assert 0 < sent == link.end.stale
    torch.testing.assert_close(y, rule(2, 0, x, 24, None, None))


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_refused_call_adds_nothing_and_is_told_and_the_link_goes_on(signal: str, tmp_path: Path) -> None:
    from infinilora.link.errors import LinkRefused

    x, y = random_rows(20, 40), zeros(20, 24)

    def call(link: Linked, layer: int) -> None:
        link.end.send_plan(layer, [])
        finish(link, [link.end.submit(layer, layer, 0, x, 24)], y)

    with linked(tmp_path, signal) as link:
        with pytest.raises(LinkRefused, match=f"layer {REFUSED_LAYER} is refused"):
            call(link, REFUSED_LAYER)
        assert not y.any()
        call(link, 1)
    torch.testing.assert_close(y, rule(1, 0, x, 24, None, None))


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_missed_deadline_is_an_error_of_the_step_and_later_waits_do_not_wait(signal: str, tmp_path: Path) -> None:
    from infinilora.link.errors import LinkTimeout

    x, y = random_rows(4, 40), zeros(4, 24)
    with linked(tmp_path, signal) as link:
        link.end.send_plan(1, [])
        tickets = [link.end.submit(1, layer, 0, x, 24) for layer in (SILENT_LAYER, SILENT_LAYER)]
        with pytest.raises(LinkTimeout, match="did not"):
            finish(link, tickets, y, 0.05)
        assert not y.any()
        link.end.quarantine()
        assert not link.end.is_alive
        assert link.server.wait(30) == 0
        assert link.said.read() == "the peer closed the link True\n"


@pytest.mark.parametrize("signal", SIGNALS)
def test_an_answer_to_another_call_is_never_joined(signal: str, tmp_path: Path) -> None:
    """The server leaves one call out and answers the next: without the tag that answer would be the first's."""
    from infinilora.link.errors import LinkError

    x, y = random_rows(4, 40), zeros(4, 24)
    with linked(tmp_path, signal) as link:
        link.end.send_plan(1, [])
        tickets = [link.end.submit(1, layer, 0, x, 24) for layer in (SILENT_LAYER, 1)]
        with pytest.raises(LinkError, match="does not belong"):
            finish(link, tickets, y)
        assert not y.any()


def test_a_server_that_dies_is_an_error_and_its_memory_and_ours_are_given_back(tmp_path: Path) -> None:
    from infinilora.link.errors import LinkClosed, LinkTimeout

    with linked(tmp_path) as link:
        link.server.kill()
        link.server.wait(10)
        y = zeros(4, 24)

        def step() -> None:
            link.end.send_plan(1, [])
            finish(link, [link.end.submit(1, 1, 0, random_rows(4, 40), 24)], y, 0.05)

        with pytest.raises((LinkTimeout, LinkClosed)):
            step()
        assert not y.any()
        del link.end
    link.regions.reap()
    assert link.regions.num_parked == 0


def test_memory_is_kept_until_the_peer_has_let_go_of_it(tmp_path: Path) -> None:
    with linked(tmp_path) as link:
        link.end.send_plan(1, [])
        link.server.send_signal(signals.SIGSTOP)
        link.end.close()
        del link.end
        assert link.regions.num_parked == 1
        link.server.send_signal(signals.SIGCONT)
        assert link.server.wait(30) == 0
        link.regions.reap()
        assert link.regions.num_parked == 0


class Graph:
    """A CUDA graph of the link's launches where there is no device: kept as they are made, run at each replay."""

    def __init__(self, link: Linked) -> None:
        self._port = link.end._cuda
        self._mailbox = self._port._mailbox
        self._launches: list[Callable[[], None]] = []

    def push(self, *tensors: Tensor | None, **more: int) -> None:
        self._launches.append(lambda: self._mailbox.push(*tensors, **more))  # type: ignore[arg-type]

    def take(self, out: Tensor, wire: torch.dtype, **more: int) -> None:
        self._launches.append(lambda: self._mailbox.take(out, wire, **more))  # type: ignore[arg-type]

    def __enter__(self) -> None:
        self._port._mailbox = self  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        self._port._mailbox = self._mailbox

    def replay(self) -> None:
        for launch in self._launches:
            launch()


@contextmanager
def graph_of(link: Linked) -> Iterator["Graph | torch.cuda.CUDAGraph"]:
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph
    else:
        emulated = Graph(link)
        with emulated:
            yield emulated


def test_a_captured_step_is_replayed_with_new_rows(tmp_path: Path) -> None:
    x, ys = random_rows(20, 40), [zeros(20, 24) for _ in range(2)]
    with linked(tmp_path) as link:
        link.end.send_plan(0, [])
        finish(link, [link.end.submit(0, 4, 0, x, 24)], zeros(20, 24))
        link.end.submit(0, 5, 0, x, 24)  # abandoned: its answers are still to come
        link.end.send_plan(1, [])
        with graph_of(link) as graph, link.end.capture() as headers:
            for layer, y in enumerate(ys):
                link.end.wait(link.end.submit(1, layer, 0, x, 24), y, deadline_s=LONG_S, add=True)
        assert len(headers) > 3, "more chunks than there are buffers"
        for step in range(2, 4):
            x.copy_(random_rows(20, 40, seed=step))
            wanted = [y + rule(layer, 0, x, 24, None, None) for layer, y in enumerate(ys)]
            link.end.send_plan(step, [])
            link.end.announce(headers, step)
            graph.replay()
            link.end.verify()
            torch.testing.assert_close(ys, wanted)
        y = zeros(3, 24)
        link.end.send_plan(9, [])
        finish(link, [link.end.submit(9, 7, 0, x[:3], 24)], y)
        torch.testing.assert_close(y, rule(7, 0, x[:3], 24, None, None))


def test_a_captured_call_that_nobody_waits_for_is_refused(tmp_path: Path) -> None:
    from infinilora.protocol.errors import Internal

    with linked(tmp_path) as link:
        link.end.send_plan(1, [])
        wanted = pytest.raises(Internal, match="1 captured site calls were never waited for")
        with wanted, link.end.capture(), Graph(link):
            link.end.submit(1, 1, 0, random_rows(3, 40), 24)
        link.end.abandon()
