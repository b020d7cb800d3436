"""vLLM's Triton LoRA kernels on a dense site of the GPU benchmarks: what ours are held beside.

Only where vLLM is installed, which nothing else here needs: `pip install vllm` into the environment, or one like it.
Their MoE kernel wants pairs that vLLM's compiled operators have sorted: not timed.
"""

import importlib
from collections.abc import Callable

import torch
from sites import SCALE, Site
from torch import Tensor

from infinilora.kernels.batch import SiteWeights

CLOSE = 0.02
"""Of the largest delta: both round the same products to bf16, in another order."""

Run = Callable[[int], None]


def public_run(site: Site, adapters: int) -> Run | None:
    """run(i): the deltas of layer i by vLLM's kernels, added to a tensor of their own; None where there is no vLLM.

    ValueError if they are not what ours are.
    """
    try:
        ops = importlib.import_module("vllm.lora.ops.triton_ops")
    except ImportError:
        return None
    rows = len(site.x)
    slots = torch.arange(adapters, dtype=torch.int32, device=site.x.device).repeat_interleave(rows // adapters)
    meta = ops.LoRAKernelMeta.make(adapters, rows, device=site.x.device)
    meta.prepare_tensors(slots)
    arguments = meta.meta_args(rows, specialize_active_lora=True)
    layers = [stacked([parts for _, parts in sorted(table.items())]) for table in site.tables]
    out = torch.zeros_like(site.out)

    def run(layer: int) -> None:
        a, b = layers[layer]
        v = torch.empty(len(a), rows, a[0].shape[-2], dtype=torch.float32, device=out.device)
        ops.lora_shrink(site.x, a, v, *arguments, SCALE)
        ops.lora_expand(v, b, out, *arguments, offset_start=0, add_inputs=True)

    for layer in range(len(layers)):  # tables of addresses are made at a first call, which no graph may hold
        run(layer)
    check(run, site, out)
    return run


def stacked(slots: list[SiteWeights]) -> tuple[list[Tensor], list[Tensor]]:
    """A [adapters, 1, rank, in] and B [adapters, 1, out, rank] of each part, as vLLM keeps them."""
    parts = range(len(slots[0]))
    a = [torch.stack([weights[p].a for weights in slots])[:, None] for p in parts]
    b = [torch.stack([weights[p].bt.T for weights in slots])[:, None].contiguous() for p in parts]
    return a, b


def check(run: Run, site: Site, out: Tensor) -> None:
    for target, compute in ((out, run), (site.out, site.run)):
        target.zero_()
        compute(0)
    off, most = float((out - site.out).abs().max()), float(site.out.abs().max())
    if not off <= CLOSE * most:
        raise ValueError(f"vLLM's kernels are off by {off} of {most}: they were called wrongly, or are others by now")
