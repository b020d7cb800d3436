"""The server's end of a link as a process of its own: `python link_peer.py SETTINGS_JSON`, offers on stdin.

Prints what it chose, then answers every call with x + layer (and, where the call is routed, the sums of its ids
and weights) until the link closes; then prints how many calls it saw. `seed` scatters small pauses between calls.
"""

import json
import random
import sys
import time
from pathlib import Path

import torch

from infinilora.link import shm
from infinilora.link.errors import LinkClosed
from infinilora.link.layout import SECRET_BYTES, create_ring_file
from infinilora.link.open import LinkSettings, Opener
from infinilora.link.server_end import Call, ServerEnd


def main() -> None:
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    if settings["backend"] == "tcp":
        opener = Opener(LinkSettings(directory=None, **settings["buffers"]))
        opening = opener.choose([{"backend": "tcp"}])
        print(json.dumps({"chosen": opening.chosen, "secret": opening.secret.hex()}), flush=True)
        end = opening.wait(20)
    else:
        path, secret = Path(settings["path"]), bytes(SECRET_BYTES)
        ring = create_ring_file(path, secret, **settings["buffers"])
        end = shm.server_end(ring, is_native=settings["backend"] == "native")
        print(json.dumps({"path": str(path), "secret": secret.hex()}), flush=True)
    try:
        serve(end, random.Random(settings["seed"]), settings["pauses"])
    except LinkClosed:
        print(json.dumps({"closed": True}), flush=True)


def serve(end: ServerEnd, rng: random.Random, pauses: bool) -> None:
    while True:
        call = end.recv(1.0)
        if call is None or call.x is None:
            continue
        if pauses and rng.random() < 0.01:
            time.sleep(rng.choice((0, 0, 0.0002)))
        answer(end, call)


def answer(end: ServerEnd, call: Call) -> None:
    assert call.x is not None
    out = end.reply_buffer(call)
    torch.add(call.x, call.header.layer, out=out)
    if call.topk_ids is not None:
        out += call.topk_ids.sum(1, keepdim=True)
    if call.topk_weights is not None:
        out += call.topk_weights.sum(1, keepdim=True)
    end.reply(call)


if __name__ == "__main__":
    main()
