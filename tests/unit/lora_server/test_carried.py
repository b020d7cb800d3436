"""A device's kernels behind a link of the host: rows go there, and an answer leaves when its delta has come back."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from infinilora.kernels.batch import Part
from infinilora.link.engine_end import EngineEnd
from infinilora.link.frame import PlanSegment
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.lora_server.carried import CarryingKernels
from infinilora.lora_server.serve import LinkThread
from infinilora.pool.execute import Grants
from infinilora.protocol.adapter import Site
from infinilora.runtime.telemetry import Telemetry
from support.late_device import LateDevice, LateKernels
from support.procs import wait_until

ROWS, COLS, WAIT_S = 4, 8, 10.0


class SeeingKernels(LateKernels):
    """Fails a call that is given memory of the host."""

    @override
    def dense(self, layer: int, site: int, segments: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        if not (self._device.holds(x) and self._device.holds(out)):
            raise ValueError("host memory came to a device's kernels")
        super().dense(layer, site, segments, x, out, accumulate=accumulate)


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def engine(device: LateDevice, tmp_path: Path) -> Iterator[EngineEnd]:
    """An engine's end; slot 1 in tenancy 7 adds twice the sum of a row, on the device."""
    kernels = SeeingKernels(device)
    part = Part(a=torch.ones(1, COLS), bt=torch.ones(1, COLS), scale=2.0, out_offset=0)
    kernels.bind(1, 0, Site.O, (part,), COLS, COLS)
    settings = LinkSettings(directory=tmp_path)
    with closing(Offers(settings)) as offers:
        opening = Opener(settings).choose(offers.wire)
        end = attach(opening.chosen, opening.secret, settings)
    grants, deaths = Grants(device=device), list[BaseException]()
    grants.grant(1, 7, 1)
    thread = LinkThread(
        opening.wait(WAIT_S),
        CarryingKernels(kernels, device),
        grants,
        name="link",
        traces=Telemetry(),
        metrics=None,
        on_end=lambda: None,
        on_death=deaths.append,
    )
    thread.start()
    yield end
    device.run()
    thread.stop()
    end.close()
    assert not deaths


def test_rows_of_a_host_are_carried_and_answered_when_the_device_has_run(engine: EngineEnd, device: LateDevice) -> None:
    engine.send_plan(1, [PlanSegment(1, 2, 1, 7)])
    out = torch.full((ROWS, COLS), torch.nan)
    ticket = engine.submit(1, 0, Site.O, torch.ones(ROWS, COLS), COLS)
    waiting = threading.Thread(target=lambda: engine.wait(ticket, out, deadline_s=WAIT_S, add=False))
    waiting.start()
    wait_until(lambda: any(stream.launched for stream in device.own), "the call to be launched, on its link's stream")
    assert out.isnan().all()
    assert not device.launches.launched, "a link's launches hold up no other's"
    device.run()
    waiting.join(WAIT_S)
    assert out[:, 0].tolist() == [0.0, 16.0, 16.0, 0.0]
