"""Which device a setting names, and how a service ends that is told of one that is not there."""

import subprocess
import sys

import pytest
import torch

from infinilora.pool.device import HostDevice, open_device
from infinilora.protocol.errors import InvalidRequest

SERVERS = {"INFINILORA_NATS_URL": "nats://127.0.0.1:9", "INFINILORA_REDIS_URL": "redis://127.0.0.1:9"}
ENOUGH = SERVERS | {"INFINILORA_STORE_URL": "file:///nowhere", "INFINILORA_BASE": "m", "INFINILORA_MODEL": "/nowhere"}
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_the_host_is_a_device_too() -> None:
    assert isinstance(open_device("cpu"), HostDevice)


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:-1", "cuda:one", ""])
def test_a_device_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"INFINILORA_DEVICE is '{name}'; wanted cpu, cuda or cuda:N"):
        open_device(name)


@NO_CUDA
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_machine_without_cuda_says_what_is_wanted(name: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"'{name}', and torch .* finds no CUDA device here .*; wanted an NVIDIA GPU"
    ):
        open_device(name)


@NO_CUDA
@pytest.mark.parametrize("room", ["lora_server", "engine"])
def test_a_service_without_its_device_ends_at_once_and_says_so(room: str) -> None:
    """Before it reaches for anybody: nobody is there."""
    done = subprocess.run(
        [sys.executable, "-m", f"infinilora.{room}"],
        env=ENOUGH | {"INFINILORA_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "INFINILORA_DEVICE is 'cuda', and torch" in done.stdout + done.stderr
    assert "wanted an NVIDIA GPU with its driver" in done.stdout + done.stderr
