"""What a local system tells its programs."""

from pathlib import Path

import pytest

from infinilora.cli.services import Plan, services, stopping
from infinilora.cli.stack import Stack
from infinilora.protocol.errors import InvalidRequest


def plan(
    *,
    threads: int,
    lora: str = "remote",
    shape: str = "1x1",
    shard_ports: tuple[int, ...] = (4,),
    engine_ports: tuple[int, ...] = (3,),
    engine_shards: str = "1",
) -> Plan:
    return Plan(
        model=Path("model"),
        served_name="base",
        lora=lora,
        threads=threads,
        link_dir=Path("links"),
        var_dir=Path("var"),
        gateway_port=1,
        coordinator_port=2,
        engine_ports=engine_ports,
        group_ports=(shard_ports,) if lora == "remote" else (),
        lora_shape=shape,
        engine_shards=engine_shards,
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


def test_a_group_of_several_shards_is_a_program_for_each_told_of_its_head() -> None:
    shards = [
        p for p in services(plan(threads=8, shape="2x2", shard_ports=(4, 5, 6, 7))) if "lora_server" in p.argv[-1]
    ]
    assert [p.name for p in shards] == ["lora-server", "lora-server.1", "lora-server.2", "lora-server.3"]
    told = [{k: p.env[f"INFINILORA_{k}"] for k in ("SHAPE", "SHARD", "HEAD", "LISTEN", "THREADS")} for p in shards]
    assert [t["SHARD"] for t in told] == ["0", "1", "2", "3"]
    assert [t["HEAD"] for t in told] == ["", "127.0.0.1:4", "127.0.0.1:4", "127.0.0.1:4"]
    assert [t["LISTEN"].rpartition(":")[2] for t in told] == ["4", "5", "6", "7"]
    assert {(t["SHAPE"], t["THREADS"]) for t in told} == {("2x2", "1")}


def test_a_server_that_is_one_process_is_told_of_no_shape() -> None:
    (server,) = [p for p in services(plan(threads=2)) if p.name == "lora-server"]
    assert not {"INFINILORA_SHAPE", "INFINILORA_SHARD", "INFINILORA_HEAD"} & set(server.env)


def test_the_shards_of_a_group_stop_together() -> None:
    names = [p.name for p in services(plan(threads=2, shape="1x2", shard_ports=(4, 5)))]
    assert stopping(["nats", *names]) == [["gateway"], ["lora-server", "lora-server.1"], ["engine"], ["coordinator"]]


def test_what_came_later_stops_no_sooner() -> None:
    """An engine that was brought back is the last to have started: its streams end at the gateway all the same."""
    assert stopping(["coordinator", "gateway", "engine"]) == [["gateway"], ["engine"], ["coordinator"]]


def test_engines_are_programs_of_their_own_ids_and_ports_and_share_the_threads() -> None:
    engines = [p for p in services(plan(threads=5, engine_ports=(3, 8))) if p.name.startswith("engine")]
    told = [[p.env[f"INFINILORA_{k}"] for k in ("ENGINE_ID", "LISTEN", "THREADS")] for p in engines]
    assert told == [["engine-0", "127.0.0.1:3", "2"], ["engine-1", "127.0.0.1:8", "2"]]
    assert ["engine", "engine.1"] in stopping(p.name for p in services(plan(threads=5, engine_ports=(3, 8))))


@pytest.mark.parametrize("asked", ["1", "2", "auto"])
def test_an_engine_is_told_of_how_many_shards_it_is(asked: str) -> None:
    (engine,) = [p for p in services(plan(threads=2, engine_shards=asked)) if p.name == "engine"]
    assert engine.env["INFINILORA_ENGINE_SHARDS"] == asked


@pytest.mark.parametrize("asked", ["0", "-1", "two", "", "1.5"])
def test_a_number_of_engine_shards_that_is_none_is_refused_before_anything_starts(asked: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=f"shards is '{asked}'; wanted a whole number of at least 1, or 'auto'"):
        Stack(tmp_path / "var", model=str(tmp_path / "model"), engine_shards=asked)
