"""Logs as JSON lines on stderr: constant message, fields beside it, trace id when there is one.

logger.info("adapter staged", extra={"adapter_id": digest, "duration_ms": 12})
"""

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec
from opentelemetry import trace
from typing_extensions import override

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonLines(logging.Formatter):
    """One record, one line of JSON. `extra` fields stand beside the standard ones."""

    def __init__(self, service: str, process_id: str = "") -> None:
        super().__init__()
        self._who = {"service": service, "process_id": process_id} if process_id else {"service": service}

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._who,
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"] = f"{span.trace_id:032x}"
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def setup(service: str, level: str = "info", *, process_id: str = "", stream: TextIO | None = None) -> None:
    """Send all logging of this process through one handler; third-party chatter starts at warning."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(service, process_id))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    # Its warnings hold the hosts and paths of the object store; who calls it logs what went wrong.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    logging.getLogger("infinilora").setLevel(level.upper())
