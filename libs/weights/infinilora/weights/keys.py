"""The grammar of tensor names: which module, which half. Pure.

    [wrappers.]base_model.model.MODULE.lora_A[.ADAPTER].weight        PEFT; ADAPTER in raw state dicts
    [wrappers.]base_model.model.MODULE.lora_embedding_A[.ADAPTER]     PEFT, of an embedding: A [r, vocabulary]
    [wrappers.]base_model.model.MODULE.lora_B[.ADAPTER].bias          PEFT, with lora_bias
    [...]MODULE.lora_magnitude_vector[.ADAPTER][.weight]              PEFT, with use_dora
    MODULE.lora_a                                                     MLX, whose matrices lie transposed
    MODULE.m                                                          MLX, the magnitude of its DoRA

What is around the names is `spelling`'s.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

from infinilora.weights.plan import ALL, Cut
from infinilora.weights.refuse import invalid
from infinilora.weights.spelling import OneSpelling

Role = Literal["lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "bias", "magnitude"]
BESIDE: dict[Role, Role] = {
    "lora_A": "lora_B",
    "lora_B": "lora_A",
    "lora_embedding_A": "lora_embedding_B",
    "lora_embedding_B": "lora_embedding_A",
    "bias": "lora_B",
    "magnitude": "lora_B",
}
"""What a module must have where it has the first."""

_PEFT = (
    re.compile(r"(?P<module>.+)\.(?P<role>lora_[AB])(?:\.(?:(?P<adapter>[^.]+)\.)?weight)?\Z"),
    re.compile(r"(?P<module>.+)\.(?P<role>lora_embedding_[AB])(?:\.(?P<adapter>[^.]+))?\Z"),
    re.compile(r"(?P<module>.+)\.lora_B\.(?:(?P<adapter>[^.]+)\.)?(?P<role>bias)\Z"),
    re.compile(r"(?P<module>.+)\.(?P<role>lora_magnitude_vector)(?:\.(?!weight\Z)(?P<adapter>[^.]+))?(?:\.weight)?\Z"),
)
_MLX = (re.compile(r"(?P<module>.+)\.(?P<role>lora_[ab]|m)\Z"),)
_ROLES: dict[str, Role] = {
    "lora_a": "lora_A",
    "lora_b": "lora_B",
    "m": "magnitude",
    "lora_magnitude_vector": "magnitude",
}
"""Where a file has another word for it."""

# What a key that is no LoRA half tells: (part of the key, why it is refused).
_TELLING = (
    ("lora_magnitude_vector", "a magnitude of DoRA under a name that PEFT does not load"),
    ("modules_to_save", "a name of a whole module that PEFT does not load"),
    ("trainable_tokens", "trained tokens, and not of embed_tokens or lm_head"),
    (".bias", "a bias, which is not served"),
    ("base_layer.weight", "a copy of base weights (save again with save_embedding_layers=False)"),
    ("medusa", "a Medusa head, which is not served"),
    ("speculator", "a speculator, which is not served"),
    ("eagle", "a speculator, which is not served"),
    ("lora_a", "a name of MLX under a configuration of PEFT"),
    ("lora_b", "a name of MLX under a configuration of PEFT"),
    ("lora_down", "a name of diffusion trainers"),
    ("lora_up", "a name of diffusion trainers"),
)


class Halves(NamedTuple):
    """The tensors of one module. `turned`: A is [in, r] and B is [r, out] in the file."""

    a: str
    b: str
    turned: bool = False
    is_table: bool = False
    """Under an embedding's names."""
    bias: str | None = None
    """The vector [out] of lora_B, where there is one."""
    magnitude: str | None = None
    """The vector [out] of DoRA, where there is one."""

    def a_cut(self, ranks: slice = ALL, *, plane: int | None = None) -> Cut:
        """The ranks' rows of A as [rank, in]."""
        if self.turned:
            return Cut(self.a, cols=ranks, turned=True, plane=plane)
        return Cut(self.a, rows=ranks, plane=plane)

    def bt_cut(self, out: slice = ALL, ranks: slice = ALL, *, plane: int | None = None) -> Cut:
        """Some outputs of B as [rank, out]."""
        if self.turned:
            return Cut(self.b, rows=ranks, cols=out, plane=plane)
        return Cut(self.b, rows=out, cols=ranks, turned=True, plane=plane)

    def shapes(self, rank: int, in_dim: int, out_dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes that A and B must have."""
        return ((in_dim, rank), (rank, out_dim)) if self.turned else ((rank, in_dim), (out_dim, rank))


def pairs_of(
    file: str, keys: Iterable[str], *, is_mlx: bool = False, spelling: OneSpelling | None = None
) -> dict[str, Halves]:
    """The two halves of every module, in the order of the modules' names. Raises AdapterInvalid.

    `spelling`: of what else the file holds.
    """
    tensors: dict[str, dict[Role, str]] = {}
    spelling = spelling or OneSpelling(file)
    for key in sorted(keys):
        name, role, infix = _parse(file, key, is_mlx)
        module = spelling.module(key, name, adapter=infix)
        of_module = tensors.setdefault(module, {})
        if role in of_module:
            raise invalid(file, f"tensor {key}", found=f"a second {role} of {module}", wanted="one")
        of_module[role] = key
    return {module: _halves(file, module, found, is_mlx) for module, found in sorted(tensors.items())}


def _halves(file: str, module: str, found: dict[Role, str], is_mlx: bool) -> Halves:  # noqa: FBT001 - as `_parse`
    for role, key in found.items():
        other = BESIDE[role]
        if other not in found and not (role == "magnitude" and "lora_embedding_B" in found):
            raise invalid(file, f"module {module}", found=f"{role} alone ({key})", wanted=f"{other} beside it")
    if "lora_A" not in found:
        tables = found["lora_embedding_A"], found["lora_embedding_B"]
        return Halves(*tables, is_table=True, magnitude=found.get("magnitude"))
    if "lora_embedding_A" in found:
        raise invalid(file, f"module {module}", found="lora_A and lora_embedding_A", wanted="one of them")
    bias, magnitude = found.get("bias"), found.get("magnitude")
    return Halves(found["lora_A"], found["lora_B"], is_mlx, bias=bias, magnitude=magnitude)


def _why_not(key: str) -> str:
    if told := next((why for part, why in _TELLING if part in key), None):
        return told
    if key.endswith(".weight") and "lora_" not in key:
        return "a whole weight, trained beside the LoRA (modules_to_save), which is not served"
    return "no LoRA weight"


def _parse(file: str, key: str, is_mlx: bool) -> tuple[str, Role, str | None]:  # noqa: FBT001 - one grammar or the other
    """(module's name as it is written, role, adapter's name as it is written)."""
    found = next((found for form in (_MLX if is_mlx else _PEFT) if (found := form.match(key))), None)
    if not found:
        wanted = "...lora_a or ...lora_b" if is_mlx else "...lora_A.weight or ...lora_B.weight"
        raise invalid(file, f"tensor {key}", found=_why_not(key), wanted=wanted)
    role = _ROLES.get(found["role"]) or cast("Role", found["role"])
    return found["module"], role, None if is_mlx else found["adapter"] or ""
