"""`infinilora chat`: talk with a model. With a prompt it answers once; without one it keeps the conversation."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from infinilora.cli.api import Api, Json
from infinilora.cli.find import gateway
from infinilora.cli.options import ApiKey, Url, VarDir
from infinilora.cli.terminal import err, errors, out, show_error
from infinilora.protocol.errors import InfiniLoraError, InvalidRequest, Unavailable

Prompt = Annotated[list[str] | None, typer.Argument(help="Ask once. `-` reads the prompt from standard input.")]
Model = Annotated[str, typer.Option("--model", "-m", help="An adapter's name or a base model's; else the base.")]
System = Annotated[str, typer.Option("--system", help="A system message.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0: the likeliest token always.")]


def chat(
    prompt: Prompt = None,
    *,
    model: Model = "",
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    url: Url = "",
    api_key: ApiKey = "",
    var_dir: VarDir = Path(".var"),
) -> None:
    """Talk with the base model or an adapter."""
    with errors(), Api(gateway(url, var_dir), api_key=api_key) as api:
        named = model or _only_base(api)
        messages = [{"role": "system", "content": system}] if system else []
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        if prompt:
            text = sys.stdin.read() if prompt == ["-"] else " ".join(prompt)
            _answer(api, named, [*messages, {"role": "user", "content": text}], sampling)
        else:
            _converse(api, named, messages, sampling)


def _only_base(api: Api) -> str:
    bases = api.base_models()
    if not bases:
        raise Unavailable(f"{api.url} serves no model yet")
    if len(bases) > 1:
        raise InvalidRequest(f"several base models are served ({', '.join(bases)}); say which: --model NAME")
    return bases[0]


def _converse(api: Api, model: str, messages: list[Json], sampling: Json) -> None:
    """Read, answer, remember, until the end of input. Ctrl-C ends an answer; `/reset` forgets."""
    err.print(f"{model} at {api.url}; Ctrl-D ends, Ctrl-C stops an answer, /reset forgets", style="dim", markup=False)
    opening = list(messages)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if text == "/reset":
            messages = list(opening)
        elif text:
            messages = _turn(api, model, [*messages, {"role": "user", "content": text}], sampling)


def _turn(api: Api, model: str, messages: list[Json], sampling: Json) -> list[Json]:
    """One question and its answer; a question that failed is forgotten, and the conversation goes on."""
    try:
        return [*messages, {"role": "assistant", "content": _answer(api, model, messages, sampling)}]
    except InfiniLoraError as error:
        show_error(error)
        return messages[:-1]


def _answer(api: Api, model: str, messages: list[Json], sampling: dict[str, Any]) -> str:
    """Print an answer as it comes, and return it. What an interrupt leaves counts as the answer."""
    text = ""
    try:
        for piece in api.chat(model, messages, **sampling):
            out.print(piece, end="", markup=False)
            text += piece
    except KeyboardInterrupt:
        out.print(" [dim](stopped)[/dim]", end="")
    out.print()
    return text
