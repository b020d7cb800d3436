"""Random configs as trainers write them: for some of the pairs that a file could hold, in every form PEFT takes.

`explicit_rules` is asked only whether a limit that was drawn leaves anything to adapt.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from support.adapter_layouts import OUTSIDE, Layout, Unit, leaf_of
from support.explicit_rules import targets_module

Draw = Callable[[st.SearchStrategy[Any]], Any]

_NO_MATTER: dict[str, tuple[Any, ...]] = {
    "task_type": ("CAUSAL_LM", None),
    "inference_mode": (True, False),
    "bias": ("none",),
    "base_model_name_or_path": (None, "/home/user/models/x", "org/gated-model", "org/model-bnb-4bit"),
    "modules_to_save": (None, []),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "eva_config": (None, {"rho": 2.0, "tau": 0.99}),
    "loftq_config": ({}, None),
    "corda_config": (None,),
    "layer_replication": (None,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "qalora_group_size": (16,),
    "megatron_config": (None,),
    "megatron_core": ("megatron.core",),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    "auto_mapping": (None,),
    "revision": (None, "main"),
    "arrow_config": (None,),
    "ensure_weight_tying": (False,),
    "future_flag": (False,),
    "future_dict": ({},),
    "future_list": ([],),
}
_OLD_VERSIONS = ("0.17.0", "0.17.1", "0.18.0", "0.18.1")
_NEW_VERSIONS = ("0.19.1", "0.20.0", "0.21.2")
EARLY_VERSIONS = ("0.13.2", "0.14.0")
"""These read patterns otherwise. They had no `target_parameters`, and no version in their own files."""
_VERSIONS: dict[str, tuple[str, ...]] = {"flat": _NEW_VERSIONS, "flat_crossed": _OLD_VERSIONS}
MANY_TARGETS = 20
"""From so many on PEFT rewrites `target_modules`."""
_RANKS = st.one_of(st.integers(1, 8), st.integers(1, 64), st.sampled_from((1, 8, 16, 32, 64)))
_ALPHAS = st.one_of(st.integers(1, 128), st.sampled_from((0.5, 1.0, 2.5, 16, 32.0, 1e-3, 4096)))


def random_config(draw: Draw, layout: Layout, chosen: Sequence[Unit], everything: Sequence[Unit]) -> dict[str, Any]:
    """Adapts at least some of the chosen units, and perhaps others of `everything` that are called alike."""
    dense = [unit for unit in chosen if not unit.is_parameter]
    parameters = [unit for unit in chosen if unit.is_parameter]
    config: dict[str, Any] = {"peft_type": "LORA"}
    if draw(st.integers(0, 9)):
        rank = draw(_RANKS)
        config["r"] = float(rank) if draw(st.integers(0, 19)) == 0 else rank
        config["lora_alpha"] = draw(_ALPHAS)
    elif draw(st.booleans()):
        config |= {"r": None, "lora_alpha": None}  # some trainers write what they leave to PEFT
    if not parameters and draw(st.booleans()):
        config["lora_bias"] = draw(st.integers(0, 2)) == 0
    if draw(st.booleans()):
        config["use_rslora"] = draw(st.sampled_from((True, True, False, None)))
    targets = _targets(draw, dense) if dense else draw(st.sampled_from(([], None)))
    if parameters:
        depth = draw(st.sampled_from((2, 2, 3, 5)))
        tails = sorted({_tail(unit.rule_name, depth) for unit in parameters})
        config["target_parameters"] = draw(st.lists(st.sampled_from(tails), min_size=1, unique=True))
        targets = [] if targets is None and dense else targets
    if targets is not None or draw(st.booleans()):
        config["target_modules"] = targets
    names = [unit.rule_name for unit in chosen]
    for key, values in (("rank_pattern", _RANKS), ("alpha_pattern", _ALPHAS)):
        if patterns := _patterns(draw, names, values):
            config[key] = patterns
        elif draw(st.booleans()):
            config[key] = draw(st.sampled_from(({}, None)))
    if layout.startswith("flat") or draw(st.booleans()):
        versions = _VERSIONS.get(layout, (*_NEW_VERSIONS, *EARLY_VERSIONS))
        config["peft_version"] = draw(st.sampled_from(versions))
    if layout.startswith("flat") and draw(st.integers(0, 3)) == 0:
        del config["peft_version"]
    _narrow(draw, config, everything)
    return _dress(draw, config, has_parameters=bool(parameters))


def _targets(draw: Draw, chosen: Sequence[Unit]) -> Any:
    """`target_modules` that cover at least the chosen units; None and "all-linear" among them."""
    names = [unit.rule_name for unit in chosen]
    leaves = sorted({leaf_of(name) for name in names})
    is_outside = any(unit.layer == OUTSIDE for unit in chosen)  # all-linear is of the layers alone
    linear = "full" if is_outside else "all-linear"
    match draw(st.sampled_from(("suffix", "suffix", "dotted", "regex", linear, "absent", "full"))):
        case "suffix":
            return draw(st.permutations(leaves))
        case "dotted":
            depth = draw(st.integers(2, 4))
            return sorted({_tail(name, depth) for name in names})
        case "regex":
            either = "|".join(leaves)
            forms = (rf".*\.({either})", rf"model\.layers\.\d+\..*({either})$", rf"(?:.*?)[.](?:{either})")
            return rf"(.*\.)?({either})" if is_outside else draw(st.sampled_from(forms))
        case "all-linear":
            return draw(st.sampled_from(("all-linear", "all-linear", "All-Linear")))
        case "full":
            return sorted(names)
        case _:
            return None


def _patterns(draw: Draw, names: Sequence[str], values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Up to four patterns over the names, several of which may match one name; their order is the file's."""
    patterns: dict[str, Any] = {}
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(names))
        leaf, layer = leaf_of(name), re.search(r"layers\.\d+", name)
        within = layer[0] if layer else "layers.0"
        forms = (
            leaf,
            name,
            _tail(name, 2),
            _tail(name, 3),
            f"{within}.*",
            rf".*\.{re.escape(leaf)}",
            rf"{re.escape(within)}\..*{leaf}",
            rf"[a-z]*{leaf[1:]}",
            rf"({leaf}|o_proj)",
            rf"^{re.escape(name)}",
            rf"layers\.\d+\..*\.{leaf}",
            leaf[1:],
            f"{name}.nothing",
            r"layers\.[1-9]\d*\..*",
        )
        patterns[draw(st.sampled_from(forms))] = draw(values)
    return patterns


