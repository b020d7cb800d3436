"""Every case with its verdict; which test holds it is read from the tests' own names (`test_a01_...`).

    python tests/cases/table.py       writes the table of docs/cases.md again

`exact`: served, with the numbers of an explicit fp32 merge. `refused`: refused at registration, by name. `holds`: what
the case says of lists, lives, caches or errors is so. `open`: not so yet, or not yet shown; `why` says which.
"""

import ast
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "cases.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


class Case(NamedTuple):
    """What a case is about, and how it ends here."""

    title: str
    verdict: Literal["exact", "refused", "holds", "open"]
    why: str = ""


CASES = {
    "A01": Case("rank and alpha of each module", "exact"),
    "A03": Case("rsLoRA's scale", "exact"),
    "A04": Case("DoRA, and a magnitude vector too many or too few", "exact"),
    "A05": Case("`lora_bias`", "exact"),
    "A06": Case("`bias` all or lora_only", "refused"),
    "A07": Case("`modules_to_save` with lm_head, embed_tokens; trained tokens", "exact"),
    "A08": Case("a vocabulary that grew", "refused"),
    "A09": Case("side files beside an adapter", "exact"),
    "A12": Case("LoRA on the embedding", "exact"),
    "A13": Case("targets as a regex, all-linear, absent", "exact"),
    "A14": Case("dotted targets", "exact"),
    "A15": Case("the config names less than the file holds", "refused"),
    "A16": Case("the config names more than the file holds", "exact"),
    "A17": Case("layers_to_transform on a mixture of experts", "exact"),
    "A18": Case("layer_replication", "refused"),
    "A20": Case("harmless initialisations", "exact"),
    "A21": Case("unknown keys that say nothing", "exact"),
    "A22": Case("unknown or unsupported keys that are active", "refused"),
    "A23": Case("another peft_type", "refused"),
    "A24": Case("ranks beyond the limit, and beyond the width", "refused"),
    "A26": Case("optional keys that are missing", "exact"),
    "A28": Case("an adapter's name left in the keys", "exact"),
    "A29": Case("an MLX adapter", "exact"),
    "A31": Case("Mixtral's experts by w1, w2, w3", "exact"),
    "A32": Case("Qwen's experts one by one", "exact"),
    "A36": Case("experts stacked in 3-D tensors, shared outer", "exact"),
    "A37": Case("some experts only, gate without up", "exact"),
    "A38": Case("LoRA on the router", "exact"),
    "A39": Case("Qwen2-MoE's shared expert and its gate", "exact"),
    "A40": Case("pickles", "refused"),
    "A41": Case("dtypes unlike the base's", "exact"),
    "A42": Case("transposed and wrong shapes", "refused"),
    "A43": Case("damaged and foreign files", "refused"),
    "A44": Case("an adapter without contents", "refused"),
    "A45": Case("half a pair", "refused"),
    "A46": Case("a base that is null, private or a laptop's path", "exact"),
    "A47": Case("a declared base that is another", "holds"),
    "A48": Case("fan_in_fan_out on linear layers", "exact"),
    "A49": Case("an adapter below the prefix; trailing slash", "holds"),
    "B06": Case("an adapter under the base's name", "holds"),
    "B07": Case("/v1/models is what answers", "holds"),
    "B08": Case("registered twice", "holds"),
    "B14": Case("unloaded by many at once", "holds"),
    "B25": Case("one error shape, with names and no paths", "holds"),
    "B26": Case("a yes means that it serves", "holds"),
    "B28": Case("the admin answer is a contract; switched off says so", "holds"),
    "C01": Case("base and several adapters in one batch", "exact"),
    "C03": Case("the base is what it is without LoRA", "exact"),
    "C05": Case("evicted and back again", "exact"),
    "C06": Case("odd ranks, alone, mixed, in one slot", "exact"),
    "C07": Case("gate is not up", "exact"),
    "C08": Case("experts of another column, and of another engine shard", "exact"),
    "C09": Case("adapters cut by columns and rows: engine shards", "exact"),
    "C10": Case("prompts of every length", "exact"),
    "C11": Case("alone and in a crowd, and again", "exact"),
    "C12": Case("an adapter of zeros is the base", "exact"),
    "C13": Case("chunks and preemption with several adapters", "exact"),
    "C14": Case("the scale is alpha / r", "exact"),
    "C17": Case("adapters take turns on a shared prefix", "exact"),
    "C18": Case("partial sums of shards count once: groups of the LoRA tier, engine shards", "exact"),
    "C19": Case("an adapter is itself on every path", "exact"),
    "D06": Case("many first requests for one cold adapter", "holds"),
    "D07": Case("more adapters than slots", "holds"),
    "D08": Case("unloading frees every tier", "holds"),
    "D09": Case("loaded, used and unloaded, again and again", "holds"),
    "D10": Case("memory counted at the start; running out of it", "holds"),
    "D11": Case("prefixes that begin alike", "holds"),
    "D12": Case("forms of an S3 address", "holds"),
    "D14": Case("endpoint, region, TLS of one's own", "holds"),
    "D15": Case("S3 errors as API errors", "holds"),
    "D16": Case("restarts forget nothing", "holds"),
    "D17": Case("some engines stall, come, go", "holds"),
    "D18": Case("the state that is told is the real one", "holds"),
    "D19": Case("created, deleted and created again; many at once", "holds"),
    "D21": Case("a step, or a site call, that hangs", "holds"),
    "D23": Case("healthy but dead", "holds"),
    "D24": Case("rolling restart: engines, LoRA servers, gateways", "holds"),
    "D25": Case("the broker is away, loses its state, is out of reach, finds a reader slow", "holds"),
    "D26": Case("the registry does not answer, and does again; it is emptied", "holds"),
    "D28": Case("cached files that vanish", "holds"),
    "D29": Case("the disk cache stays within its bytes", "holds"),
    "D30": Case("no reads once it is resident", "holds"),
    "D31": Case("two versions at once", "exact"),
    "D32": Case("names that do not exist cost nothing", "holds"),
    "D33": Case("an adapter goes back to where it was warm", "holds"),
}


@cache
def tests() -> tuple[str, ...]:
    """`file::function` of each test of a case."""
    return tuple(
        f"{path.name}::{node.name}"
        for path in sorted(HERE.glob("test_?_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def tests_of(case: str) -> list[str]:
    return [test for test in tests() if f"::test_{case.lower()}_" in test]


def table() -> str:
    lines = ["| case | about | verdict | test |", "|---|---|---|---|"]
    for case, (title, verdict, why) in CASES.items():
        shown = why if verdict == "open" else "<br>".join(f"`{test}`" for test in tests_of(case))
        lines.append(f"| {case} | {title} | {verdict} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
