"""Adapters that change nothing: what is left where no step was taken, or where no gathered weights were saved.

They are served, for that is what the files say; their owner is told.
"""

from collections.abc import Iterable

from infinilora.protocol.adapter import AdapterWarning
from infinilora.weights.plan import PartPlan, SitePlan
from infinilora.weights.tensorfile import TensorFile


def idle_warning(file: TensorFile, sites: Iterable[SitePlan]) -> tuple[AdapterWarning, ...]:
    """A warning where every delta is zero. Reads no further than the first that is not."""
    if any(_moves(file, part) for site in sites for part in site.parts):
        return ()
    return (AdapterWarning(code="no_effect", text="changes nothing: every pair has an A, a B or a scale of zero"),)


def _moves(file: TensorFile, part: PartPlan) -> bool:
    if part.bias is not None or part.dora is not None:
        return True
    pairs = (pair for pair in part.pairs if pair is not None and part.entry.scale * pair.gain)
    return any(pair.bt.read(file).any() and pair.a.read(file).any() for pair in pairs)
