"""A LoRA server's end of a `cuda` link, as a process of its own; answers by the rule of support.links.

    python tests/support/cuda_link_server.py DIRECTORY NUM_BUFFERS BUFFER_BYTES device|host OFFERS

Prints what it chose of the engine's offers (JSON) as one JSON line, and at the end what the link ended with. A call
at SILENT_LAYER is never answered.
"""

import json
import sys
from pathlib import Path

from infinilora.link.cuda_driver import Regions
from infinilora.link.errors import LinkClosed
from infinilora.link.open import LinkSettings, Opener
from support.links import answer
from support.loopback_memory import memory_of

SILENT_LAYER = 98


def main(directory: str, num_buffers: str, buffer_bytes: str, signal: str, offers: str) -> None:
    regions = Regions(memory_of(Path(directory), has_mps=signal == "device"))
    opener = Opener(
        LinkSettings(directory=None, cuda=regions, num_buffers=int(num_buffers), buffer_bytes=int(buffer_bytes))
    )
    opening = opener.choose(json.loads(offers))
    print(json.dumps({"chosen": opening.chosen, "secret": opening.secret.hex()}), flush=True)
    end = opening.wait(30)
    try:
        while True:
            call = end.recv(0.2)
            if call is not None and call.header.layer == SILENT_LAYER:
                end._is_owing = False
            elif call is not None:
                answer(end, call)
    except LinkClosed as error:
        print(error.message, end.is_quarantined, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
