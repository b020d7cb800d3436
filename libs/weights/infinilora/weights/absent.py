"""What a configuration targets and the files hold nothing for. It adds nothing; a layer of it is refused.

Only what every generation of PEFT would have trained counts, and nothing at all where the weights decide.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from infinilora.protocol.adapter import AdapterWarning, BaseCard, PartGeometry, Site, SiteGeometry
from infinilora.protocol.ingest import PlanRow
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.names import FileNames, parameters_of
from infinilora.weights.refuse import invalid, listed
from infinilora.weights.rules import LoraRules

OUTER_SITES = frozenset({Site.EMBED, Site.LM_HEAD})
_EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a configuration says should be in a file that spells its modules as `names`."""

    rules: LoraRules
    names: FileNames

    def absent(self, card: BaseCard, found: Mapping[tuple[int, Site, int], Set[int]]) -> tuple[PlanRow, ...]:
        """A row for each projection that is targeted and not found; experts of a layer in one."""
        return tuple(
            row
            for site in card.sites
            for number, part in enumerate(site.parts)
            for row in self._rows(site, part, found.get((site.layer, site.site, number), frozenset()))
        )

    def _rows(self, site: SiteGeometry, part: PartGeometry, found: Set[int]) -> Iterator[PlanRow]:
        blocks = [block for block in range(site.num_experts or 1) if block not in found]
        spellings = self.names.spellings(part.module)
        missing = [block for block in blocks if self._is_targeted(spellings, block)]
        if missing:
            of_experts = f" for experts {listed(missing)} of {site.num_experts}" if site.num_experts else ""
            yield PlanRow(
                site=site.site.label,
                module=part.module,
                layer=site.layer,
                experts=len(missing) if site.num_experts else 0,
                verdict="absent",
                reason=f"targeted by {CONFIG_FILE}, without tensors{of_experts}",
            )

    def _is_targeted(self, spellings: tuple[str, ...], block: int) -> bool:
        names = [name.replace(_EXPERT, str(block)) for name in spellings]
        if any(self.rules.excludes(name) for name in names):
            return False
        if any(self.rules.surely_targets(name) for name in names):
            return True
        return any(self.rules.names_parameter(stack) for name in spellings for stack in parameters_of(name))


def refuse_empty_layers(file: str, absent: tuple[PlanRow, ...], found: Iterable[tuple[int, Site, int]]) -> None:
    """Raise AdapterInvalid where a layer is targeted and there is nothing for it: half an adapter was saved.

    Embedding and head are of no layer, whatever number they are kept under.
    """
    present = {layer for layer, site, _ in found if site not in OUTER_SITES}
    outer = {site.label for site in OUTER_SITES}
    within = [row for row in absent if row.site not in outer]
    layers = sorted({row.layer for row in within} - present)
    if layers:
        first = next(row.module for row in within if row.layer == layers[0])
        raise invalid(
            file,
            f"layers {listed(layers)}",
            found="no tensors at all",
            wanted=f"some in each layer that {CONFIG_FILE} targets (by {first} and others)",
        )


def warning_of(absent: tuple[PlanRow, ...]) -> tuple[AdapterWarning, ...]:
    """One warning for all of them, or none."""
    if not absent:
        return ()
    modules = [row.module + (f" ({row.experts} experts)" if row.experts else "") for row in absent]
    count = sum(row.experts or 1 for row in absent)
    text = f"{count} targeted modules have no tensors and add nothing: {listed(modules)}"
    return (AdapterWarning(code="modules_absent", text=text, count=count),)
