"""Where the system is that a command speaks to: the one named, else the one of the var directory, else port 8000."""

from pathlib import Path

from infinilora.cli.api import Api
from infinilora.cli.home import Home
from infinilora.cli.options import DEFAULT_URL
from infinilora.protocol.errors import InvalidRequest


def gateway(url: str, var_dir: Path) -> str:
    running = None if url else Home(var_dir).running()
    return running.url if running else url or DEFAULT_URL


def coordinator(url: str, var_dir: Path) -> str | None:
    """None where nobody has said it and no local system runs here."""
    running = None if url else Home(var_dir).running()
    return running.coordinator_url if running else url or None


def operator(url: str, key: str, var_dir: Path) -> Api:
    """A coordinator, shown an operator's key: the one that is given, else that of the var directory's system."""
    where = coordinator(url, var_dir)
    if where is None:
        raise InvalidRequest(f"no coordinator is known: {var_dir} runs no system here; give --coordinator URL")
    home = Home(var_dir)
    own_key = home.secrets().admin_key if not url and home.running() else ""
    return Api(where, api_key=key or own_key, is_coordinator=True)
