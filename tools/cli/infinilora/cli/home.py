"""The directory that one local system lives in, and the little that must be kept between its lives.

    .var/ up.lock        held while a system runs; a second one is refused
          secrets.json   0600; made once, so that the servers' data can be opened again
          ports.json     of the servers, so that they are found where they were
          stack.json     where the running system is; gone when it stops
          log/ models/ cache/ nats/ redis/ store/

Knows no process and no network.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

import msgspec

from infinilora.protocol.errors import Conflict, InvalidRequest

SHM = Path("/dev/shm")  # noqa: S108 - memory that both ends of a link map


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Passwords of the local servers and the token between services."""

    nats: str
    redis: str
    s3_access_key: str
    s3_secret_key: str
    rpc_token: str
    admin_key: str = ""
    """Empty in a file that is older than this; one is added then."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What other commands find of a running system."""

    pid: int
    url: str
    coordinator_url: str


class Home:
    """Owned by one process from `lock` to `unlock`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._lock: IO[str] | None = None

    @property
    def logs(self) -> Path:
        return self.directory / "log"

    @property
    def ports_file(self) -> Path:
        return self.directory / "ports.json"

    @property
    def link_dir(self) -> Path:
        """Where the rings of links are made: shared memory where there is any, else a directory here."""
        mark = hashlib.sha256(str(self.directory).encode()).hexdigest()[:12]
        if SHM.is_dir() and os.access(SHM, os.W_OK):
            return SHM / f"infinilora-{os.getuid()}-{mark}"
        return self.directory / "link"

    def lock(self) -> None:
        """Take the directory over, and clear what a killed owner left.

        Raises Conflict while another lives, InvalidRequest where nothing can be kept.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            file = (self.directory / "up.lock").open("a+")
        except OSError as error:
            words = f"{self.directory} cannot be written ({error.strerror}); choose another directory: --var-dir"
            raise InvalidRequest(words) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise Conflict(f"{self.directory} is in use{self._by()}; stop it, or use another --var-dir") from None
        self._lock = file
        self.clear()
        self.link_dir.mkdir(mode=0o700, parents=True)

    def unlock(self) -> None:
        if self._lock:
            self.clear()
            self._lock.close()
            self._lock = None

    def clear(self) -> None:
        (self.directory / "stack.json").unlink(missing_ok=True)
        shutil.rmtree(self.link_dir, ignore_errors=True)

    def secrets(self) -> Secrets:
        """The secrets of this directory, made on first use."""
        path = self.directory / "secrets.json"
        kept = msgspec.json.decode(path.read_bytes(), type=Secrets) if path.exists() else _new_secrets()
        made = kept if kept.admin_key else msgspec.structs.replace(kept, admin_key=secrets.token_urlsafe(24))
        if made != kept or not path.exists():
            write_private(path, json.dumps(msgspec.to_builtins(made), indent=2) + "\n")
        return made

    def say_running(self, running: Running) -> None:
        write_private(self.directory / "stack.json", msgspec.json.encode(running).decode() + "\n")

    def running(self) -> Running | None:
        path = self.directory / "stack.json"
        return msgspec.json.decode(path.read_bytes(), type=Running) if path.is_file() else None

    def new_log(self, name: str) -> Path:
        """The log file of a program of this start; that of the start before is kept as `.1`."""
        path = self.logs / f"{name}.log"
        if path.exists():
            path.replace(path.with_suffix(".log.1"))
        return path

    def _by(self) -> str:
        running = self.running()
        return f" by process {running.pid}, serving {running.url}" if running else ""


def _new_secrets() -> Secrets:
    return Secrets(
        nats=secrets.token_urlsafe(24),
        redis=secrets.token_urlsafe(24),
        s3_access_key=secrets.token_hex(10),
        s3_secret_key=secrets.token_urlsafe(24),
        rpc_token=secrets.token_urlsafe(24),
        admin_key=secrets.token_urlsafe(24),
    )


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600, exist_ok=False)
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
