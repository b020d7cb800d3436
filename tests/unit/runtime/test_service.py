"""The life of a process, watched from outside: what it exits with, and what it says."""

import signal
from pathlib import Path

from support.programs import Program


def test_sigterm_drains_then_stops_with_status_0(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        async def main(service):
            async def serve():
                try:
                    await asyncio.Event().wait()
                finally:
                    say("cleaned up")
            service.spawn(serve(), "serve")
            service.ready()
            say("ready")
            await service.draining.wait()
            say(service.state)
        run("test", main)
    """)  # fmt: skip
    program.wait_for("ready")
    program.process.send_signal(signal.SIGTERM)
    status, out, lines = program.end()
    assert status == 0
    assert out.split("\n")[:2] == ["draining", "cleaned up"]
    assert [line["message"] for line in lines] == ["ready", "draining"]


def test_a_task_that_dies_takes_the_process_with_it(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        async def main(service):
            async def die():
                raise ValueError("the reason")
            service.spawn(die(), "doomed")
            try:
                await asyncio.Event().wait()
            finally:
                say("main was told")
        run("test", main)
    """)  # fmt: skip
    status, out, lines = program.end()
    assert status == 1
    assert "main was told" in out
    assert "the reason" in lines[-1]["exception"]
    assert lines[-1]["level"] == "error"


def test_main_that_raises_exits_with_1(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        async def main(service):
            raise RuntimeError("at start")
        run("test", main)
    """)  # fmt: skip
    status, _, lines = program.end()
    assert status == 1
    assert "at start" in lines[-1]["exception"]


def test_main_that_returns_ends_what_it_spawned(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        async def main(service):
            service.spawn(asyncio.Event().wait(), "for ever")
        run("test", main)
    """)  # fmt: skip
    assert program.end()[0] == 0


def test_a_thread_of_ours_can_report_its_death(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        async def main(service):
            threading.Thread(target=lambda: service.fail_threadsafe(OSError("thread died"))).start()
            await asyncio.Event().wait()
        run("test", main)
    """)  # fmt: skip
    status, _, lines = program.end()
    assert status == 1
    assert "thread died" in lines[-1]["exception"]


def test_draining_has_a_limit(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        async def main(service):
            say("ready")
            await asyncio.Event().wait()
        run("test", main, drain_s=0.1)
    """)  # fmt: skip
    program.wait_for("ready")
    program.process.send_signal(signal.SIGTERM)
    status, _, lines = program.end()
    assert status == 0
    assert lines[-1]["message"] == "drain cut short"


def test_a_second_signal_does_not_wait_for_the_drain(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        async def main(service):
            say("ready")
            await service.draining.wait()
            say("draining")
            await asyncio.Event().wait()
        run("test", main, drain_s=3600)
    """)  # fmt: skip
    program.wait_for("ready")
    program.process.send_signal(signal.SIGINT)
    program.wait_for("draining")
    program.process.send_signal(signal.SIGINT)
    assert program.end()[0] == 0


def test_clean_up_that_hangs_is_ended_by_the_watchdog(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        import infinilora.runtime.service as module
        module.WATCHDOG_S = 0.2
        def stuck():
            time.sleep(3600)
        async def main(service):
            asyncio.get_running_loop().run_in_executor(None, stuck)
            await asyncio.sleep(0)
        run("test", main)
    """)  # fmt: skip
    status, _, lines = program.end()
    assert status == 1
    assert "hangs" in lines[-1]["message"]


def test_main_that_will_not_be_cancelled_is_ended_by_the_watchdog(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        import infinilora.runtime.service as module
        module.WATCHDOG_S = 0.2
        async def main(service):
            say("ready")
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue
        run("test", main, drain_s=0.1)
    """)  # fmt: skip
    program.wait_for("ready")
    program.process.send_signal(signal.SIGTERM)
    status, _, lines = program.end()
    assert status == 1
    assert "hangs" in lines[-1]["message"]


def test_what_is_stuck_says_so_whatever_else_it_is_asked(tmp_path: Path) -> None:
    program = Program(tmp_path, """
        async def main(service):
            service.ready()
            say(service.told(is_draining=False) + " " + service.told(is_draining=True))
            service.stuck()
            service.drain()
            say(service.told(is_draining=True) + " " + str(service.draining.is_set()))
        run("test", main)
    """)  # fmt: skip
    assert program.end()[1].splitlines() == ["ready draining", "stuck True"]
