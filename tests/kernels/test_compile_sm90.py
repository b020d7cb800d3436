"""The Triton kernels compile for Hopper on a machine without a GPU, to the instructions they were written for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "compile_triton.py"
SHARED_BYTES_OF_A_BLOCK = 232_448
"""What one block of a Hopper GPU can have."""
INDEXED = {"indexed_shrink_kernel", "indexed_expand_kernel"}
MESSAGES = {"push_kernel", "take_kernel"}
"""Kernels of the `cuda` link."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "90"], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_has_a_hopper_binary(compiled: list[dict[str, Any]]) -> None:
    grouped = {"shrink_kernel", "expand_kernel", "sum_pairs_kernel"}
    assert {case["kernel"] for case in compiled} == grouped | INDEXED | MESSAGES
    for case in compiled:
        assert "sm_90" in case["target"]
        assert case["cubin_bytes"] > 0
        assert case["shared_bytes"] <= SHARED_BYTES_OF_A_BLOCK


def test_products_run_on_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    for case in compiled:
        if case["rows"] == 64:
            assert case["wgmma"] > 0, case
        elif case["rows"] is not None:
            assert case["mma"] > 0, case


def test_weights_and_outputs_move_in_vectors(compiled: list[dict[str, Any]]) -> None:
    for case in compiled:
        if case["rows"] is not None:
            assert case["vector_loads"] + case["boxes"] > 0, case
            assert case["scalar_weight_loads"] == 0, case


def test_described_blocks_are_moved_by_the_copy_engine(compiled: list[dict[str, Any]]) -> None:
    """As many boxes in flight as the pipeline has stages; without descriptors none."""
    described = [case for case in compiled if case["loads"] in ("descriptors", "specialized")]
    assert {(case["kernel"], case["rows"]) for case in described} == {
        (kernel, rows) for kernel in ("shrink_kernel", "expand_kernel") for rows in (16, 64)
    }
    for case in described:
        assert case["boxes"] >= 2, case
    assert not any(case["boxes"] for case in compiled if case not in described)


def test_specialized_warps_are_a_group_that_fetches_and_two_that_multiply(compiled: list[dict[str, Any]]) -> None:
    """The fetching group gives most of its registers away; each of the others multiplies half of the ranks."""
    specialized = [case for case in compiled if case["loads"] == "specialized"]
    assert len(specialized) == 2
    for case in compiled:
        assert case["warps"] == (12 if case in specialized else 4), case
        assert (case["register_shares"] > 0) == (case in specialized), case
    for case in specialized:
        assert case["wgmma_columns"] == case["product_columns"], "of which neither computes what the other does"


def test_rows_that_find_their_own_weights_read_them_in_vectors(compiled: list[dict[str, Any]]) -> None:
    """Of single elements only the row is read that expand adds to, one by each thread."""
    for case in compiled:
        if case["kernel"] in INDEXED:
            assert case["vector_reads"] > 0, case
            assert case["scalar_weight_loads"] == (case["kernel"] == "indexed_expand_kernel"), case


def test_nothing_is_summed_by_atomics(compiled: list[dict[str, Any]]) -> None:
    """They count programs: of a message, or of a row's pairs, once all that is counted has been stored."""
    summing = [case for case in compiled if case["summed"]]
    assert {case["rows"] for case in summing} == {16, 64}
    assert {case["kernel"] for case in compiled if case["counts"] and case not in summing} == MESSAGES
    for case in summing:
        assert case["counts"] == ["atom.global.gpu.acq_rel.add.u32"], case
        assert case["is_counted_behind_a_barrier"], case


def test_messages_are_published_and_awaited_across_devices(compiled: list[dict[str, Any]]) -> None:
    """One look and one loop that acquire, one store that releases, and payloads that move sixteen bytes at a time."""
    for case in compiled:
        if case["kernel"] in MESSAGES:
            assert (case["acquires"], case["releases"]) == (2, 1), case
            assert case["vector_moves"] > 0, case
