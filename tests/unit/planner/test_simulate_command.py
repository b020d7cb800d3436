"""`infinilora simulate` as a person runs it: a run, ways beside each other, a search, a record, and what is refused."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from infinilora.cli.__main__ import app
from infinilora.cli.terminal import REFUSED
from infinilora.planner.constants import FILE, read_constants
from infinilora.planner.simulate.costs import CPU_FILE, read_costs
from infinilora.planner.simulate.load import Load
from infinilora.planner.simulate.outcome import Slo
from infinilora.planner.simulate.published import WAYS, costs_of, fleet_of, read_house
from infinilora.planner.simulate.run import serviceable, simulate_load
from infinilora.planner.simulate.scenario import Way

SMALL = ["--set", "load.requests=60", "--set", "load.adapters=8", "--set", "fleet.engines=2"]
NEVER_BACK = 'fleet.failures=[{"kind":"group","index":0,"at_s":0,"for_s":1e9}]'
SVG = "{http://www.w3.org/2000/svg}"


def simulated(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["simulate", *words])
    return done.exit_code, done.stdout, done.stderr


def read(*words: str) -> Any:
    code, out, err = simulated(*words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_run_tells_what_requests_saw() -> None:
    (served,) = read(*SMALL)
    outcome = served["outcome"]
    assert served["way"] == "disaggregated:warm"
    assert outcome["requests"] == 54, "the first tenth is the warm-up"
    assert outcome["failed"] == 0
    assert 0 < outcome["ttft_s"]["p50"] <= outcome["ttft_s"]["p95"] <= outcome["ttft_s"]["p99"]
    assert 0 < outcome["jain"] <= 1
    assert outcome["moved"]["link_bytes"] > outcome["moved"]["staged_bytes"] > 0
    assert read(*SMALL) == [served], "a run is its seed"


def test_ways_are_beside_each_other_and_in_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "ttft.svg"
    code, out, _ = simulated(*SMALL, "--ways", "coupled:home,hybrid", "--picture", str(picture))
    assert code == 0
    assert "coupled:home" in out
    assert "hybrid:warm" in out
    drawn = ElementTree.fromstring(picture.read_text())
    assert len(drawn.findall(f"{SVG}polyline")) == 2


def test_a_search_finds_the_largest_rate_within_the_slo() -> None:
    (served,) = read(*SMALL, "--search")
    assert served["outcome"]["is_within_slo"]
    (beyond,) = read(*SMALL, "--set", f"load.rate={served['rate'] * 2}", "--set", "load.requests=2000")
    assert not beyond["outcome"]["is_within_slo"]


def test_a_search_ends_where_no_rate_is_served_within_the_slo() -> None:
    (served,) = read(*SMALL, "--set", "slo.ttft_s=1e-9", "--search")
    assert (served["rate"], served["outcome"]) == (0.0, None)


@pytest.mark.parametrize("limit", [0.3, 8.0, 777.0])
def test_the_search_brackets_the_limit(limit: float) -> None:
    found = serviceable(lambda rate: rate <= limit, 8.0)
    assert limit / 1.06 <= found <= limit


def test_nothing_is_serviceable_where_nothing_is_met() -> None:
    assert serviceable(lambda _: False, 8.0) == 0.0


def test_a_file_says_all(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    load = {"rate": 5.0, "requests": 40, "adapters": 4, "shape": "burst", "drift_s": 2.0}
    failure = {"kind": "group", "index": 0, "at_s": 1.0, "for_s": 1.0}
    fleet = {"mode": "disaggregated", "engines": 1, "groups": 2, "failures": [failure]}
    path.write_text(json.dumps({"fleet": fleet, "load": load, "adapter_bytes": [1000000, 4000000]}))
    (served,) = read("--scenario", str(path))
    assert served["outcome"]["requests"] == 36


def record(tmp_path: Path, *, slower: float) -> Path:
    """One base request at a time, as the committed constants have it, all times stretched."""
    costs = read_costs(CPU_FILE)
    prompt_s = costs.base.step_s(8, 1, 8)
    first_s = costs.gateway_s.value + prompt_s
    end_s = prompt_s + sum(costs.base.step_s(1, 1, 9 + n) for n in range(9))
    rows = [
        {
            "arrival_s": n * 5.0,
            "adapter": -1,
            "prompt": 8,
            "output": 10,
            "ttft_s": first_s * slower,
            "end_s": n * 5.0 + end_s,
        }
        for n in range(4)
    ]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"requests": rows, "fleet": {"mode": "coupled", "engines": 1}}))
    return path


@pytest.mark.parametrize(("slower", "is_within"), [(1.0, True), (1.1, True), (1.3, False)])
def test_a_record_is_held_against_its_simulation(slower: float, is_within: bool, tmp_path: Path) -> None:
    (found,) = read("compare", str(record(tmp_path, slower=slower)))
    assert found["off_tokens"] == pytest.approx(0.0, abs=1e-3)
    assert found["off_ttft"] == pytest.approx(1 / slower - 1, abs=1e-3)
    assert found["is_within"] is is_within


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"end_s": 0.0}, "requests[0]: found "),
        ({"ttft_s": -1.0}, "wanted tokens from 1, an arrival from 0, a first token and an end after it"),
        ({"adapter_bytes": [0]}, "adapter_bytes: found [0]; wanted 1 or more each"),
    ],
)
def test_a_record_that_cannot_be_one_is_named(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = record(tmp_path, slower=1.0)
    body = json.loads(path.read_text())
    of_request = {name: value for name, value in changes.items() if name in body["requests"][0]}
    body["requests"][0] |= of_request
    path.write_text(json.dumps(body | {name: value for name, value in changes.items() if name not in of_request}))
    code, out, err = simulated("compare", str(path))
    assert (code, out) == (REFUSED, "")
    assert told in err


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_published_fleet_serves_a_light_load_in_time(way: Way) -> None:
    house, speeds = read_house(), read_constants(FILE)
    for model in house.models:
        load = Load(rate=1.0, requests=50, prompt=700, output=300, is_prefilled=True)
        fleet, costs = fleet_of(house, model, way), costs_of(house, model, way, speeds)
        outcome = simulate_load(fleet, costs, [model.adapter_bytes] * 512, load, Slo(), seed=1)
        assert outcome.is_within_slo, model.name


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_published_table_names_each_way() -> None:
    rows = read("published", "--models", "dbrx", "--requests", "200")
    assert [row["way"] for row in rows] == [way.name for way in WAYS]
    assert rows[0]["gain"] in (1.0, None)


def test_published_adapters_have_the_published_sizes() -> None:
    """GiB, of experts' gate, up and down at 16 bits."""
    sizes = {model.name: model.adapter_bytes / 2**30 for model in read_house().models}
    wanted = {"gpt-oss-20b": 1.58, "qwen3-30b-a3b": 3.09, "mixtral-8x7b": 1.69, "scaled-moe": 3.38, "dbrx": 3.87}
    assert sizes == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--scenario", "/nowhere.json"], "found /nowhere.json, No such file or directory; wanted a file to read"),
        (["--set", "fleet.engines"], "found 'fleet.engines'; wanted PLACE=VALUE"),
        (["--set", "costs.name=1"], "costs has no parts"),
        (["--set", "fleet.engines=0"], "fleet.engines: found 0; wanted a number from 1 to 1000"),
        (["--set", "load.zipf=-1"], "load.zipf: found -1; wanted a number from 0 to 1e+06"),
        (["--set", "load.rate=1e-6"], "load.rate: found 1e-06; wanted 0.004 or more for 2000 requests"),
        (["--set", "load.rate=0"], "load.rate: found 0; wanted a number above 0"),
        (["--set", "slo.ttft_s=0"], "slo.ttft_s: found 0; wanted a number above 0"),
        (["--set", "adapter_bytes=[]"], "adapter_bytes: found []; wanted sizes of 1 byte or more"),
        (
            ["--set", "fleet.group_bytes=9999999"],
            "adapter_bytes: found an adapter of 10000000 bytes; wanted 9999999 at most, what fleet.group_bytes has",
        ),
        (["--set", "fleet.engine_bytes=9", "--ways", "disaggregated,coupled"], "what fleet.engine_bytes has room for"),
        (
            [*SMALL, "--set", "fleet.kv_tokens=16"],
            "found 60 requests that still wait after 3600 s in which nothing happened",
        ),
        ([*SMALL, "--set", NEVER_BACK], "requests that still wait after 3600 s in which nothing happened"),
        (["--set", "fleet.wheels=4"], "unknown field `wheels`"),
        (["--set", "load.shape=round"], "Invalid enum value 'round'"),
        (["--set", "costs=/nowhere.json"], "found /nowhere.json"),
        (["--ways", "apart"], "Invalid enum value 'apart'"),
        (["--picture", "ttft.png"], "wanted a name that ends in .svg"),
        (
            ["--set", "adapter_bytes=[9000000000000000000]"],
            "adapter_bytes: found [9000000000000000000]; wanted sizes of 1 byte or more, 9007199254740992 at most",
        ),
        (["compare", "/nowhere.json"], "found /nowhere.json"),
        (["published", "--models", "gpt-5"], "found 'gpt-5'; wanted some of gpt-oss-20b"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], told: str) -> None:
    code, out, err = simulated(*words)
    assert (code, out) == (REFUSED, "")
    assert told in err
