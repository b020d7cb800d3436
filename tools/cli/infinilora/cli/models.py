"""Models as the command names them: a demo model by its name, or a directory.

Making one needs torch, so that runs as `python -m infinilora.engine.demo`, whose progress comes here as JSON lines.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from infinilora.cli.settings import child_env
from infinilora.protocol.errors import InvalidRequest, Unavailable, WireError, from_wire

DEMO_MODELS = {
    "smollm2-135m": "SmolLM2-135M-Instruct, a small dense model (0.5 GB)",
    "smollm2-moe": "the same, upcycled into 4 experts with a top-2 router (1.5 GB)",
}

OnProgress = Callable[[str, int, int], None]
"""Called with a stage's name, and how many of how many units are done."""


class _Line(msgspec.Struct, frozen=True):
    """Any line of `infinilora.engine.demo`: progress, the end, or a WireError."""

    type: str = "error"
    stage: str = ""
    done: int = 0
    total: int = 0
    code: str = ""
    message: str = ""
    retryable: bool = False


def find_model(name: str, var_dir: Path) -> Path:
    """The directory of a model that is ready to be served. Raises InvalidRequest when there is none."""
    path = demo_path(name, var_dir) if name in DEMO_MODELS else Path(name).expanduser().absolute()
    if (path / "config.json").is_file():
        return path
    if name in DEMO_MODELS:
        raise InvalidRequest(f"{name} is not prepared: `infinilora model prepare {name}`", param="model")
    raise InvalidRequest(
        f"{name!r} is neither a demo model ({', '.join(DEMO_MODELS)}) nor a Hugging Face directory "
        f"({path / 'config.json'} does not exist)",
        param="model",
    )


def demo_path(name: str, var_dir: Path) -> Path:
    return var_dir.absolute() / "models" / name


def is_prepared(name: str, var_dir: Path) -> bool:
    return (demo_path(name, var_dir) / "config.json").is_file()


def prepare(name: str, var_dir: Path, on_progress: OnProgress) -> Path:
    """Make a demo model unless it is there; blocking, a minute or so. Raises what stopped it."""
    if name not in DEMO_MODELS:
        raise InvalidRequest(f"no demo model {name!r}; wanted one of {', '.join(DEMO_MODELS)}", param="model")
    out = demo_path(name, var_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_name(f"{name}.log")
    command = [sys.executable, "-m", "infinilora.engine.demo", name, "--out", str(out)]
    env = child_env(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    with (
        log.open("wb") as noise,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True, env=env) as worker,  # noqa: S603
    ):
        assert worker.stdout is not None  # noqa: S101 - a pipe was asked for
        is_done = _follow(worker.stdout, on_progress)
    if not is_done:
        raise Unavailable(f"preparing {name} ended with status {worker.returncode}; see {log}")
    log.unlink()
    return out


def _follow(lines: IO[str], on_progress: OnProgress) -> bool:
    """Report progress lines until the end; True when the model is ready. Raises the worker's error."""
    for text in lines:
        line = msgspec.json.decode(text, type=_Line)
        if line.type == "progress":
            on_progress(line.stage, line.done, line.total)
        elif line.type == "ready":
            return True
        else:
            raise from_wire(WireError(code=line.code, message=line.message, retryable=line.retryable))
    return False
