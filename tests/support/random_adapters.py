"""Random adapters as trainers write them: a config, its tensors, and a base they fit.

Everything is drawn by hypothesis, so that a failure shrinks to a small file. Says nothing of what a file means: that
is `explicit_merge`, whose rules are used only to put tensors where the config adapts something.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save
from typing_extensions import override

from infinilora.protocol.adapter import BaseCard
from support.adapter_layouts import (
    BASES,
    EMBEDDING,
    KINDS,
    LAYOUTS,
    OUTSIDE,
    Layout,
    Unit,
    card,
    clear_corners,
    leaf_of,
    module_in_file,
    out_half,
    shapes,
    units,
)
from support.explicit_files import MLX_TENSORS_NAME, TENSORS_NAME, Array
from support.explicit_rules import CONFIG_NAME, rank_of, targets_module, targets_parameter
from support.random_configs import Draw, random_config

PREFIX = "base_model.model."
_DTYPES: tuple[Any, ...] = (np.float32, np.float16, ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Adapter:
    """The two files of an adapter and the base they are for. `raw` overrides what `tensors` would be written as."""

    base: int
    config: dict[str, Any]
    tensors: dict[str, Array]
    must_serve: bool
    """False: a server may also refuse, if it says so: a pair can be read in two ways, or an expert has a bias."""
    has_meaning: bool = True
    """False: nothing in the files tells how they are to be read."""
    notes: tuple[str, ...] = field(default=())
    raw: bytes | None = None
    file_name: str = TENSORS_NAME

    @property
    def card(self) -> BaseCard:
        return card(self.base)

    @override
    def __repr__(self) -> str:
        shapes = {name: f"{t.dtype}{list(t.shape)}" for name, t in self.tensors.items()}
        return f"Adapter(base={self.base}, notes={self.notes}, config={self.config}, tensors={shapes})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(repr(self))  # what hypothesis prints of a failure

    def write(self, directory: Path) -> Path:
        (directory / CONFIG_NAME).write_text(json.dumps(self.config))
        (directory / self.file_name).write_bytes(self.raw if self.raw is not None else file_bytes(self.tensors))
        return directory


def file_bytes(tensors: dict[str, Array]) -> bytes:
    """A safetensors file, by the library that defines the format."""
    data: bytes = save(tensors, {"format": "pt"})
    return data


@st.composite
def adapters(draw: Draw, *, kinds: Sequence[str] = tuple(LAYOUTS), layouts: Sequence[Layout] | None = None) -> Adapter:
    """An adapter that some trainer could have written, for one of the bases."""
    base = draw(st.sampled_from([b for b in BASES if KINDS[b] in kinds]))
    layout = draw(st.sampled_from(LAYOUTS[KINDS[base]] if layouts is None else list(layouts)))
    everything = units(base, layout)
    leaves = sorted({leaf_of(unit.name) for unit in everything})
    wanted = draw(st.sets(st.sampled_from(leaves), min_size=1))
    chosen = [unit for unit in everything if leaf_of(unit.name) in wanted]
    if layout == "mlx" and any(unit.layer != OUTSIDE for unit in chosen):
        return _mlx_adapter(draw, base, chosen)
    config = random_config(draw, layout, chosen, everything)
    held = _held(draw, config, everything)
    if any(unit.name.endswith(EMBEDDING) for unit in held):
        config["lora_bias"] = False  # PEFT has none for embeddings
    is_plain, has_meaning = _can_be_read(config, layout, held)
    is_biased_expert = config.get("lora_bias") and any(".experts." in unit.name for unit in held)
    return Adapter(
        base,
        config,
        _tensors(draw, config, layout, held),
        must_serve=is_plain and not is_biased_expert,
        has_meaning=has_meaning,
        notes=(KINDS[base], layout),
    )


def _held(draw: Draw, config: dict[str, Any], everything: Sequence[Unit]) -> list[Unit]:
    """What the file holds of what the config adapts: all of it, or less, but something of every layer."""
    old_peft = config.get("layers_to_transform") is not None and draw(st.integers(0, 2)) == 0
    adapted = [
        unit
        for unit in everything
        if (
            targets_parameter(config, unit.rule_name)
            if unit.is_parameter
            else targets_module(config, unit.rule_name, old_peft=old_peft)
        )
    ]
    if not adapted:  # old PEFT read this filter so that nothing was left
        adapted = [u for u in everything if not u.is_parameter and targets_module(config, u.rule_name)]
    share = draw(st.sampled_from((1.0, 1.0, 0.8, 0.3)))
    if share == 1.0:
        return adapted
    dice = np.random.default_rng(draw(st.integers(0, 2**16)))
    kept = [unit for unit in adapted if dice.random() < share]
    silent = {unit.layer for unit in adapted} - {unit.layer for unit in kept}
    return kept + [next(unit for unit in adapted if unit.layer == layer) for layer in sorted(silent)]


def _can_be_read(config: dict[str, Any], layout: Layout, held: Sequence[Unit]) -> tuple[bool, bool]:
    """Whether each flattened pair, and whether the file as a whole, tells which generation of PEFT wrote it."""
    square = [unit.in_dim == unit.out_dim for unit in held if unit.num_experts]
    if not square or not layout.startswith("flat") or "peft_version" in config:
        return True, True
    return not any(square), not all(square)


def _tensors(draw: Draw, config: dict[str, Any], layout: Layout, held: Sequence[Unit]) -> dict[str, Array]:
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from((_DTYPES[0], *_DTYPES, None)))  # None: mixed
    zero = draw(st.sampled_from((0.0, 0.0, 0.3, 1.0)))
    is_blocked = draw(st.integers(0, 3)) == 0
    spread = draw(st.sampled_from((0.0, 0.0, 2.0)))
    prefix = draw(st.sampled_from((PREFIX,) * 16 + ("", PREFIX * 2, f"{PREFIX}_orig_mod.", f"module.{PREFIX}")))
    bare_weight = layout in ("stacked", "shared_outer") and draw(st.booleans())
    infixes = ("",) if bare_weight else ("",) * 7 + (".default",) * 3 + (".ranking", ".lora")
    infix = draw(st.sampled_from(infixes))
    tensors: dict[str, Array] = {}
    for unit in held:
        a_shape, b_shape = shapes(unit, layout, rank_of(config, unit.rule_name))
        module = module_in_file(unit, layout, config)
        if config.get("lora_bias"):
            tensors[f"{prefix}{module}.lora_B{infix}.bias"] = dice.standard_normal(unit.out_dim, np.float32)
        tail = "" if bare_weight and unit.num_experts else f"{infix}.weight"
        for half, shape in (("A", a_shape), ("B", b_shape)):
            values = dice.standard_normal(shape) * 0.2 * 10.0 ** dice.uniform(-spread, spread)
            if half == "B" and dice.random() < zero:
                values[...] = 0.0
            if is_blocked and leaf_of(unit.name) == "gate_up_proj" and out_half(layout) == half:
                clear_corners(values, unit, layout)
            table = unit.name.endswith(EMBEDDING)
            key = f"lora_embedding_{half}{infix}" if table else f"lora_{half}{tail}"
            tensors[f"{prefix}{module}.{key}"] = values.astype(dtype or _DTYPES[dice.integers(3)])
    return tensors


def _mlx_adapter(draw: Draw, base: int, held: Sequence[Unit]) -> Adapter:
    """As mlx-lm writes it: lower-case halves, both transposed, and a scale that no rank divides."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rank, dtype = draw(st.integers(1, 64)), draw(st.sampled_from(_DTYPES))
    config = {
        "fine_tune_type": "lora",
        "num_layers": card(base).num_layers,
        "lora_parameters": {"rank": rank, "scale": draw(st.sampled_from((0.5, 2.0, 20.0))), "dropout": 0.0},
    }
    tensors = {
        f"{unit.name}.lora_{half}": (dice.standard_normal(shape) * 0.2).astype(dtype)
        for unit in held
        if unit.layer != OUTSIDE
        for half, shape in (("a", (unit.in_dim, rank)), ("b", (rank, unit.out_dim)))
    }
    return Adapter(base, config, tensors, must_serve=True, notes=(KINDS[base], "mlx"), file_name=MLX_TENSORS_NAME)
