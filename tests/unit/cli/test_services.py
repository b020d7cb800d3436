"""What a local system tells its programs."""

from pathlib import Path

import pytest

from infinilora.cli.services import Plan, services


def plan(*, threads: int, lora: str = "remote") -> Plan:
    return Plan(
        model=Path("model"),
        served_name="base",
        lora=lora,
        threads=threads,
        link_dir=Path("links"),
        var_dir=Path("var"),
        gateway_port=1,
        coordinator_port=2,
        engine_port=3,
        lora_server_port=4,
        shared={},
    )


@pytest.mark.parametrize(("threads", "wanted"), [(1, "1"), (2, "1"), (3, "1"), (8, "4")])
def test_a_lora_server_on_the_engines_cores_takes_half_of_its_threads(threads: int, wanted: str) -> None:
    programs = {program.name: program.env for program in services(plan(threads=threads))}
    assert programs["engine"]["INFINILORA_THREADS"] == str(threads)
    assert programs["lora-server"]["INFINILORA_THREADS"] == wanted


@pytest.mark.parametrize("lora", ["local", "none"])
def test_without_remote_lora_there_is_no_server(lora: str) -> None:
    assert "lora-server" not in {program.name for program in services(plan(threads=2, lora=lora))}
