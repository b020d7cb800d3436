"""The base's experts as one product, on a GPU: right, without a wait of the host, and replayed by a graph."""

import pytest
import torch

from support.experts import EXPERTS, HIDDEN, TOP_K, by_definition, rand, stacked

ROWS = 9


@pytest.mark.gpu
@pytest.mark.parametrize("is_all", [True, False])
def test_a_graph_of_all_experts_serves_any_routing(is_all: bool) -> None:
    experts = stacked(torch.bfloat16, is_all=is_all, device="cuda")
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    places = torch.zeros(ROWS, TOP_K, dtype=torch.int32, device="cuda")
    experts.sort(places).gate_up(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # whoever waits for the device here fails
        found = experts.sort(places).gate_up(x)

    for seed in range(4):
        source = torch.Generator().manual_seed(seed)
        places.copy_(torch.randint(0, EXPERTS + (not is_all), places.shape, generator=source))
        x.copy_(rand(ROWS, HIDDEN, seed=seed))
        graph.replay()
        rows = x.cpu().repeat_interleave(TOP_K, 0)
        wanted = by_definition(experts.gate_up.weights.cpu(), rows, places.cpu())
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=2e-2, atol=2e-2)
