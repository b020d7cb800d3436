import pytest
import torch

from infinilora.kernels.batch import Part
from infinilora.pool.execute import Grants, SiteCall, StepWork, TenancyRows, execute
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterFailed, AdapterLoading, InvalidRequest
from support.pools import DefinedKernels


def one_slot_kernels(*slots: int) -> DefinedKernels:
    kernels = DefinedKernels()
    for slot in slots:
        part = Part(a=torch.ones(1, 2), bt=torch.full((1, 3), float(slot)), scale=1.0, out_offset=0)
        kernels.bind(slot, 0, Site.O, (part,), 2, 3)
    return kernels


def run(grants: Grants, work: StepWork, *, layer: int = 0, row_start: int = 0, rows: int = 4) -> torch.Tensor:
    out = torch.full((rows, 3), torch.nan)
    call = SiteCall(layer, Site.O, row_start, torch.ones(rows, 2), out)
    execute(one_slot_kernels(1, 2), grants, work, call)
    return out


def granted(*tenancies: tuple[int, int]) -> Grants:
    grants = Grants()
    for slot, generation in tenancies:
        grants.grant(slot, generation, 1)
    return grants


def test_each_row_gets_its_own_adapter_and_rows_without_one_get_zeros() -> None:
    work = StepWork(1, [TenancyRows(0, 1, 1, 7), TenancyRows(2, 2, 2, 9)])
    out = run(granted((1, 7), (2, 9)), work, rows=5)
    assert out[:, 0].tolist() == [2.0, 0.0, 4.0, 4.0, 0.0]


def test_a_chunk_of_rows_is_cut_out_of_the_plan() -> None:
    work = StepWork(1, [TenancyRows(0, 3, 1, 7), TenancyRows(3, 3, 2, 9)])
    grants = granted((1, 7), (2, 9))
    assert run(grants, work, row_start=2, rows=2)[:, 0].tolist() == [2.0, 4.0]
    assert run(grants, work, row_start=4, rows=2)[:, 0].tolist() == [4.0, 4.0]


def test_an_old_slot_generation_is_refused() -> None:
    work = StepWork(1, [TenancyRows(0, 4, 1, 6)])
    with pytest.raises(AdapterFailed, match="slot_generation 6; this link has a lease on slot_generation 7"):
        run(granted((1, 7)), work)


def test_a_slot_that_this_holder_does_not_lease_is_refused() -> None:
    work = StepWork(1, [TenancyRows(0, 4, 2, 9)])
    with pytest.raises(AdapterFailed, match="no lease"):
        run(granted((1, 7)), work)


def test_a_lease_given_up_within_a_step_is_refused_from_then_on() -> None:
    work = StepWork(1, [TenancyRows(0, 4, 1, 7)])
    grants = granted((1, 7))
    run(grants, work)
    grants.revoke(1)
    with pytest.raises(AdapterFailed):
        run(grants, work)


def test_a_layer_that_has_not_arrived_is_refused_as_loading_until_it_has() -> None:
    work = StepWork(1, [TenancyRows(0, 4, 1, 7)])
    grants = granted((1, 7))
    with pytest.raises(AdapterLoading):
        run(grants, work, layer=1)
    grants.grant(1, 7, 2)
    assert run(grants, work, layer=1)[:, 0].tolist() == [0.0] * 4


@pytest.mark.parametrize("segments", [[TenancyRows(0, 2, 1, 7), TenancyRows(1, 2, 2, 9)], [TenancyRows(0, 0, 1, 7)]])
def test_a_plan_that_overlaps_or_has_empty_segments_is_refused(segments: list[TenancyRows]) -> None:
    with pytest.raises(InvalidRequest):
        StepWork(1, segments)


def test_a_routed_site_without_routing_is_refused() -> None:
    work = StepWork(1, [TenancyRows(0, 1, 1, 7)])
    call = SiteCall(0, Site.MOE_GATE_UP, 0, torch.ones(1, 2), torch.ones(1, 1, 3))
    with pytest.raises(InvalidRequest, match="topk_ids"):
        execute(one_slot_kernels(1), granted((1, 7)), work, call)
