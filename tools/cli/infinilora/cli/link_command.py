"""`infinilora bench link`: measure what this machine's links and memory do, into a file of constants."""

import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from infinilora.cli.home import SHM
from infinilora.cli.options import VarDir
from infinilora.cli.settings import child_env
from infinilora.cli.terminal import errors, out, show_table
from infinilora.protocol.errors import Unavailable

if TYPE_CHECKING:  # numpy takes a tenth of a second to import, which the other commands need not spend
    from infinilora.planner.constants import Constants

FILE = "constants.json"
"""In the var directory: where `infinilora up --lora-shape auto` looks."""
MEASURE_S = 300
TRIPS = 2000

Out = Annotated[Path | None, typer.Option("--out", help="The file to write. Default: constants.json of --var-dir.")]
Trips = Annotated[int, typer.Option("--n", min=50, help="Round trips of each kind.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Cores that read memory together; 0: all.")]


def link(*, out_file: Out = None, n: Trips = TRIPS, threads: Threads = 0, var_dir: VarDir = Path(".var")) -> None:
    """Measure link and memory; `infinilora plan --constants FILE` and `up --lora-shape auto` reckon with it."""
    from infinilora.planner.constants import write_constants

    target = out_file or var_dir / FILE
    with errors():
        target.parent.mkdir(parents=True, exist_ok=True)
        found = measured(n=n, threads=threads or os.cpu_count() or 1)
        write_constants(found, target)
    table = Table("constant", "value", "source", box=None, pad_edge=False)
    for name in found.__struct_fields__:
        constant = getattr(found, name)
        table.add_row(name, f"{constant.value:.4g}", constant.source)
    show_table(table)
    out.print(f"written to {target}", markup=False)


def measured(*, n: int, threads: int) -> "Constants":
    """The planner's constants with those that can be measured here; some seconds. Torch has a process of its own."""
    from infinilora.planner.constants import read_constants, with_measured

    directory = SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())
    options = ["--n", str(n), "--threads", str(threads), "--directory", str(directory)]
    command = [sys.executable, "-m", "infinilora.bench.link", *options]
    try:
        done = subprocess.run(command, capture_output=True, env=child_env(), check=False, timeout=MEASURE_S)  # noqa: S603 - ours
    except subprocess.TimeoutExpired:
        raise Unavailable(f"measuring the links took longer than {MEASURE_S} s") from None
    if done.returncode:
        raise Unavailable(f"measuring the links ended with status {done.returncode}: {done.stderr.decode()[-500:]}")
    values = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, float])
    day = datetime.now(UTC).date().isoformat()
    source = f"measured by `infinilora bench link` on {day}: shm between two processes, {threads} threads"
    return with_measured(read_constants(), values, source)
