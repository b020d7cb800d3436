"""An engine's steps over `cuda` links to LoRA servers with a device: on a GPU where there is one, else interpreted.

Everything between the tokens is what the services run: leases over gRPC, the pool, the Triton kernels, the mailboxes.
"""

import asyncio
import os
import signal as signals
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.grouplink import Identity
from infinilora.engine.lora.remote import RemoteLora
from infinilora.engine.sched.scheduler import Limits
from infinilora.link.open import LinkSettings
from infinilora.protocol import keys
from infinilora.protocol.adapter import manifest_digest
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.rpc import Channels
from infinilora.weights.ingest import ingest
from support.engines import TestEngine, load_tiny
from support.every_site import living
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.shard_pools import error_of, prompt
from support.tiny_models import make_tiny_model
from support.waiting import eventually

pytestmark = pytest.mark.timeout(240)

SERVER = Path(__file__).parents[1] / "support" / "cuda_lora_server.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = Limits(max_running=8, step_tokens=16)
ASKED: dict[str, Any] = {"max_tokens": 2, "logprobs": 0, "prompt_logprobs": 0}
START_S = PATIENT_S = 60.0
LATE_S = 0.02 if DEVICE == "cpu" else 20.0
"""What a hanging server is waited for. A poll of the interpreter counts for 20 us and takes a thousand; on a GPU the
other server may have to compile what it answers with meanwhile."""


class House:
    """A tiny model of some family, two adapters in a store, and the memory that stands for the GPUs'."""

    def __init__(self, family: str, work: Path) -> None:
        self.work = work
        self.tiny = make_tiny_model(family, work / "model")
        self.model: LoadedModel = load_tiny(self.tiny.directory, device=DEVICE, dtype="fp32")
        self.oracle = Oracle(self.tiny.directory)
        (work / "memory").mkdir()
        (work / "card.json").write_bytes(msgspec.json.encode(self.model.card))
        self.files = {self._add(seed): work / f"a{seed}" for seed in range(2)}

    def _add(self, seed: int) -> Digest:
        directory, packed = self.work / f"a{seed}", self.work / f"packed-{seed}"
        targets = (*ATTENTION, *MLP) if seed else ATTENTION
        write_adapter(directory, self.tiny.directory, rank=3 + seed, targets=targets, seed=seed, std=0.25)
        digest = manifest_digest(ingest(directory, self.model.card, packed))
        DirectoryBlobs(self.work / "store").put_file(keys.packed(digest), packed)
        return digest

    @contextmanager
    def server(self, group: str, signal: str) -> Iterator[tuple[Group, "subprocess.Popen[str]"]]:
        with subprocess.Popen(
            [sys.executable, str(SERVER), str(self.work), group, signal],
            env=os.environ | {"PYTHONPATH": str(SERVER.parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                yield Group(name=group, address=process.stdout.readline().strip(), incarnation="i"), process
            finally:
                process.communicate(timeout=30)

    @asynccontextmanager
    async def engine(self, groups: list[Group], signal: str) -> AsyncIterator[tuple[TestEngine, RemoteLora]]:
        """An engine whose link to each of the groups is open, and a `cuda` one."""
        from infinilora.link.cuda_driver import Regions
        from support.loopback_memory import memory_of

        regions = Regions(memory_of(self.work / "memory", has_mps=signal == "device"))
        link = LinkSettings(directory=None, cuda=regions, is_on_device=DEVICE == "cuda")
        card = self.model.card
        identity = Identity(engine_id="e", incarnation="1", base=card.fingerprint, dtype="F32", max_rows=12)
        async with living() as service, Channels() as channels:
            lora = RemoteLora(card, identity, channels=channels, link=link, on_change=lambda: None)
            running = service.spawn(lora.run(), "links")
            lora.update_groups(groups)
            wanted = {group.name: "cuda" for group in groups}
            await eventually(lambda: lora.open_links == wanted, "the links are open", timeout_s=START_S)
            for clock in lora._clocks.values():  # an interpreter on a busy machine is slower than any deadline
                clock.deadline_s, clock.catch_up = PATIENT_S, lambda: None  # type: ignore[method-assign]
            yield TestEngine(self.model, lora, limits=LIMITS), lora
            lora.close()
            running.cancel()


@pytest.mark.parametrize(("family", "signal"), [("llama", "device"), ("llama", "host"), ("qwen2_moe", "device")])
async def test_what_an_engine_says_over_cuda_links_is_its_adapters_own(
    family: str, signal: str, tmp_path: Path
) -> None:
    house = House(family, tmp_path)
    with house.server("g", signal) as (group, _):
        async with house.engine([group], signal) as (engine, _):
            asked = [(prompt(3 + i), digest) for i, digest in enumerate([*house.files, None])]
            heard = [engine.ask(tokens, digest=digest, **ASKED) for tokens, digest in asked]
            await asyncio.to_thread(engine.finish, heard, within_s=200)
            engine.loop.check_idle()
    for told, (tokens, digest) in zip(heard, asked, strict=True):
        assert len(told.tokens) == 2
        assert error_of(told, tokens, house.oracle, None if digest is None else house.files[digest]) < 1e-3


async def test_rows_whose_deltas_a_hanging_server_owes_are_run_again_on_another_and_say_nothing_before(
    tmp_path: Path,
) -> None:
    """The engine's waits only launch, and the server's process lives: only `verify` sees that no delta came."""
    house = House("llama", tmp_path)
    lost, kept = house.files
    with house.server("g", "device") as (g, hanging), house.server("h", "device") as (h, _):
        async with house.engine([g, h], "device") as (engine, lora):
            lora.place({lost: ("g",), kept: ("h",)})
            heard = [engine.ask(prompt(3), digest=digest, **ASKED | {"max_tokens": 3}) for digest in (lost, kept)]
            while not all(one.tokens for one in heard):
                await asyncio.to_thread(engine.turn_or_yield)
            before = [len(one.tokens) for one in heard]
            assert not any(one.is_over for one in heard)
            hanging.send_signal(signals.SIGUSR1)
            lora.place({lost: ("h",), kept: ("h",)})
            for clock in lora._clocks.values():
                clock.deadline_s = LATE_S
            await asyncio.to_thread(engine.turn)
            for clock in lora._clocks.values():
                clock.deadline_s = PATIENT_S
            assert [len(one.tokens) - n for one, n in zip(heard, before, strict=True)] == [0, 1]
            await asyncio.to_thread(engine.finish, heard, within_s=200)
            assert lora.view(kept).lease is None, "both leases were given up"
    for told, digest in zip(heard, (lost, kept), strict=True):
        assert len(told.tokens) == 3
        assert error_of(told, prompt(3), house.oracle, house.files[digest]) < 1e-3
