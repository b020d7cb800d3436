"""A timeline of real steps: what it holds, and that it changes no number."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.events import Hooks
from infinilora.engine.model.cpu import CpuOps
from infinilora.engine.model.ops import TorchOps, Ungrouped
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.timeline import TimedLora, TimedOps, Timeline
from infinilora.protocol.ids import Digest
from support.engines import TestEngine, load_tiny
from support.oracle import ATTENTION
from support.plain_lora import PlainLora
from support.tiny_models import TinyModel


def inside(event: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    """Within one of them, but for the thousandths of a microsecond that times are rounded to."""
    slack = 0.01
    return any(
        step["ts"] - slack <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + slack
        for step in steps
    )


def tokens_of(model: LoadedModel, lora: Any, digest: Digest, hooks: Hooks) -> list[list[int]]:
    """Of a sequence with the adapter and one of the base, in the same steps."""
    engine = TestEngine(model, lora, limits=Limits(4, 16))
    engine.loop._hooks = hooks
    heard = [engine.ask([5, 6, 7], digest=digest, max_tokens=3), engine.ask([8, 9], max_tokens=3)]
    engine.run()
    return [told.tokens for told in heard]


def test_operations_and_site_calls_lie_within_their_steps(
    tiny: Callable[[str], TinyModel], adapter: Callable[..., Path], tmp_path: Path
) -> None:
    directory, file = tiny("llama").directory, adapter("llama", 4, ATTENTION, 71)
    timeline, model = Timeline(), load_tiny(directory)
    plain: Any = PlainLora(model.card)  # its tickets are its own
    wanted = tokens_of(model, plain, plain.register(file), Hooks())
    model, plain = load_tiny(directory, timeline=timeline), PlainLora(model.card)
    told = tokens_of(model, TimedLora(plain, timeline), plain.register(file), Hooks(on_step=timeline.step))
    timeline.write(tmp_path / "t.json")

    assert told == wanted
    events = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    of = {lane: [e for e in events if e["cat"] == lane] for lane in ("step", "kernels", "link")}
    layers, steps = model.decoder.spec.num_layers, 3
    assert [e["name"] for e in of["step"]] == ["0 decode, 5 prefill rows", *["2 decode, 0 prefill rows"] * 2]
    assert Counter(e["name"].split()[0] for e in of["link"]) == {
        "submit": 2 * layers * steps,
        "add": 2 * layers * steps,
    }
    kinds = Counter(e["name"].split()[0] for e in of["kernels"])
    assert kinds == {
        "linear": (4 * layers + 1) * steps,
        "norm": (2 * layers + 1) * steps,
        "rope": layers * steps,
        "attention": layers * steps,
        "silu_mul": layers * steps,
    }
    assert all(inside(e, of["step"]) for e in of["kernels"] + of["link"])
    assert min(e["ts"] for e in events) == 0


def test_a_product_of_all_experts_is_one_operation() -> None:
    timeline = Timeline()
    stacks = TimedOps(TorchOps(torch.device("cpu"), torch.float32), timeline).stacks(2, (3, 4))
    assert not isinstance(stacks, Ungrouped)
    stacks[0].weights.fill_(1)
    y = stacks[0](torch.ones(3, 4), torch.tensor([1, 3], dtype=torch.int32))
    assert torch.equal(y, torch.full((3, 3), 4.0))
    assert [(span.lane, span.name) for span in timeline._spans] == [("kernels", "linear 2x3x4")]
    assert isinstance(TimedOps(CpuOps(), timeline).stacks(2, (3, 4)), Ungrouped)


def test_no_more_is_kept_than_fits() -> None:
    timeline = Timeline(max_spans=3)
    for at in range(10):
        timeline.add("step", str(at), at, at + 1)
    assert [span.name for span in timeline._spans] == ["0", "1", "2"]
