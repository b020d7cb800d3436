"""Where the system is that a command speaks to: the one named, else the one of the var directory, else port 8000."""

from pathlib import Path

from infinilora.cli.home import Home
from infinilora.cli.options import DEFAULT_URL


def gateway(url: str, var_dir: Path) -> str:
    running = None if url else Home(var_dir).running()
    return running.url if running else url or DEFAULT_URL


def coordinator(url: str, var_dir: Path) -> str | None:
    """None where nobody has said it and no local system runs here."""
    running = None if url else Home(var_dir).running()
    return running.coordinator_url if running else url or None
