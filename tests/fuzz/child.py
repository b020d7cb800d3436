"""One round of fuzzing in a process with limits: `python child.py KIND SEED COUNT`, one JSON line at the end.

A good input is changed in a few places, by hypothesis' choice, and given to the code that first meets such bytes.
It may be taken or refused by name; any other exception, a second of processor time for one input, or memory past
the limit that the process was started with ends it. What is taken must hold what it promises.
"""

import gzip
import io
import json
import logging
import math
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from infinilora.gateway.uploads import _Form
from infinilora.protocol.errors import AdapterInvalid, InvalidRequest, SourceNotFound
from infinilora.weights.exports import is_mlx, mlx_rules
from infinilora.weights.peft import _parse_config
from infinilora.weights.rules import rules_of
from infinilora.weights.tensorfile import NUMPY_DTYPES, open_tensors
from infinilora.weights.unpack import KEPT, FileLimits, unpack_file

MAX_INPUT_S = 1.0
STUCK_S = 30
REFUSALS = (AdapterInvalid, InvalidRequest, SourceNotFound)
LIMITS = FileLimits(max_bytes=20_000, max_entries=50)

Edit = tuple[str, int, int, bytes]
"""What to do, two places in the input (taken modulo its length), and bytes to do it with."""


def changed(data: bytes, edits: list[Edit]) -> bytes:
    """The input after all edits."""
    for kind, first, second, new in edits:
        at, end = sorted((first % (len(data) + 1), second % (len(data) + 1)))
        match kind:
            case "put":
                data = data[:at] + new + data[at + len(new) :]
            case "insert":
                data = data[:at] + new + data[at:]
            case "cut":
                data = data[:at] + data[min(end, at + 40) :]
            case "repeat":
                data = data[:end] + data[at:end] + data[end:]
            case _:
                data = data[:at]
    return data


class Entry(NamedTuple):
    """Good inputs, bytes that mean something in their format, and what meets them first."""

    good: tuple[bytes, ...]
    words: tuple[bytes, ...]
    read: Callable[[bytes], None]


# Safetensors files --------------------------------------------------------------------------------


def tensor_file(table: dict[str, Any], num_bytes: int) -> bytes:
    header = json.dumps(table, separators=(",", ":")).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def a_tensor(begin: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + math.prod(shape) * 4]}


TABLE = {
    "__metadata__": {"format": "pt"},
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": a_tensor(0, [2, 4]),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": a_tensor(32, [4, 2]),
    "base_model.model.model.layers.0.mlp.experts.gate_up_proj.lora_A": a_tensor(64, [2, 1, 4]),
}


def read_tensors(data: bytes) -> None:
    path = SCRATCH / "adapter_model.safetensors"
    path.write_bytes(data)
    file = open_tensors(path)
    for name, info in file.tensors.items():
        assert file.read(name).nbytes == math.prod(info.shape) * NUMPY_DTYPES[info.dtype].itemsize
    assert sum(file.read(name).nbytes for name in file.tensors) == file.data.nbytes <= len(data)


# Configs ------------------------------------------------------------------------------------------

CONFIGS: tuple[dict[str, Any], ...] = (
    {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "mlp.down_proj"], "use_rslora": True},
    {
        "peft_type": "LORA",
        "target_modules": r".*\.(q|v)_proj",
        "exclude_modules": "(a+)+x",
        "rank_pattern": {r".*layers\.[0-3]\.": 4, "^q_proj": 2},
        "alpha_pattern": {"(.*)*down_proj": 3.5},
        "layers_to_transform": [0, 1],
        "layers_pattern": ["layers"],
        "peft_version": "0.18.1",
    },
    {
        "peft_type": "LORA",
        "target_parameters": ["experts.gate_up_proj"],
        "target_modules": "all-linear",
        "bias": "none",
    },
    {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}},
)
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.experts.3.down_proj", "a" * 60, "lm_head")


def read_config(data: bytes) -> None:
    config = _parse_config(data)
    rules = mlx_rules(config) if is_mlx(config) else rules_of(config)
    for module in MODULES:
        key = rules.target_key(module) or module
        assert rules.rank(key) >= 1
        assert math.isfinite(rules.scale(key))


# Archives -----------------------------------------------------------------------------------------

MEMBERS = (
    ("run/adapter_config.json", b"{}"),
    ("run/x/y.txt", b"z" * 700),
    ("run/adapter_model.safetensors", tensor_file(TABLE, 96)),
)


