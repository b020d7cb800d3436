"""What stands still ends its process, and what moves or has nothing to do does not."""

from pathlib import Path

import pytest

from infinilora.runtime.watchdog import CPU_LIMIT_S, DEVICE_LIMIT_S, Stillness, limit_s
from support.programs import Program

BODY = """
    import ctypes
    from infinilora.runtime.watchdog import Watchdog
    class Work:
        looks = 0
    async def main(service):
        def progress():
            Work.looks += 1
            return {progress}
        def hang():
            {hang}
        with Watchdog(1.0, lambda: say("told")) as watchdog:
            threading.Thread(target=hang, name="step", daemon=True).start()
            watchdog.watch("step", progress)
            while Work.looks < 20:  # in two limits and a half
                await asyncio.sleep(0.01)
    run("test", main)
"""


@pytest.mark.parametrize(
    ("looks", "still_s"),
    [
        ([(1, 1.0), (1, 1.0), (1, 1.0)], 2.0),
        ([(1, 1.0), (2, 1.0), (2, 1.0)], 1.0),
        ([(1, 1.0), (None, 1.0), (1, 1.0)], 0.0),
        ([(None, 1.0), (None, 1.0)], 0.0),
        ([(1, 1.0), (1, 3600.0)], 2.0),
    ],
    ids=["stands still", "has moved", "was idle", "is idle", "nobody looked for an hour"],
)
def test_how_long_a_count_has_stood_still(looks: list[tuple[int | None, float]], still_s: float) -> None:
    stillness = Stillness()
    for count, since_s in looks:
        stillness.look(count, since_s, most_s=2.0)
    assert stillness.still_s == still_s


def test_a_limit_that_is_not_set_is_that_of_the_device() -> None:
    assert [limit_s(0, "cpu"), limit_s(0, "cuda"), limit_s(3, "cuda")] == [CPU_LIMIT_S, DEVICE_LIMIT_S, 3]


def test_what_stands_still_is_told_and_ends_the_process_and_the_log_says_where(tmp_path: Path) -> None:
    program = Program(tmp_path, BODY.format(hang="ctypes.CDLL(None).pause()", progress="7"))
    status, out, lines = program.end()
    assert status == 1
    assert out == "told\n"
    assert (lines[-1]["message"], lines[-1]["watched"]) == (
        "stuck: nothing has moved for too long; the process ends",
        "step",
    )
    assert "ctypes.CDLL(None).pause()" in lines[-1]["stack"]


def test_what_holds_the_interpreter_while_it_hangs_ends_the_process_too(tmp_path: Path) -> None:
    program = Program(tmp_path, BODY.format(hang="time.sleep(0.2); ctypes.PyDLL(None).pause()", progress="Work.looks"))
    status, _, words = program.end_raw()
    assert status == 1
    assert "Timeout (" in words
    assert "in hang" in words


@pytest.mark.parametrize("progress", ["Work.looks", "None"], ids=["it moves", "it has nothing to do"])
def test_what_moves_or_has_nothing_to_do_is_left_alone(tmp_path: Path, progress: str) -> None:
    program = Program(tmp_path, BODY.format(hang="ctypes.CDLL(None).pause()", progress=progress))
    status, out, _ = program.end()
    assert (status, out) == (0, "")
