"""Compile every Triton kernel for one GPU architecture, without a GPU; print a JSON line for each.

A program of its own: it must run in a process without TRITON_INTERPRET.

    python tests/support/compile_triton.py 90
"""

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infinilora.kernels import expand, indexed, mailbox, pair_sums, shrink
from infinilora.kernels.site_table import FIELDS
from infinilora.kernels.tile_table import Loads

POINTERS = {"v": "*fp32", "tiles": "*i32", "order": "*i32", "records": "*i64", "pair_weights": "*fp32"}
DIVISIBLE = (
    "in_dim",
    "x_stride",
    "v_plane",
    "v_stride",
    "v_part",
    "split_width",
    "out_stride",
    "summed_stride",
    "columns",
    "cols",
)
"""Numbers that are multiples of 16 in every model, which Triton then specialises on."""

DECODE, PREFILL = 16, 64


def shrink_case(kind: int, x: str, rows: int, loads: Loads = "pointers", *, gather: bool = False) -> dict[str, Any]:
    specialized = loads == "specialized"
    return {
        "kernel": shrink.shrink_kernel,
        "pointers": POINTERS | {"x": x},
        "loads": loads,
        "stages": 3,
        "constants": {
            "PARTS": 3,
            "FIELDS": FIELDS,
            "KIND": kind,
            "ALIGNED": True,
            "GATHER": gather,
            "TOP_K": 1,
            "NATIVE": (kind, x) in ((1, "*bf16"), (2, "*fp16")),
            "DESCRIBED": loads != "pointers",
            "DESCRIBED_X": loads != "pointers" and not gather,
            "SPECIALIZED": specialized,
            "BLOCK_M": rows,
            "BLOCK_R": shrink.SPECIALIZED_RANK_BLOCK if specialized else rows,
            "BLOCK_K": 64 if x == "*fp32" else 128,
        },
    }


def expand_case(kind: int, out: str, rows: int, loads: Loads = "pointers", *, top_k: int = 0) -> dict[str, Any]:
    """`top_k`: pairs of a row that its last program sums into bf16, 0 for none."""
    return {
        "kernel": expand.expand_kernel,
        "pointers": POINTERS | {"out": out, "topk_ids": "*i32", "arrivals": "*i32", "summed": "*bf16"},
        "loads": loads,
        "stages": 2,
        "constants": {
            "PARTS": 3,
            "FIELDS": FIELDS,
            "KIND": kind,
            "ALIGNED": True,
            "GATHER": rows == PREFILL or top_k > 0,
            "WEIGHTED": rows == PREFILL or top_k > 0,
            "ACCUMULATE": rows == DECODE and top_k == 0,
            "TOP_K": top_k,
            "UPCAST": False,
            "DESCRIBED": loads != "pointers",
            "SPLITS": 4 if rows == DECODE else 1,
            "BLOCK_M": rows,
            "BLOCK_R": rows,
            "BLOCK_N": 2 * rows if rows == PREFILL else 64,
        },
    }


def sum_pairs_case() -> dict[str, Any]:
    pointers = {"weighted": "*fp32", "out": "*bf16", "topk_ids": "*i32", "slot_index": "*i64", "slot_list": "*i32"}
    constants = {"PARTS": 1, "FIELDS": FIELDS, "TOP_K": 8, "ACCUMULATE": True, "BLOCK_N": pair_sums.COLUMNS}
    return {
        "kernel": pair_sums.sum_pairs_kernel,
        "pointers": POINTERS | pointers,
        "stages": 2,
        "constants": constants,
    }


def indexed_cases() -> list[dict[str, Any]]:
    """`down` of Qwen3-30B-A3B at decode: eight choices a row, weighted and summed where they are expanded."""
    pointers = POINTERS | {"slot_index": "*i64", "slot_list": "*i32", "topk_ids": "*i32", "x": "*bf16", "out": "*bf16"}
    common = {"PARTS": 1, "FIELDS": FIELDS, "KIND": 1, "ALIGNED": True, "TOP_K": 8, "ROUTED": True, "BLOCK_R": 16}
    shrinking = common | {"X_TOP_K": 1, "BLOCK_K": indexed.WIDTH}
    expanding = common | {"SUMMED": 8, "WEIGHTED": True, "SPLITS": 2, "BLOCK_N": indexed.COLUMNS}
    return [
        {"kernel": indexed.indexed_shrink_kernel, "pointers": pointers, "stages": 3, "constants": shrinking},
        {"kernel": indexed.indexed_expand_kernel, "pointers": pointers, "stages": 3, "constants": expanding},
    ]


