"""`python -m infinilora.lora_server`: one shard of a LoRA server group. Settings come from the environment."""

from functools import partial

from infinilora.lora_server.settings import Settings
from infinilora.runtime import log
from infinilora.runtime.service import run
from infinilora.runtime.settings import read


def main() -> None:
    settings = read(Settings)
    log.setup("lora-server", settings.log_level, process_id=settings.id)
    # Not before: torch takes seconds to import, and wrong settings are told at once.
    from infinilora.lora_server.worker import serve

    run("lora-server", partial(serve, settings), drain_s=settings.drain_s)


if __name__ == "__main__":
    main()
