"""`infinilora plan` as a person runs it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from infinilora.cli.__main__ import app
from infinilora.cli.terminal import REFUSED
from infinilora.planner.constants import FILE

EXAMPLE = {
    "--adapters": "512",
    "--zipf": "1.2",
    "--rate": "40",
    "--residence": "6",
    "--slo-ttft": "0.25",
    "--model": "qwen3-30b-a3b",
    "--rank": "32",
    "--gpu-bytes": "90e9",
}
SVG = "{http://www.w3.org/2000/svg}"


def plan(**changes: str | None) -> tuple[int, str, str]:
    """The example with some options changed, added or (None) left out."""
    options = EXAMPLE | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    words = [word for name, value in options.items() if value is not None for word in (name, value) if word]
    done = CliRunner().invoke(app, ["plan", *words])
    return done.exit_code, done.stdout, done.stderr


def planned(**changes: str | None) -> dict[str, Any]:
    code, out, err = plan(json="", **changes)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(("rate", "want"), [("32", 24), ("128", 58), ("256", 90), ("1024", 198)])
def test_the_worked_values_come_out(rate: str, want: int) -> None:
    found = planned(rate=rate, residence="1")
    assert found["min_slots"] == want
    assert found["slots"] >= want
    assert found["iar"] >= 0.95


def test_the_example_is_told_in_full() -> None:
    """95 slots of 3.375 GB over shards of 90 GB."""
    found = planned()
    assert (found["min_slots"], found["slots"], found["groups"], found["shards"]) == (86, 95, 1, 4)
    (base,) = found["bases"]
    assert base["in_flight"] == pytest.approx(240)
    assert base["expert_parallel"] * base["layer_parallel"] == 4
    assert found["cost_per_hour"] == 4
    assert found["cost_per_million_requests"] == pytest.approx(4 / (40 * 3600) * 1e6)


def test_shards_are_groups_of_experts_by_layers() -> None:
    found = planned(rate="200", adapters="2000", rank="64", spare_groups="1")
    (base,) = found["bases"]
    assert base["layer_parallel"] > 1
    assert base["expert_parallel"] > 1
    assert found["shards"] == found["groups"] * base["expert_parallel"] * base["layer_parallel"]


def test_people_read_the_same_numbers() -> None:
    code, out, _ = plan(gpu_price="2.5")
    assert code == 0
    assert ["qwen3-30b-a3b", "512", "95", "320.7", "GB", "0.9961", "1", "4", "x", "1", "4"] in [
        line.split() for line in out.splitlines()
    ]
    assert "slots 95 (86 before the margin), groups 1, shards 4, IAR 0.9961, cost 10 an hour" in out


def test_several_bases_and_sizes_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    mixed = [{"weight": 3.0, "rank": 64}, {"weight": 0.1, "rank": 8, "count": 100}]
    plain = [{"weight": 1, "num_bytes": 50_000_000, "count": 20}]
    loads = [
        {"model": "llama-3-8b", "residence_s": 5, "adapters": mixed},
        {"model": "mixtral-8x7b", "residence_s": 10, "rate": 7.0, "adapters": plain},
    ]
    path.write_text(json.dumps({"bases": loads}))
    left_out: dict[str, str | None] = dict.fromkeys(("model", "adapters", "rate", "residence", "rank"))
    found = planned(workload=str(path), **left_out)
    first, second = found["bases"]
    assert (first["model"], first["adapters"], first["in_flight"]) == ("llama-3-8b", 101, pytest.approx(65.0))
    assert (second["model"], second["adapters"], second["in_flight"]) == ("mixtral-8x7b", 20, pytest.approx(70.0))
    assert second["adapter_bytes"] == 50_000_000
    for total in ("slots", "min_slots", "groups", "shards"):
        assert found[total] == first[total] + second[total]
    assert found["iar"] == pytest.approx((first["iar"] * 13 + second["iar"] * 7) / 20)


def test_ranks_are_dealt_in_turn() -> None:
    small, mixed, large = (planned(rank=rank)["bases"][0]["pool_bytes"] for rank in ("8", "8,64", "64"))
    assert small < mixed < large
    assert planned(rank="8,8")["bases"] == planned(rank="8")["bases"]


def test_four_bytes_a_number_are_twice_two() -> None:
    assert planned(dtype="F32")["bases"][0]["adapter_bytes"] == 2 * planned()["bases"][0]["adapter_bytes"]


def test_other_hardware_is_another_file(tmp_path: Path) -> None:
    constants = json.loads(FILE.read_text())
    constants["host_bytes_per_s"] = {"value": 1e9, "source": "an old machine"}
    (tmp_path / "old.json").write_text(json.dumps(constants))
    assert planned(constants=str(tmp_path / "old.json"))["shards"] > planned()["shards"]


def test_adapters_in_the_store_come_slower() -> None:
    assert planned(cold_from="store", slo_ttft="5")["bases"][0]["ttft_s"] > planned()["bases"][0]["ttft_s"]


@pytest.mark.parametrize("rate", ["40", "801"])
def test_the_picture_shows_the_curve_and_both_marks(rate: str, tmp_path: Path) -> None:
    """The second has more slots than the line has points."""
    target = tmp_path / "iar.svg"
    found = planned(picture=str(target), adapters="2000", rate=rate)
    root = ElementTree.fromstring(target.read_text())
    (line,) = root.findall(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert all(x1 < x2 and y1 >= y2 for (x1, y1), (x2, y2) in pairwise(points))
    marks = [(float(mark.attrib["cx"]), float(mark.attrib["cy"])) for mark in root.findall(f"{SVG}circle")]
    assert set(marks) <= set(points)
    assert {str(found["min_slots"]), str(found["slots"])} <= {text.text for text in root.findall(f"{SVG}text")}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"adapters": "0"}, "--adapters: found 0; wanted 1 or more"),
        ({"adapters": "2000000"}, "--adapters: found 2000000; wanted 1000000 at most"),
        (
            {"adapters": "1000000", "zipf": "0", "rate": "1e5"},
            "--adapters: found 1000000, of which up to 457200 are in use at once; wanted 1e+10 at most",
        ),
        ({"zipf": "-1"}, "--zipf: found -1.0; wanted a number, 0 or more"),
        ({"zipf": "nan"}, "--zipf: found nan; wanted a number, 0 or more"),
        ({"rate": None}, "--rate: found 0; wanted a number above 0, 1e+12 at most"),
        ({"rate": "1e300"}, "--rate: found 1e+300; wanted a number above 0, 1e+12 at most"),
        ({"rate": "1e12", "residence": "1e12"}, "--slo-ttft: found 0.25 s; wanted "),
        ({"rank": "9" * 30}, "--rank: found adapters of "),
        ({"gpu_bytes": "1e300"}, "--gpu-bytes: found 1e+300; wanted a number above 0, 4.61e+18 at most"),
        ({"engines": "9" * 30}, "--engines: found 1e+30; wanted a number from 0 to 1e+12"),
        ({"rate": "inf"}, "--rate: found inf; wanted a number above 0"),
        ({"residence": "-6"}, "--residence: found -6; wanted a number above 0"),
        ({"rank": None}, "--rank: found ''; wanted a whole number, 1 or more, or several with commas"),
        ({"rank": "8,x"}, "--rank: found 'x'; wanted a whole number"),
        ({"model": "gpt-5"}, "--model: found 'gpt-5'; wanted one of smollm2-135m"),
        ({"targets": "router"}, "--targets: found 'router'; wanted all, or some of attention, mlp, experts, shared"),
        ({"targets": "mlp"}, "--targets: found mlp; wanted something that qwen3-30b-a3b has"),
        ({"dtype": "INT4"}, "--dtype: found 'INT4'; wanted one of BF16, F16, F32"),
        ({"iar": "1"}, "--iar: found 1; wanted a share between 0 and 1, both excluded"),
        ({"margin": "-0.1"}, "--margin: found -0.1; wanted a number from 0 to 1e+12"),
        ({"slo_ttft": "0"}, "--slo-ttft: found 0; wanted a number above 0"),
        ({"slo_ttft": "0.01"}, "--slo-ttft: found 0.01 s; wanted 0."),
        ({"slo_tpot": "0.02"}, "--slo-tpot: found 0.02 s; wanted 0.0"),
        ({"gpu_bytes": "1e6"}, "--gpu-bytes: found 1000000 bytes on a GPU; wanted more"),
        ({"gpu_price": "-2"}, "--gpu-price: found -2; wanted a number from 0 to 1e+12"),
        ({"engines": "-1"}, "--engines: found -1; wanted a number from 0 to 1e+12"),
        ({"spare_groups": "-1"}, "--spare-groups: found -1; wanted a number from 0 to 1e+12"),
        ({"cold_from": "tape"}, "--cold-from: found 'tape'; wanted host or store"),
        ({"constants": "/nowhere.json"}, "--constants: found /nowhere.json, No such file or directory"),
        ({"picture": "iar.png"}, "--picture: found iar.png; wanted a name that ends in .svg"),
        ({"picture": "/nowhere/iar.svg"}, "--picture: found /nowhere/iar.svg, No such file or directory"),
        ({"workload": "load.json"}, "--workload: found --model beside it; wanted one or the other"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, str | None], told: str) -> None:
    code, out, err = plan(**changes)
    assert (code, out) == (REFUSED, "")
    assert err.startswith(f"invalid_request: {told}")


def one_base(*adapters: dict[str, Any], model: str = "llama-3-8b", residence_s: float = 1) -> str:
    return json.dumps({"bases": [{"model": model, "residence_s": residence_s, "adapters": adapters}]})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "Input data was truncated"),
        ('{"bases": []}', "bases: found none; wanted one or more"),
        ('{"basis": []}', "Object contains unknown field `basis`"),
        (one_base(), "bases[0].adapters: found 0; wanted 1"),
        (
            one_base({"weight": 1}),
            "bases[0].adapters[0]: found a rank of 0 and num_bytes of 0; wanted exactly one of the two, 1 or more",
        ),
        (
            one_base({"weight": 1, "rank": 8, "count": 0}, {"weight": 1, "rank": 8}),
            "bases[0].adapters[0]: found a count",
        ),
        (one_base({"weight": -1, "rank": 8}), "bases[0].weights: number 0: found -1.0; wanted 0 or more"),
        (one_base({"weight": 1, "num_bytes": 10**19}), "bases[0].adapters: found adapters of 1.00e+19 bytes in all"),
        (one_base({"weight": 1, "rank": 8}, residence_s=0), "bases[0].residence_s: found 0; wanted a number above 0"),
        (one_base({"weight": 1, "rank": 8}, model="x"), "bases[0].model: found 'x'; wanted one of"),
    ],
)
def test_what_is_wrong_in_a_workload_is_named_with_its_place(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(text)
    left_out: dict[str, str | None] = dict.fromkeys(("model", "adapters", "rate", "residence", "rank"))
    code, _, err = plan(workload=str(path), **left_out)
    assert code == REFUSED
    assert err.startswith(f"invalid_request: --workload: {path}: {told}")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"call_s": {"value": 0, "source": "-"}}, "call_s: found 0.0; wanted more than 0"),
        ({"peers": {"value": 0.5, "source": "-"}}, "peers: found 0.5; wanted 1 or more"),
        ({"speed": {"value": 1, "source": "-"}}, "Object contains unknown field `speed`"),
        ({"call_s": {"value": 1}}, "Object missing required field `source`"),
    ],
)
def test_a_constant_that_means_nothing_is_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(json.loads(FILE.read_text()) | change))
    code, _, err = plan(constants=str(path))
    assert code == REFUSED
    assert err.startswith(f"invalid_request: --constants: {path}: {told}")
