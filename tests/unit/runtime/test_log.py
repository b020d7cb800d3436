"""Each record is one line of JSON."""

import json
import logging

from infinilora.runtime import telemetry
from infinilora.runtime.log import JsonLines


def line_of(message: str, *, exc_info: bool = False, **extra: object) -> dict[str, object]:
    error = ValueError("the cause")
    info = (ValueError, error, None) if exc_info else None
    record = logging.getLogger("infinilora.x").makeRecord(
        "infinilora.x", logging.INFO, "f.py", 1, message, (), info, extra=extra
    )
    text = JsonLines("engine", "e1").format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert isinstance(line, dict)
    return line


def test_message_fields_and_process_stand_side_by_side() -> None:
    line = line_of("adapter staged", adapter_id="sha256:1", duration_ms=12)
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "infinilora.x",
        "message": "adapter staged",
        "service": "engine",
        "process_id": "e1",
        "adapter_id": "sha256:1",
        "duration_ms": 12,
    }


def test_a_traceback_stays_in_its_line() -> None:
    assert "the cause" in str(line_of("died", exc_info=True)["exception"])


def test_a_value_that_json_does_not_know_is_written_as_text() -> None:
    assert "object at" in str(line_of("odd", thing=object())["thing"])


def test_the_current_trace_is_named() -> None:
    with telemetry.attached(telemetry.from_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")):
        assert line_of("x")["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
