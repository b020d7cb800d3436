"""Offering and choosing a `cuda` link, and what is said where there is none."""

from pathlib import Path

import pytest
import torch

from infinilora.link.errors import LinkTimeout
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.protocol.errors import InvalidRequest, Unavailable


def _settings(directory: Path, **more: object) -> LinkSettings:
    from infinilora.link.cuda_driver import Regions
    from support.loopback_memory import LoopbackMemory

    regions = Regions(LoopbackMemory(directory, has_mps=True))
    return LinkSettings(directory=None, num_buffers=2, buffer_bytes=512, cuda=regions, **more)  # type: ignore[arg-type]


def test_an_engine_on_another_host_gets_tcp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    near, far = Offers(_settings(tmp_path)).wire, Offers(_settings(tmp_path)).wire
    far[0]["boot"] = "of another host"
    opener = Opener(_settings(tmp_path))
    assert [opener.choose(offers).chosen["backend"] for offers in (near, far)] == ["cuda", "tcp"]
    reasons = [getattr(record, "reason", "") for record in caplog.records]
    assert reasons == ["no cuda link: the engine runs on another host"]
    opener.close()


def test_a_server_without_a_device_chooses_the_next_offer(tmp_path: Path) -> None:
    opener = Opener(LinkSettings(directory=None))
    assert opener.choose(Offers(_settings(tmp_path)).wire).chosen["backend"] == "tcp"
    opener.close()


def test_an_engine_that_does_not_come_costs_no_memory(tmp_path: Path) -> None:
    opener, offers = Opener(_settings(tmp_path)), Offers(_settings(tmp_path)).wire
    given_up, late = opener.choose(offers), opener.choose(offers)
    assert len(list(tmp_path.iterdir())) == 2
    given_up.cancel()
    with pytest.raises(LinkTimeout):
        late.wait(0.01)
    late.cancel()
    assert not list(tmp_path.iterdir())
    opener.close()


@pytest.mark.parametrize("changes", [{"region": "no hex"}, {"region": "ab"}, {"signal": "none"}])
def test_a_choice_that_no_server_makes_is_refused(changes: dict[str, str], tmp_path: Path) -> None:
    opener = Opener(_settings(tmp_path))
    opening = opener.choose(Offers(_settings(tmp_path)).wire)
    with pytest.raises(InvalidRequest, match="wanted 64 bytes and one of device, host"):
        attach(opening.chosen | changes, opening.secret, _settings(tmp_path))
    opening.cancel()
    opener.close()


def test_a_choice_that_was_not_offered_is_refused(tmp_path: Path) -> None:
    opener = Opener(_settings(tmp_path))
    opening = opener.choose(Offers(_settings(tmp_path)).wire)
    with pytest.raises(InvalidRequest, match="did not offer"):
        attach(opening.chosen, opening.secret, LinkSettings(directory=None))
    opening.cancel()
    opener.close()


@pytest.mark.parametrize("library", ["libcuda-of-nobody.so.1", "libm.so.6"])
def test_a_missing_or_strange_driver_is_named(library: str) -> None:
    from infinilora.link.cuda_driver import Driver

    with pytest.raises(
        Unavailable, match=f"no cuda link: {library} cannot be used .*; it comes with the NVIDIA driver"
    ):
        Driver(library)


@pytest.mark.interp
def test_a_machine_without_a_device_says_so() -> None:
    from infinilora.link.cuda_driver import CudaMemory

    with pytest.raises(Unavailable, match="no cuda link on cuda: this torch finds no CUDA device"):
        CudaMemory(torch.device("cuda"))
