"""Has an operation of a running service hang, or find no memory (hanging/sitecustomize.py says which, and how)."""

import os
from pathlib import Path

HOLDING = "holding the interpreter"
FREE = "free"
NO_MEMORY = "no memory"
SITE = Path(__file__).with_name("hanging")


class Hangs:
    """In services that were started with `environment`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
        return {"HANG_DIR": str(self._directory), "PYTHONPATH": path}

    def order(self, service: str, how: str = FREE) -> None:
        """The next operation in any process of this service hangs."""
        part = self._directory / f"{service}.part"
        part.write_text(how)
        part.rename(self._directory / service)

    def is_taken(self, service: str) -> bool:
        return not (self._directory / service).exists()