def _narrow(draw: Draw, config: dict[str, Any], everything: Sequence[Unit]) -> None:
    """`exclude_modules` and `layers_to_transform`, where they leave something and PEFT allows them."""
    targets = config.get("target_modules")
    if targets is None:
        return
    dense = [unit for unit in everything if not unit.is_parameter and targets_module(config, unit.rule_name)]
    if not dense:
        return
    limits: dict[str, Any] = {}
    name = draw(st.sampled_from(dense)).name
    leaf = leaf_of(name)
    excludes: tuple[Any, ...] = (None, None, None, [], [leaf], [_tail(name, 2)], rf".*\.{leaf}")
    if not any(unit.is_parameter or leaf_of(unit.name) == "qkv_proj" for unit in everything):
        # else one layer may look forgotten, as other model code has the same matrices one by one
        excludes += ([name], rf"model\.layers\.0\..*{leaf}")
    if (exclude := draw(st.sampled_from(excludes))) is not None:
        limits["exclude_modules"] = exclude
    # PEFT shortens twenty names and more to their endings, and then the layers count for full names too.
    if isinstance(targets, list) and len(targets) < MANY_TARGETS and draw(st.integers(0, 2)) == 0:
        layers = sorted({unit.layer for unit in everything if unit.layer != OUTSIDE})
        some = draw(st.lists(st.sampled_from(layers), min_size=1, unique=True))
        limits["layers_to_transform"] = some[0] if draw(st.booleans()) else some
        pattern = draw(st.sampled_from((None, "layers", ["layers"], ["h", "layers"], "", [])))
        if pattern is not None:
            limits["layers_pattern"] = pattern
    if any(targets_module({**config, **limits}, unit.rule_name) for unit in dense):
        config.update(limits)


def _dress(draw: Draw, config: dict[str, Any], *, has_parameters: bool) -> dict[str, Any]:
    """Keys that change nothing, and the order of keys as the trainer liked it."""
    for key in draw(st.lists(st.sampled_from(sorted(_NO_MATTER)), max_size=8, unique=True)):
        config[key] = draw(st.sampled_from(_NO_MATTER[key]))
    if not has_parameters:  # PEFT takes neither of these with parameters
        if draw(st.booleans()):
            config["lora_dropout"] = draw(st.sampled_from((0.0, 0.05)))
        if draw(st.integers(0, 5)) == 0:
            config["fan_in_fan_out"] = draw(st.booleans())
    return config


def _tail(name: str, depth: int) -> str:
    return ".".join(name.split(".")[-depth:])
