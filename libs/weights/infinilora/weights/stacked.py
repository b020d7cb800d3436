"""LoRA on experts as three-dimensional tensors, one plane for each expert, as trainers outside PEFT write it.

    A [E, r, in]   B [E, out, r]       a plane for each expert
    A [1, r, in]   B [1, out, r]       one for all: either of them, or both ("shared outer")

Any other shape, turned planes among them, is refused with the layout that was looked for. The module is a
parameter of the experts' container (`mlp.experts.gate_up_proj`, `mlp.experts.w1`), or one of Mixtral's three
beside its router (`block_sparse_moe.w1`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from infinilora.weights.joined import used_ranks
from infinilora.weights.keys import Halves
from infinilora.weights.names import JOINS, MIXTRAL, ExpertParts, ModuleIndex
from infinilora.weights.plan import Pair
from infinilora.weights.refuse import invalid
from infinilora.weights.tensorfile import TensorFile

_CONTAINER = "experts"


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
        """The projections of the experts one by one, by which they may be targets; in the order of `pairs`."""
        return tuple(f"{self.container}.{e}.{leaf}" for leaf in self.leaves for e in range(self.num_experts))

    def check_shapes(self, file: TensorFile, halves: Halves, rank: int) -> None:
        """Raise AdapterInvalid, naming the layout, unless both tensors have the planes of these experts."""
        in_dim, num = self.experts.geometry.in_dim, self.num_experts
        shapes = [file.tensors[tensor].shape for tensor in (halves.a, halves.b)]
        for shape, matrix in zip(shapes, halves.shapes(rank, in_dim, self.out_dim), strict=True):
            if shape not in {(num, *matrix), (1, *matrix)}:
                raise invalid(
                    file.name,
                    f"tensors {halves.a} and {halves.b}",
                    found=f"shapes {list(shapes[0])} and {list(shapes[1])}, which fit no stacked expert layout",
                    wanted=f"A [{num} or 1, rank {rank}, in {in_dim}] and B [{num} or 1, out {self.out_dim}, "
                    f"rank {rank}] (PEFT's flattened layout has other names)",
                )

    def pairs(self, file: TensorFile, halves: Halves) -> Iterator[tuple[int, int, Pair]]:
        """(part, expert, pair) for each; the tensors have the shapes of the layout."""
        all_experts, shared = range(self.num_experts), [0] * self.num_experts
        planes = [all_experts if file.tensors[tensor].shape[0] > 1 else shared for tensor in (halves.a, halves.b)]
        start = 0
        for number in self.experts.parts:
            out = slice(start, start + self.experts.geometry.parts[number].out_dim)
            start = out.stop
            ranks = used_ranks(file.read(halves.b)[:, out].swapaxes(-1, -2))
            for expert, (a, b) in enumerate(zip(*planes, strict=True)):
                pair = Pair(
                    a=halves.a_cut(ranks, plane=a),
                    bt=halves.bt_cut(out, ranks, plane=b),
                    rank=ranks.stop - ranks.start,
                )
                yield number, expert, pair


def stack_of(module: str, index: ModuleIndex) -> Stacked | None:
    """What a parameter of all experts means here; None where it is none of this base."""
    parent, _, leaf = module.rpartition(".")
    if parent.rpartition(".")[2] != _CONTAINER:
        if leaf not in MIXTRAL:
            return None
        parent = f"{parent}.{_CONTAINER}"
    leaves = JOINS.get(leaf) or (MIXTRAL.get(leaf, leaf),)
    experts = index.expert_parts(parent, leaves)
    return Stacked(experts, parent, leaves) if experts else None
