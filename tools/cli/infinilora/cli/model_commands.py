"""`infinilora model`: the demo models."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskID

from infinilora.cli import models
from infinilora.cli.options import VarDir
from infinilora.cli.terminal import bars, err, errors, out

app = typer.Typer(no_args_is_help=True, help="Demo models.")

Name = Annotated[str, typer.Argument(help=", ".join(models.DEMO_MODELS))]


@app.command()
def prepare(name: Name, var_dir: VarDir = Path(".var")) -> None:
    """Make a demo model: download its weights once, and convert them to an ordinary Hugging Face directory."""
    with errors():
        out.print(str(prepared(name, var_dir)))


@app.command(name="ls")
def list_models(var_dir: VarDir = Path(".var")) -> None:
    """List the demo models."""
    for name, what in models.DEMO_MODELS.items():
        state = str(models.demo_path(name, var_dir)) if models.is_prepared(name, var_dir) else "not prepared"
        out.print(f"{name:14} {what}; {state}")


def ready_model(name: str, var_dir: Path) -> Path:
    """The directory of a model: of one of the demo, which is prepared if it was not, or the one that is named."""
    return prepared(name, var_dir) if name in models.DEMO_MODELS else models.find_model(name, var_dir)


def prepared(name: str, var_dir: Path) -> Path:
    """Prepare with a progress bar for each stage; at once when it was done before."""
    if name in models.DEMO_MODELS and models.is_prepared(name, var_dir):
        return models.demo_path(name, var_dir)
    err.print(f"preparing {name}, once: {models.DEMO_MODELS.get(name, name)}")
    with bars() as progress:
        stages: dict[str, TaskID] = {}

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = progress.add_task(f"{name}: {stage}", total=total)
            progress.update(stages[stage], completed=done, total=total)

        return models.prepare(name, var_dir, on_progress)
