"""The table that cuts launches: what it finds, what it refuses, and that a launch is cut by it and stays right."""

import json
from pathlib import Path

import pytest
import torch

from infinilora.kernels.batch import segment_table
from infinilora.kernels.tile_table import MEASURED, Cut, Launch, TileTable
from support import lora_maths
from support.triton_sites import TOLERANCE, RecordingTable, largest_error, make_bound, make_table, poisoned

ENTRY = {"op": "shrink", "bits": 16, "rows": 64, "rank": 16, "dim": 4096, "tile_rows": 16}
CUT = {"block": 128, "splits": 8, "warps": 4, "stages": 3, "per_sm": 2, "loads": "descriptors", "sums": "inside"}


def written(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text(json.dumps({"device": "a test's", "date": "-", "commit": "-", "entries": entries}))
    return path


def test_launches_up_to_the_entrys_powers_of_two_are_cut_by_it(tmp_path: Path) -> None:
    table = TileTable.read(written(tmp_path / "sm_90.json", ENTRY | CUT))
    cut = Cut(128, 8, 4, 3, 2, "descriptors", "inside")
    assert table.find(Launch("shrink", 16, 64, 16, 4096, 16)) == cut
    assert table.find(Launch("shrink", 16, 33, 9, 2049, 16)) == cut
    for other in (
        Launch("expand", 16, 64, 16, 4096, 16),
        Launch("shrink", 32, 64, 16, 4096, 16),
        Launch("shrink", 16, 32, 16, 4096, 16),
        Launch("shrink", 16, 64, 17, 4096, 16),
        Launch("shrink", 16, 64, 16, 2048, 16),
        Launch("shrink", 16, 64, 16, 4096, 64),
    ):
        assert table.find(other) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"block": 100},
        {"splits": -1},
        {"warps": 0},
        {"stages": 0},
        {"op": "sum"},
        {"rank": None},
        {"per_sm": -1},
        {"loads": "guesses"},
        {"loads": "specialized"},
        {"sums": "somewhere"},
        {"loads": "specialized", "per_sm": 0, "op": "expand"},
    ],
)
def test_an_entry_that_no_tuner_writes_is_named(wrong: dict[str, object], tmp_path: Path) -> None:
    path = written(tmp_path / "sm_90.json", ENTRY | CUT | wrong)
    with pytest.raises(ValueError, match=f"{path}: entry"):
        TileTable.read(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{'entries'"])
def test_a_file_that_is_no_table_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sm_90.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} is no tile table"):
        TileTable.read(path)


def test_unmeasured_launches_have_a_program_for_each_item_and_read_through_pointers() -> None:
    cut = Cut(128, 0, 4, 3)
    assert (cut.loads, cut.sums) == ("pointers", "apart")
    assert TileTable({}).num_programs(cut, 100_000) == 100_000


@pytest.mark.parametrize(("items", "programs"), [(0, 0), (7, 7), (16, 16), (17, 16), (100_000, 16)])
def test_a_persistent_grid_ends_where_the_device_is_full(items: int, programs: int) -> None:
    assert TileTable({}, num_sms=8).num_programs(Cut(64, 0, 4, 2, per_sm=2), items) == programs


def test_warps_that_fetch_ahead_are_not_given_a_next_item() -> None:
    with pytest.raises(ValueError, match="wanted per_sm 0 for specialized"):
        Cut(64, 0, 4, 2, per_sm=1, loads="specialized")


def test_the_tables_that_are_delivered_can_be_read() -> None:
    for path in MEASURED.glob("*.json"):
        TileTable.read(path)


def test_a_launch_is_cut_by_the_table_and_gives_the_same(device: str) -> None:
    from infinilora.kernels.moe import dense
    from infinilora.kernels.shrink import shrink
    from infinilora.kernels.tiles import SMALL, StepRows

    segments, x = ((0, 2, 0), (2, 3, 1)), torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    bound = make_bound(((6,), (20,)), (70,), in_dim=300, dtypes=[torch.float32])
    table = make_table(bound, num_parts=1, in_dim=300, out_dim=70, device=device)
    rows = StepRows.of(segment_table(segments), 5, device)
    shrunk, expanded = Launch("shrink", 32, 5, 20, 300, SMALL), Launch("expand", 32, 5, 20, 70, SMALL)
    cuts = {shrunk: Cut(32, 4, 4, 2), expanded: Cut(16, 0, 2, 2)}
    table.tiles = tiles = RecordingTable({launch.rounded(): cut for launch, cut in cuts.items()})
    v = shrink(table, x.to(device), rows.tiles, order=None, top_k=1, num_rows=5, block_rows=rows.block_rows)
    assert v.shape[0] == 4
    out = poisoned(5, 70, device=device)
    dense(table, rows, x.to(device), out, accumulate=False, path="grouped")
    ranges, columns = 2 * 4, 2 * 5
    assert [items for items, _ in tiles.launched] == [ranges, ranges, columns]
    assert largest_error(out, lora_maths.dense(bound, segments, x, 70)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("dtypes", "splits"), [([torch.bfloat16], 4), ([torch.bfloat16, torch.float32], 1)])
def test_blocks_measured_on_narrow_weights_are_not_used_on_wide_ones(
    device: str, dtypes: list[torch.dtype], splits: int
) -> None:
    """Which take twice the memory of a multiprocessor, and perhaps more than there is."""
    from infinilora.kernels.shrink import shrink
    from infinilora.kernels.tiles import SMALL, StepRows

    bound = make_bound(((6,), (20,)), (8,), in_dim=300, dtypes=dtypes)
    table = make_table(bound, num_parts=1, in_dim=300, out_dim=8, device=device)
    table.tiles = TileTable({Launch("shrink", 16, 5, 20, 300, SMALL).rounded(): Cut(32, 4, 4, 2)})
    rows, x = StepRows.of(segment_table(((0, 2, 0), (2, 3, 1))), 5, device), torch.zeros(5, 300, dtype=torch.bfloat16)
    v = shrink(table, x.to(device), rows.tiles, order=None, top_k=1, num_rows=5, block_rows=rows.block_rows)
    assert v.shape[0] == splits