def mailbox_cases() -> list[dict[str, Any]]:
    addresses = dict.fromkeys(("region", "peer", "notes", "slot_bytes", "limit_ns"), "i64")
    layout = mailbox.LAYOUT | {"BUFFERS": 8, "PROGRAMS": mailbox.NUM_PROGRAMS, "INTERPRETED": False}
    push = {"x": "*bf16", "ids": "*i32", "weights": "*fp32", "counters": "*i64", "others": "*i64"}
    take = {"out": "*bf16", "counters": "*i64", "others": "*i64"}
    routed = {"TOP_K": 8, "HAS_IDS": True, "HAS_WEIGHTS": True}
    joined = {"ADD": True, "WIRE": mailbox.WIRE_TYPES[torch.bfloat16], "REFUSED": mailbox.REFUSED}
    joined["MISPLACED"] = mailbox.MISPLACED
    return [
        {"kernel": mailbox.push_kernel, "pointers": addresses | push, "stages": 2, "constants": layout | routed},
        {"kernel": mailbox.take_kernel, "pointers": addresses | take, "stages": 2, "constants": layout | joined},
    ]


CASES = [
    *(
        shrink_case(kind, x, rows, gather=rows == PREFILL)
        for kind, x in ((1, "*bf16"), (0, "*fp32"))
        for rows in (DECODE, PREFILL)
    ),
    shrink_case(2, "*fp16", DECODE),
    *(
        shrink_case(1, "*bf16", rows, "descriptors", gather=gather)
        for rows, gather in ((DECODE, False), (PREFILL, True))
    ),
    shrink_case(2, "*fp16", PREFILL, "descriptors"),
    shrink_case(0, "*fp32", PREFILL, "descriptors"),
    *(shrink_case(kind, x, PREFILL, "specialized") for kind, x in ((1, "*bf16"), (2, "*fp16"))),
    shrink_case(1, "*fp32", DECODE),
    *(expand_case(kind, out, rows) for kind, out in ((1, "*bf16"), (0, "*fp32")) for rows in (DECODE, PREFILL)),
    expand_case(2, "*bf16", DECODE),
    *(expand_case(1, "*bf16", rows, "descriptors") for rows in (DECODE, PREFILL)),
    *(expand_case(kind, "*bf16", DECODE, "descriptors") for kind in (0, 2)),
    *(expand_case(1, "*fp32", rows, top_k=8) for rows in (DECODE, PREFILL)),
    sum_pairs_case(),
    *indexed_cases(),
    *mailbox_cases(),
]


def compile_case(case: dict[str, Any], capability: int) -> dict[str, Any]:
    kernel, constants = case["kernel"], case["constants"]
    signature, values, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = case["pointers"].get(name, "i32")
        if signature[name].startswith("*") or name in DIVISIBLE:
            hints[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=hints),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "num_stages": case["stages"]},
    )
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "kind": constants.get("KIND"),
        "rows": constants.get("BLOCK_M"),
        "loads": case.get("loads"),
        "warps": compiled.metadata.num_warps,
        "target": next(line for line in ptx.splitlines() if line.startswith(".target")),
        "cubin_bytes": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "wgmma_columns": sum(int(n) for n in re.findall(r"wgmma\.mma_async\.\S*\.m64n(\d+)k16", ptx)),
        "product_columns": constants.get("BLOCK_M", 0)
        * constants.get("BLOCK_R", 0)
        * constants.get("BLOCK_K", 0)
        // 1024,
        "mma": ptx.count("mma.sync"),
        "vector_loads": ptx.count("cp.async.cg.shared.global"),
        "scalar_weight_loads": ptx.count("ld.global.b16"),
        "vector_reads": len(re.findall(r"\bld\.global(?:\.\w+)*\.v4\.b32", ptx))
        + ptx.count("cp.async.cg.shared.global"),
        "vector_moves": len(re.findall(r"\bst\.global\.v4\.b32", ptx)),
        "acquires": ptx.count("ld.acquire.sys.global"),
        "releases": ptx.count("st.release.sys.global"),
        "boxes": ptx.count("cp.async.bulk.tensor"),
        "register_shares": ptx.count("setmaxnreg"),
        "summed": constants.get("TOP_K", 0) if kernel is expand.expand_kernel else 0,
        "counts": re.findall(r"\b(?:atom|red)\.\S+", ptx),
        "is_counted_behind_a_barrier": -1
        < ptx.rfind("st.global", 0, ptx.find("atom."))
        < ptx.rfind("bar.sync", 0, ptx.find("atom.")),
    }


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compile_case(case, int(sys.argv[1]))), flush=True)