def tar_bytes(kind: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        for name, data in MEMBERS:
            info = tarfile.TarInfo(name if kind != tarfile.PAX_FORMAT else name.replace("x/", "ü" * 60 + "/"))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()[:6144]


def zip_bytes(method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in MEMBERS:
            archive.writestr(name, data)
    return buffer.getvalue()


def read_archive(data: bytes) -> None:
    target = Path(tempfile.mkdtemp(dir=SCRATCH))
    try:
        chosen = unpack_file(io.BytesIO(data), target, LIMITS)
        files = [path for path in target.rglob("*") if not path.is_dir()]
        assert chosen.parent == target
        assert {path.name for path in files} <= KEPT
        assert all(path.parent.parent == target and not path.is_symlink() for path in files)
        assert sum(path.stat().st_size for path in files) <= LIMITS.max_bytes
    finally:
        shutil.rmtree(target)


def read_compressed(data: bytes) -> None:
    """A tar that is broken inside a whole gzip: what is broken outside never gets so far."""
    read_archive(gzip.compress(data, 1))


# Forms --------------------------------------------------------------------------------------------

FORM = b"".join(
    b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % part
    for part in ((b"name", b"", b"a1"), (b"files", b'; filename="adapter_config.json"', b"{}"))
)


def read_form(data: bytes) -> None:
    form = _Form(b"b")
    seen = sum(len(event) for at in range(0, len(data), 7) for event in form.feed(data[at : at + 7]))
    form.finish()
    assert seen + sum(len(text) for _, text in form.fields) <= 4 * len(data)


ENTRIES = {
    "tensors": Entry(
        (tensor_file(TABLE, 96), tensor_file({}, 0)),
        (
            b"-1",
            b"1e400",
            b"99999999999999999999",
            b"[]",
            b"{",
            b"null",
            b'"F16"',
            b'"BF16"',
            b"\xff",
            b"\\ud800",
            b"0",
        ),
        read_tensors,
    ),
    "config": Entry(
        tuple(json.dumps(config).encode() for config in CONFIGS),
        (
            b"null",
            b"-1",
            b"1e999",
            b"[]",
            b"{}",
            b"(a|a)*$",
            b"(?P<",
            b"[",
            b"true",
            b"\xff",
            b"\\ud800",
            b'"mica"',
            b"0",
        ),
        read_config,
    ),
    "archive": Entry(
        (*(tar_bytes(k) for k in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)), *(zip_bytes(m) for m in (0, 8))),
        (b"..", b"/", b"\0", b"\xff" * 12, b"L", b"x", b"77777777777", b"2", b"1", b"PK\x01\x02", b"PK\x05\x06", b"S"),
        read_archive,
    ),
    "compressed": Entry(
        tuple(tar_bytes(kind) for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)),
        (b"..", b"\0", b"\x80", b"\xff" * 12, b"K", b"x", b"g", b"77777777777", b"S", b"GNU.sparse.", b"99 size=9\n"),
        read_compressed,
    ),
    "form": Entry(
        (FORM + b"--b--\r\n",),
        (b"--b\r\n", b"--b--", b"\r\n\r\n", b"filename*=utf-8''x", b'"', b"\0", b"\xff", b": ", b"; ", b"name="),
        read_form,
    ),
}


def fuzz(entry: Entry, start: int, count: int) -> dict[str, Any]:
    """Run `count` inputs; raises what the reader should not have."""
    outcomes: Counter[str] = Counter()
    slowest = [0.0]
    place = st.integers(0, 1 << 16)
    edit = st.tuples(
        st.sampled_from(("put", "put", "insert", "cut", "repeat", "end")),
        place,
        place,
        st.sampled_from(entry.words) | st.binary(min_size=1, max_size=4),
    )

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(good=st.sampled_from(entry.good), edits=st.lists(edit, min_size=1, max_size=5))
    def one(good: bytes, edits: list[Edit]) -> None:
        data = changed(good, edits)
        signal.alarm(STUCK_S)
        started_s = time.process_time()
        try:
            entry.read(data)
            outcomes["taken"] += 1
        except REFUSALS as error:
            assert error.message
            outcomes[error.code] += 1
        finally:
            signal.alarm(0)
        took_s = time.process_time() - started_s
        slowest[0] = max(slowest[0], took_s)
        assert took_s < MAX_INPUT_S, f"{took_s:.2f} s for {data!r}"

    one()
    return {"inputs": sum(outcomes.values()), "outcomes": outcomes, "slowest_s": round(slowest[0], 4)}


if __name__ == "__main__":
    logging.disable()  # the parser of forms says a word of each; nobody reads them
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        SCRATCH = Path(scratch)
        print(json.dumps(fuzz(ENTRIES[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]))))
