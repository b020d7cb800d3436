"""`python -m infinilora.engine`: one base-model engine. Settings come from the environment (settings.py)."""

from functools import partial

from infinilora.engine.serve import serve
from infinilora.engine.settings import Settings
from infinilora.runtime import log
from infinilora.runtime.service import run
from infinilora.runtime.settings import read


def main() -> None:
    settings = read(Settings)
    log.setup("engine", settings.log_level, process_id=settings.engine_id)
    run("engine", partial(serve, settings), drain_s=settings.drain_s)


if __name__ == "__main__":
    main()
