"""The grammar of tensor names: which module, which half. Pure.

    [wrappers.]base_model.model.MODULE.lora_A[.ADAPTER].weight        PEFT; ADAPTER in raw state dicts
    MODULE.lora_a                                                     MLX, whose matrices lie transposed

A file must be spelled in one way: one prefix, one adapter's name, one place of the language model. Two ways are
two adapters, or half of one.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from infinilora.weights.plan import ALL, Cut
from infinilora.weights.refuse import invalid

Half = Literal["A", "B"]
OTHER: dict[Half, Half] = {"A": "B", "B": "A"}

_PEFT = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?:(?P<adapter>[^.]+)\.)?weight)?\Z")
_MLX = re.compile(r"(?P<module>.+)\.lora_(?P<half>[ab])\Z")

# Names that compilers and sharders put in between, and what may come before a module's name, once or twice.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PREFIX = re.compile(r"\A(?:module\.|base_model\.model\.(?=.))*")
_ROOT = re.compile(r"\A(?P<root>(?:[^.]+\.)*?)(?:layers\.\d+|embed_tokens)(?:\.|\Z)")

# What a key that is no LoRA half tells: (part of the key, why it is refused).
_TELLING = (
    ("lora_magnitude_vector", "DoRA, which is not served"),
    ("lora_embedding_", "LoRA on an embedding, which is not served"),
    ("modules_to_save", "a whole module trained beside the LoRA, which is not served"),
    ("token_adapter", "trained token embeddings, which are not served"),
    ("trainable_tokens", "trained token embeddings, which are not served"),
    ("lora_B.bias", "a bias on lora_B (lora_bias), which is not served"),
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
    """The two tensors of one module. `turned`: A is [in, r] and B is [r, out] in the file."""

    a: str
    b: str
    turned: bool = False

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


class _Spelling(NamedTuple):
    """How a key is written around its module's name. None: this key does not tell."""

    prefix: str
    root: str | None
    adapter: str | None


def pairs_of(file: str, keys: Iterable[str], *, is_mlx: bool = False) -> dict[str, Halves]:
    """The two halves of every module, in the order of the modules' names. Raises AdapterInvalid."""
    halves: dict[str, dict[Half, str]] = {}
    first: dict[str, tuple[str, object]] = {}
    for key in sorted(keys):
        module, half, spelling = _parse(file, key, is_mlx)
        _check_spelling(file, key, spelling, first)
        of_module = halves.setdefault(module, {})
        if half in of_module:
            raise invalid(file, f"tensor {key}", found=f"a second lora_{half} of {module}", wanted="one")
        of_module[half] = key
    for module, found in halves.items():
        _check_both(file, module, found)
    return {module: Halves(found["A"], found["B"], is_mlx) for module, found in sorted(halves.items())}


def _why_not(key: str) -> str:
    if told := next((why for part, why in _TELLING if part in key), None):
        return told
    if key.endswith(".weight") and "lora_" not in key:
        return "a whole weight, trained beside the LoRA (modules_to_save), which is not served"
    return "no LoRA weight"


def _parse(file: str, key: str, is_mlx: bool) -> tuple[str, Half, _Spelling]:  # noqa: FBT001 - one grammar or the other
    found = (_MLX if is_mlx else _PEFT).match(key)
    if not found:
        wanted = "...lora_a or ...lora_b" if is_mlx else "...lora_A.weight or ...lora_B.weight"
        raise invalid(file, f"tensor {key}", found=_why_not(key), wanted=wanted)
    name = ".".join(part for part in found["module"].split(".") if part not in _WRAPPERS)
    module = _PREFIX.sub("", name)
    prefix = name.removesuffix(module)
    root = _ROOT.match(module)
    adapter = None if is_mlx else found["adapter"] or ""
    half: Half = "A" if found["half"].upper() == "A" else "B"
    return module, half, _Spelling(prefix, root["root"] if root else None, adapter)


_MEANING = {
    "prefix": "names that begin with",
    "root": "layers below",
    "adapter": "tensors of the adapter named",
}


def _check_spelling(file: str, key: str, spelling: _Spelling, first: dict[str, tuple[str, object]]) -> None:
    for what, value in spelling._asdict().items():
        if value is None:
            continue
        earlier_key, earlier = first.setdefault(what, (key, value))
        if value != earlier:
            raise invalid(
                file,
                f"tensors {earlier_key} and {key}",
                found=f"{_MEANING[what]} {earlier!r} and {value!r} in one file",
                wanted="one of them (PEFT's own names begin with 'base_model.model.')",
            )


def _check_both(file: str, module: str, found: dict[Half, str]) -> None:
    for half, key in found.items():
        other = OTHER[half]
        if other not in found:
            raise invalid(
                file, f"module {module}", found=f"lora_{half} alone ({key})", wanted=f"lora_{other} beside it"
            )
