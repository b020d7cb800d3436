"""The serving thread of a link and an engine's end of it, both in this process: `living` while a block lasts."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infinilora.kernels.batch import Part
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.engine_end import EngineEnd
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.lora_server.serve import LinkThread
from infinilora.pool.execute import Grants
from infinilora.protocol.adapter import Site
from infinilora.runtime.metrics import LoraServerMetrics, new_registry
from infinilora.runtime.telemetry import Telemetry
from support.pools import DefinedKernels

ROWS, COLS, WAIT_S = 4, 8, 5.0


class Link:
    """An engine's end and the thread that serves it; slot 1 in tenancy 7 adds 2 x the sum of a row."""

    def __init__(self, settings: LinkSettings, kernels: DefinedKernels | SlotKernels) -> None:
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self._opener = Opener(settings)
        with closing(Offers(settings)) as offers:
            opening = self._opener.choose(offers.wire)
            self.engine: EngineEnd = attach(opening.chosen, opening.secret, settings)
        self.kernels = kernels
        self.registry = new_registry()
        self.metrics = LoraServerMetrics(self.registry)
        part = Part(a=torch.ones(1, COLS), bt=torch.ones(1, COLS), scale=2.0, out_offset=0)
        self.kernels.bind(1, 0, Site.O, (part,), COLS, COLS)
        self.steps: list[list[int]] = []
        self.grants = Grants(lambda slots: self.steps.append(list(slots)))
        self.grants.grant(1, 7, 1)
        self.ended = threading.Event()
        self.deaths: list[BaseException] = []
        self.thread = LinkThread(
            opening.wait(WAIT_S),
            self.kernels,
            self.grants,
            name="link",
            traces=Telemetry(provider),
            metrics=self.metrics,
            on_end=self.ended.set,
            on_death=self.deaths.append,
        )
        self.thread.start()

    def call(
        self,
        step_id: int = 1,
        *,
        layer: int = 0,
        site: int = Site.O,
        out_slice: tuple[int, int] = (0, 0),
        in_slice: tuple[int, int] = (0, 0),
    ) -> torch.Tensor:
        out, x = torch.full((ROWS, COLS), torch.nan), torch.ones(ROWS, COLS)
        ticket = self.engine.submit(step_id, layer, site, x, COLS, out_slice=out_slice, in_slice=in_slice)
        self.engine.wait(ticket, out, deadline_s=WAIT_S, add=False)
        return out

    def close(self) -> None:
        self.thread.stop()
        self.engine.close()
        self._opener.close()


@contextmanager
def living(tmp_path: Path, kernels: DefinedKernels | SlotKernels, **settings: Any) -> Iterator[Link]:
    link = Link(LinkSettings(**{"directory": tmp_path} | settings), kernels)
    try:
        yield link
    finally:
        link.close()
        assert link.deaths == [], "the process would have ended"
