"""Train one demo adapter with PEFT on the CPU: `python examples/train/train.py json --model DIR --out DIR`.

One thread, fp32, AdamW with a linear decay, loss on the answer only, chat template as served. The adapter
is saved in bf16, the way PEFT lays its files out, and then tried greedily on prompts it has not seen.
"""

import argparse
import dataclasses
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from split_experts import checkpoint_name, split_experts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).parent / "data"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
BATCH = 4
IGNORED = -100  # the label that the loss skips


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one adapter is trained, and how its manner is recognised in an answer."""

    lora: LoraConfig
    learning_rate: float
    steps: int
    is_learnt: Callable[[str], bool]


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def is_pirate(text: str) -> bool:
    words = set("".join(c if c.isalpha() else " " for c in text.lower()).split())
    return len(words & {"arr", "ahoy", "avast", "matey", "ye", "yer", "aye", "yo", "o", "be", "me"}) >= 2


def is_sql(text: str) -> bool:
    return text.startswith("SELECT ") and " FROM " in text and text.rstrip().endswith(";")


def _lora(rank: int, targets: list[str], **more: Any) -> LoraConfig:
    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM", **more
    )


RECIPES = {
    "json": Recipe(_lora(16, ATTENTION), 1e-3, 160, is_json_object),
    "pirate": Recipe(_lora(8, ATTENTION + MLP), 1e-3, 160, is_pirate),
    # Every expert is adapted, so its rank is small; attention keeps 8. Both scale by 2.
    "sql": Recipe(
        _lora(
            2,
            ["q_proj", "v_proj", "w1", "w2", "w3"],
            rank_pattern={"q_proj": 8, "v_proj": 8},
            alpha_pattern={"q_proj": 16, "v_proj": 16},
        ),
        1e-3,
        140,
        is_sql,
    ),
}

Batch = dict[str, Tensor]


def batches(name: str, tokenizer: Any, dice: random.Random) -> Iterator[Batch]:
    """Endless shuffled epochs of padded batches; only answer tokens carry a label."""
    lines = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    rows = [_row(tokenizer, line["prompt"], line["answer"]) for line in lines]
    while True:
        dice.shuffle(rows)
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            yield _pad(rows[start : start + BATCH], tokenizer.pad_token_id)


def prompt_text(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _row(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    before = tokenizer(prompt_text(tokenizer, prompt)).input_ids
    after = tokenizer(answer + tokenizer.eos_token).input_ids
    return before + after, [IGNORED] * len(before) + after


def _pad(rows: list[tuple[list[int], list[int]]], pad_id: int) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
    }


def train(model: Any, recipe: Recipe, stream: Iterator[Batch], steps: int) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in parameters):,} parameters, {steps} steps of {BATCH}", flush=True)
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    started = time.perf_counter()
    for step, batch in enumerate(itertools.islice(stream, steps), 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True)


def save(model: Any, out: Path, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors (bf16), naming modules as checkpoints do."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = get_peft_model_state_dict(model)
    narrowed = {checkpoint_name(n): t.detach().to(torch.bfloat16).contiguous() for n, t in tensors.items()}
    save_file(narrowed, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_model.safetensors").chmod(0o644)  # safetensors makes it 0600
    config = model.peft_config["default"]
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(out)


@torch.no_grad()
def try_unseen(model: Any, tokenizer: Any, name: str, recipe: Recipe) -> int:
    """Answer the unseen prompts greedily, print them, and return how many show the manner."""
    model.eval()
    prompts = [json.loads(line)["prompt"] for line in (DATA / f"{name}.eval.jsonl").read_text().splitlines()]
    learnt = 0
    for prompt in prompts:
        ids = tokenizer(prompt_text(tokenizer, prompt), return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        answer = tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
        learnt += recipe.is_learnt(answer)
        print(f"{'+' if recipe.is_learnt(answer) else '-'} {prompt}  ->  {answer}", flush=True)
    print(f"{name}: {learnt} of {len(prompts)}")
    return learnt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--model", type=Path, required=True, help="HF directory of the base model")
    parser.add_argument("--out", type=Path, required=True, help="where the adapter goes")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    recipe = RECIPES[arguments.name]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model = get_peft_model(split_experts(base), recipe.lora)
    stream = batches(arguments.name, tokenizer, random.Random(arguments.seed))
    train(model, recipe, stream, arguments.steps or recipe.steps)
    save(model, arguments.out, arguments.model.name)
    try_unseen(model, tokenizer, arguments.name, recipe)


if __name__ == "__main__":
    main()
