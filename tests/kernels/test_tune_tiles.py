"""The tuner can choose every way to walk and to read, and the kernels read what it writes. It times nothing here."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from infinilora.kernels.site_table import SiteTable
from infinilora.kernels.tile_table import Cut, Launch, TileTable

GPU_BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "gpu"
SHRINK, EXPAND = (Launch(op, 16, 512, 256, 4096, 64) for op in ("shrink", "expand"))
BLOCKS = Cut(128, 4, 8, 3)


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(GPU_BENCHMARKS))
    import tune_tiles  # type: ignore[import-not-found]

    return tune_tiles  # type: ignore[no-any-return]


def chosen(tuner: ModuleType, launch: Launch, fast: Cut, *, takes: float = 0.5, blocks_take: float = 0.9) -> Cut | None:
    """What is chosen where `fast` takes so much of the rule's time, its blocks so much, and all else as long."""
    from sites import Site  # type: ignore[import-not-found]

    table = SiteTable(num_slots=1, num_parts=1, in_dim=4096, out_dim=4096, device="cpu")
    nothing = torch.empty(0)
    site = Site([table], nothing, nothing, lambda layer: None, 0, 64, sums_pairs=True)
    blocks = replace(fast, per_sm=0, loads="pointers", sums="apart")

    def seconds(cut_site: Site) -> float | None:
        cut = cut_site.tables[0].tiles.find(launch)
        if cut == Cut(64, 1, 4, 2):
            return None
        return {blocks: blocks_take, fast: takes}.get(cut, 1.0)

    return tuner.best(site, launch, [Cut(64, 1, 4, 2), Cut(256, 1, 4, 2), blocks], seconds)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("launch", "fast"),
    [
        (SHRINK, BLOCKS),
        (SHRINK, replace(BLOCKS, per_sm=1)),
        (SHRINK, replace(BLOCKS, per_sm=4, loads="descriptors")),
        (EXPAND, replace(BLOCKS, loads="descriptors")),
        (SHRINK, replace(BLOCKS, loads="specialized")),
        (EXPAND, replace(BLOCKS, per_sm=2, sums="inside")),
    ],
)
def test_every_way_can_be_chosen_and_is_read_again(
    tuner: ModuleType, launch: Launch, fast: Cut, tmp_path: Path
) -> None:
    assert chosen(tuner, launch, fast) == fast
    tuner.write(tmp_path / "sm_90.json", {launch: fast}, {"device": "a test's"})
    assert TileTable.read(tmp_path / "sm_90.json").find(launch) == fast


def test_what_is_not_clearly_faster_gets_no_entry(tuner: ModuleType) -> None:
    fast = replace(BLOCKS, loads="descriptors")
    assert chosen(tuner, EXPAND, fast, takes=0.98, blocks_take=0.99) is None
    assert chosen(tuner, EXPAND, fast, takes=0.95, blocks_take=0.96) == fast


def test_ways_that_a_launch_has_not_are_not_tried(tuner: ModuleType) -> None:
    for launch in (EXPAND, SHRINK._replace(rank=64), SHRINK._replace(tile_rows=16)):
        assert "specialized" not in {cut.loads for cut in tuner.variants(launch, BLOCKS, sums_pairs=True)}
    assert {cut.sums for cut in tuner.variants(EXPAND, BLOCKS, sums_pairs=False)} == {"apart"}
    assert {cut.sums for cut in tuner.variants(SHRINK, BLOCKS, sums_pairs=True)} == {"apart"}
