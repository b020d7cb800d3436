"""LoRA on experts as three-dimensional tensors, one plane for each expert, as trainers outside PEFT write it.

    A [E, r, in]   B [E, out, r]       a plane for each expert
    A [1, r, in]   or [r, in]          shared by all experts ("shared outer"); B likewise
    A [E, in, r]   B [E, r, out]       turned: told by the shapes of both, refused where they fit both ways

The module is a parameter of the experts' container (`mlp.experts.gate_up_proj`, `mlp.experts.w1`), or one of
Mixtral's three beside its router (`block_sparse_moe.w1`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from infinilora.weights.joined import JOINS, used_ranks
from infinilora.weights.keys import Halves
from infinilora.weights.names import ExpertParts, ModuleIndex
from infinilora.weights.plan import Pair
from infinilora.weights.refuse import invalid
from infinilora.weights.tensorfile import TensorFile

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_CONTAINER = "experts"
_PLANES = 3


@dataclass(frozen=True, slots=True)
class Stacked:
    """A parameter of all experts of a site: its parts, the names of its projections, its container."""

    experts: ExpertParts
    container: str
    leaves: tuple[str, ...]

    @property
    def num_experts(self) -> int:
        return self.experts.geometry.num_experts

    @property
    def out_dim(self) -> int:
        return sum(self.experts.geometry.parts[part].out_dim for part in self.experts.parts)

    def names(self) -> tuple[str, ...]:
        """The projections of the experts one by one, under which a configuration may target them."""
        return tuple(f"{self.container}.{e}.{leaf}" for e in range(self.num_experts) for leaf in self.leaves)

    def established(self, file: TensorFile, halves: Halves, rank: int) -> Halves:
        """The halves, with the way they lie told by their shapes. Raises AdapterInvalid where these do not tell."""
        shapes = file.tensors[halves.a].shape, file.tensors[halves.b].shape
        ways = [
            way for way in (halves._replace(turned=False), halves._replace(turned=True)) if self._fit(way, shapes, rank)
        ]
        if len(ways) == 1:
            return ways[0]
        in_dim, num = self.experts.geometry.in_dim, self.num_experts
        what = "fit a stacked expert layout both ways" if ways else "fit no stacked expert layout"
        raise invalid(
            file.name,
            f"tensors {halves.a} and {halves.b}",
            found=f"shapes {list(shapes[0])} and {list(shapes[1])}, which {what}",
            wanted=f"A [{num} or 1, rank {rank}, in {in_dim}] and B [{num} or 1, out {self.out_dim}, rank {rank}], "
            "or both turned; PEFT's flattened layout has other names",
        )

    def _fit(self, way: Halves, shapes: tuple[tuple[int, ...], tuple[int, ...]], rank: int) -> bool:
        wanted = way.shapes(rank, self.experts.geometry.in_dim, self.out_dim)
        planes = [shape[:-2] for shape in shapes]
        return (
            tuple(shape[-2:] for shape in shapes) == wanted
            and any(len(shape) == _PLANES for shape in shapes)
            and all(plane in {(), (1,), (self.num_experts,)} for plane in planes)
        )

    def pairs(self, file: TensorFile, halves: Halves) -> Iterator[tuple[int, int, Pair]]:
        """(part, expert, pair) for each; `halves` are established."""
        start = 0
        for number in self.experts.parts:
            out = slice(start, start + self.experts.geometry.parts[number].out_dim)
            start = out.stop
            factor = file.read(halves.b)
            ranks = used_ranks(factor[..., out] if halves.turned else factor[..., out, :].swapaxes(-1, -2))
            for expert in range(self.num_experts):
                a, b = (_plane(file.tensors[tensor].shape, expert) for tensor in (halves.a, halves.b))
                pair = Pair(
                    a=halves.a_cut(ranks, plane=a),
                    bt=halves.bt_cut(out, ranks, plane=b),
                    rank=ranks.stop - ranks.start,
                )
                yield number, expert, pair


def _plane(shape: tuple[int, ...], expert: int) -> int | None:
    if len(shape) < _PLANES:
        return None
    return expert if shape[0] > 1 else 0


def stack_of(module: str, index: ModuleIndex) -> Stacked | None:
    """What a parameter of all experts means here; None where it is none of this base."""
    parent, _, leaf = module.rpartition(".")
    if parent.rpartition(".")[2] != _CONTAINER:
        if leaf not in _MIXTRAL:
            return None
        parent = f"{parent}.{_CONTAINER}"
    leaves = JOINS.get(leaf) or (_MIXTRAL.get(leaf, leaf),)
    experts = index.expert_parts(parent, leaves)
    return Stacked(experts, parent, leaves) if experts else None
