"""Whatever is wrong with an adapter's bytes, it is refused by name or packed exactly; nothing else ever happens."""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.ingest import run
from infinilora.weights.peft import TENSORS_FILE
from infinilora.weights.synth import write_peft_adapter
from support.cards import make_card

CARD = make_card("mixtral", num_layers=1, hidden=8, intermediate=8, heads=2, kv_heads=1, head_dim=4, num_experts=2)


class Files(NamedTuple):
    """The two files of a good adapter."""

    config: bytes
    tensors: bytes

    @property
    def header_end(self) -> int:
        return 8 + int.from_bytes(self.tensors[:8], "little")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = write_peft_adapter(tmp_path_factory.mktemp("good"), CARD, rank=2)
    return Files((directory / CONFIG_FILE).read_bytes(), (directory / TENSORS_FILE).read_bytes())


def served(config: bytes, tensors: bytes) -> bool:
    """Whether these files are accepted. Any error but AdapterInvalid fails the test."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / CONFIG_FILE).write_bytes(config)
        (directory / TENSORS_FILE).write_bytes(tensors)
        try:
            result = run(directory, CARD, directory / "out", narrow=None, max_rank=64)
        except AdapterInvalid:
            assert not (directory / "out").exists()
            return False
        assert result.self_test_error < 1e-6
        return True


def overwritten(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


fuzz = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(data=st.data())
def test_any_bytes_in_the_header_are_refused_or_harmless(good: Files, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, good.header_end - 1))
    new = data.draw(st.binary(min_size=1, max_size=6))
    served(good.config, overwritten(good.tensors, at, new))


@fuzz
@given(data=st.data())
def test_any_digit_in_the_header_is_refused_unless_it_is_the_same(good: Files, data: st.DataObject) -> None:
    digits = [at for at in range(8, good.header_end) if chr(good.tensors[at]).isdigit()]
    at = data.draw(st.sampled_from(digits))
    digit = data.draw(st.sampled_from(b"0123456789"))
    changed = overwritten(good.tensors, at, bytes([digit]))
    name_of_a_module = chr(good.tensors[at - 1]) in ".F"
    assert served(good.config, changed) == (changed == good.tensors) or name_of_a_module


@fuzz
@given(data=st.data())
def test_any_bytes_in_the_configuration_are_refused_or_harmless(good: Files, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(good.config) - 1))
    new = data.draw(st.binary(min_size=1, max_size=6) | st.sampled_from([b"null", b"-1", b"1e9", b"[]", b"{}"]))
    served(overwritten(good.config, at, new), good.tensors)


@fuzz
@given(data=st.data())
def test_any_other_length_is_refused(good: Files, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, len(good.tensors) - 1))
    assert not served(good.config, good.tensors[:keep])


@fuzz
@given(config=st.binary(max_size=64), tensors=st.binary(max_size=256))
def test_noise_is_refused(config: bytes, tensors: bytes) -> None:
    assert not served(config, tensors)


def test_the_good_adapter_is_served(good: Files) -> None:
    assert served(good.config, good.tensors)


@pytest.mark.parametrize(
    "metadata", [b'{"f\xffrmat":"pt"}', b'{"format":"p\x01"}', b'{"format":1}', b'["pt"]'], ids=repr
)
def test_metadata_that_is_no_table_of_texts_is_refused(good: Files, metadata: bytes) -> None:
    entries = json.loads(good.tensors[8 : good.header_end])
    entries.pop("__metadata__", None)

    def header(metadata: bytes) -> bytes:
        text = b'{"__metadata__":' + metadata + b"," + json.dumps(entries).encode()[1:]
        return len(text).to_bytes(8, "little") + text

    data = good.tensors[good.header_end :]
    assert served(good.config, header(b'{"format":"pt"}') + data)
    assert not served(good.config, header(metadata) + data)


def test_nesting_without_end_is_refused(good: Files) -> None:
    deep = b'{"x": ' * 100_000
    assert not served(deep, good.tensors)
    assert not served(good.config, len(deep).to_bytes(8, "little") + deep)
