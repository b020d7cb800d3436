"""docs/metrics.md: the tables of all metrics, made of `runtime/metrics.py`. `make docs` writes them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from infinilora.runtime import metrics
from support.tables import filled

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
GROUPS: dict[str, Callable[[CollectorRegistry], object]] = {
    "gateway and coordinator": metrics.ProcessMetrics,
    "gateway, engine and LoRA server": metrics.ObjectStoreMetrics,
    "gateway": metrics.GatewayMetrics,
    "engine": metrics.EngineMetrics,
    "LoRA server": metrics.LoraServerMetrics,
    "coordinator": metrics.CoordinatorMetrics,
}


class Shown(NamedTuple):
    """A metric as somebody finds it who asks Prometheus for it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    words: str


def shown(group: Callable[[CollectorRegistry], object]) -> Iterator[Shown]:
    """The metrics of a group, in the order in which the code makes them."""
    registry = metrics.new_registry()
    group(registry)
    for collector in registry._collector_to_names:
        for family in collector.collect():
            # A collector of ours says the labels with each family, Prometheus' own once and for all.
            labels = getattr(family, "_labelnames", ()) or getattr(collector, "_labelnames", ())
            suffix = "_total" if family.type == "counter" else ""
            yield Shown(family.name + suffix, family.type, tuple(labels), family.documentation)


def table(group: Callable[[CollectorRegistry], object]) -> str:
    lines = ["| metric | kind | labels | what it is |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {kind} | {' '.join(f'`{label}`' for label in labels)} | {words} |"
        for name, kind, labels, words in shown(group)
    ]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    return filled(text, {title: table(group) for title, group in GROUPS.items()})


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
