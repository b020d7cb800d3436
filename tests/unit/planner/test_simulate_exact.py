"""The simulated fleet against times that were reckoned by hand: 10 ms a step, 1 ms a row unless said otherwise."""

from typing import Any

import pytest

from infinilora.planner.simulate.outcome import Ended
from support.small_fleets import MB, asks, costs, fleet, play

BASE = -1


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


def ttfts(ended: list[Ended]) -> list[float | None]:
    return [one.ttft_s for one in ended]


def test_one_base_request() -> None:
    """The prompt of 5 is one step of 15 ms; each of 3 further tokens a step of 11."""
    ended, world = play(fleet(), costs(), asks((1.0, BASE, 5, 4)))
    assert ended == [Ended(0, BASE, close(0.015), close(0.011), True)]
    assert world.timeline.now == close(1.0 + 0.015 + 3 * 0.011)


def test_a_prompt_longer_than_a_step_is_cut() -> None:
    """12 tokens in steps of 5, 5 and 2: three times 10 ms and 12 rows."""
    ended, _ = play(fleet(step_tokens=5), costs(), asks((0.0, BASE, 12, 1)))
    assert ended == [Ended(0, BASE, close(0.042), None, True)]


def test_an_arrival_waits_for_the_end_of_the_step_and_joins() -> None:
    """The first decodes in steps of 11 ms from 0.015 on; at 0.020 the second comes, at 0.026 it is let in.

    Its prompt of 4 and the first's token are 5 rows: 15 ms. Then both decode at 12 ms a step.
    """
    ended, _ = play(fleet(), costs(), asks((0.0, BASE, 5, 6), (0.020, BASE, 4, 3)))
    assert ended[1].ttft_s == close(0.041 - 0.020)
    assert ended[1].tpot_s == close(0.012)
    assert ended[0].tpot_s == close((0.041 + 2 * 0.012 + 0.011 - 0.015) / 5)


def test_context_makes_each_step_longer_than_the_last() -> None:
    """1 ms for each known token: 10 + 1 + 6, 10 + 1 + 7, 10 + 1 + 8 ms after a first step of 10 + 5 + 5."""
    ended, _ = play(fleet(), costs(context_s=0.001), asks((0.0, BASE, 5, 4)))
    assert ended == [Ended(0, BASE, close(0.020), close(0.018), True)]


def test_a_token_that_is_sampled_costs_what_a_row_of_a_prompt_does_not() -> None:
    """5 rows, one token: 10 + 5 + 2 ms; then a row and a token each step: 13. A piece of a prompt samples nothing."""
    ended, _ = play(fleet(), costs(token_s=0.002), asks((0.0, BASE, 5, 4)))
    assert ended == [Ended(0, BASE, close(0.017), close(0.013), True)]
    cut, _ = play(fleet(step_tokens=5), costs(token_s=0.002), asks((0.0, BASE, 12, 1)))
    assert cut[0].ttft_s == close(0.042 + 0.002)


def test_no_step_is_below_the_floor_but_context_adds_to_it() -> None:
    """10 + 5 ms and then 10 + 1, of at least 14, and 0.1 ms for each of 5, 6, 7 known tokens."""
    ended, _ = play(fleet(), costs(floor_s=0.014, context_s=0.0001), asks((0.0, BASE, 5, 3)))
    assert ended == [Ended(0, BASE, close(0.0155), close(0.01465), True)]


def test_a_prompt_among_others_that_decode_costs_what_one_alone_does_not() -> None:
    """Of itself 3 ms, of its adapter 2: its step, 0.026 to 0.046, has 10 + 5 ms and these. The first one's had 15."""
    wanted = costs(join_s=0.003, local=(0.0, 0.0, 0.0, 0.002))
    ended, _ = play(fleet(is_pool_warm=True), wanted, asks((0.0, BASE, 5, 6), (0.020, 0, 4, 3)))
    assert ended[0].ttft_s == close(0.015)
    assert ended[1].ttft_s == close(0.046 - 0.020)
    assert ended[1].tpot_s == close(0.012)


def test_tokens_cost_beside_the_floor() -> None:
    """A step of at least 14 ms, and 2 more for its token."""
    ended, _ = play(fleet(), costs(floor_s=0.014, token_s=0.002), asks((0.0, BASE, 2, 3)))
    assert ended == [Ended(0, BASE, close(0.016), close(0.016), True)]


def test_a_warm_pool_has_the_first_adapters_that_fit() -> None:
    """Room for two of 10 MB; the third is loaded in 10 ms, in place of one that nobody has."""
    wanted = fleet(is_pool_warm=True, engine_bytes=20 * MB)
    ended, world = play(wanted, costs(host=1e9, store=1e9), asks((0.0, 0, 5, 1), (1.0, 1, 5, 1), (2.0, 2, 5, 1)))
    assert ttfts(ended) == [close(0.015), close(0.015), close(0.025)]
    assert world.own["engine-000"].num_loads == 1


def test_a_cold_adapter_is_fetched_and_staged_first() -> None:
    """Latency 5 ms, 10 MB at 100 MB/s from the store, at 1 GB/s into the pool meanwhile: 105 ms."""
    ended, world = play(fleet(), costs(latency_s=0.005), asks((0.0, 0, 5, 1), (1.0, 0, 5, 1)))
    assert ttfts(ended) == [close(0.105 + 0.015), close(0.015)]
    assert world.own["engine-000"].fetched_bytes == 10 * MB


def test_what_host_memory_holds_is_only_staged() -> None:
    ended, world = play(fleet(is_host_warm=True), costs(latency_s=0.005), asks((0.0, 0, 5, 1)))
    assert ttfts(ended) == [close(0.015 + 0.015)]
    assert world.own["engine-000"].fetched_bytes == 0


def test_loads_share_one_pipe() -> None:
    """Two adapters of 10 MB at once: the second is there after 20 ms."""
    ended, _ = play(fleet(is_host_warm=True), costs(), asks((0.0, 0, 5, 1), (0.0, 1, 5, 1)))
    assert ttfts(ended) == [close(0.010 + 0.015), close(0.020 + 0.015 + 0.005)]


def test_rows_start_with_the_first_layer() -> None:
    """A tenth of a load of 100 ms; the rows' own pass of 15 ms is over long before the last layer."""
    wanted = costs(host=1e8, first=0.1)
    ended, _ = play(fleet(is_host_warm=True), wanted, asks((0.0, 0, 5, 2)))
    assert ended[0].ttft_s == close(0.100)
    whole, _ = play(fleet(is_host_warm=True), costs(host=1e8), asks((0.0, 0, 5, 2)))
    assert whole[0].ttft_s == close(0.115)


def test_an_adapter_waits_for_a_slot_that_another_holds() -> None:
    """One slot: adapter 1 is loaded (10 ms) when adapter 0 has ended: 10 + 15 + 9 steps of 11 ms."""
    ended, _ = play(fleet(is_host_warm=True, slots=1), costs(), asks((0.0, 0, 5, 10), (0.001, 1, 5, 1)))
    first_end = 0.010 + 0.015 + 9 * 0.011
    assert ended[1].ttft_s == close(first_end + 0.010 + 0.015 - 0.001)


def test_base_requests_pass_one_that_waits_for_its_adapter() -> None:
    ended, _ = play(fleet(), costs(), asks((0.0, 0, 5, 1), (0.001, BASE, 5, 1)))
    assert ended[1].ttft_s == close(0.015)


def test_a_lease_is_asked_for_at_once_and_counts_after_the_step_in_which_it_came() -> None:
    """Steps of 11 ms from 0.015 on. It comes at 0.020; its lease, asked for then, is there within that step.

    So at 0.026 its prompt of 4 and the other's token are 5 rows: 15 ms. A lease that takes 10 ms counts a step later.
    """
    wanted = fleet(mode="disaggregated", is_pool_warm=True)
    requests = asks((0.0, BASE, 5, 20), (0.020, 0, 4, 9))
    soon, _ = play(wanted, costs(lease_s=0.001), requests)
    assert soon[1].ttft_s == close(0.026 + 0.015 - 0.020)
    late, _ = play(wanted, costs(lease_s=0.010), requests)
    assert late[1].ttft_s == close(0.037 + 0.015 - 0.020)


def test_deltas_of_an_engine_of_its_own_and_of_a_group() -> None:
    """5 rows and 10 MB: 2 ms + 5 x 0.1 ms + 1 ms of bytes in the engine; at a group 4 ms, of which 3 hide."""
    one = asks((0.0, 0, 5, 1), (1.0, 0, 5, 1))
    local, _ = play(fleet(), costs(local=(0.002, 0.0001, 1e-10)), one)
    assert local[1].ttft_s == close(0.015 + 0.0035)
    remote = costs(remote=(0.004, 0.0, 0.0), hidden=0.2, lease_s=0.001)
    there, world = play(fleet(mode="disaggregated"), remote, one)
    assert there[1].ttft_s == close(0.001 + 0.015 + 0.001)
    assert world.link_rows == 10


def test_a_group_that_another_engine_keeps_busy_lets_wait() -> None:
    """Both serve for 4 of 20 ms steps alone, so the second finds rho = 0.2: 4 ms x 0.2 / 1.6 more."""
    wanted = costs(fixed_s=0.016, row_s=0.0, remote=(0.004, 0.0, 0.0), service=(0.004, 0.0, 0.0))
    requests = asks((0.0, 0, 5, 1), (1.0, 0, 5, 100), (1.021, 0, 5, 1))
    ended, _ = play(fleet(mode="disaggregated", routing="load", engines=2), wanted, requests)
    assert ended[2].ttft_s == close(0.020 + 0.0005)


def test_blocks_that_run_out_preempt_the_last() -> None:
    """Two sequences that grow to 3 blocks of 16 each, in a cache of 4: the second starts anew after the first."""
    ended, world = play(fleet(kv_tokens=64), costs(), asks((0.0, BASE, 16, 24), (0.0, BASE, 16, 24)))
    assert world.engines["engine-000"].num_preempted == 1
    assert [one.is_done for one in ended] == [True, True]
    assert ended[0].tpot_s is not None
    assert ended[1].tpot_s is not None
    assert ended[1].tpot_s > ended[0].tpot_s


def test_a_dead_engine_goes_on_elsewhere_with_what_it_had() -> None:
    """Steps of 11 ms from 0.015 on: at 0.050, 3 of them are done, so 4 tokens are known.

    10 ms later the other engine computes 5 + 4 tokens at once, and 5 more tokens follow.
    """
    failure = {"kind": "engine", "index": 0, "at_s": 0.050, "for_s": 9.0}
    wanted = fleet(engines=2, detect_s=0.010, failures=[failure])
    ended, world = play(wanted, costs(), asks((0.0, BASE, 5, 10)))
    assert ended[0].ttft_s == close(0.015)
    assert world.timeline.now == close(0.060 + 0.019 + 5 * 0.011)


def test_who_had_not_been_heard_when_the_engine_died_goes_on_elsewhere_and_holds_nothing_there() -> None:
    """The base request's first step of 15 ms is under way at 0.012, when the engine dies; at 0.010 another came."""
    failure = {"kind": "engine", "index": 0, "at_s": 0.012, "for_s": 9.0}
    wanted = fleet(
        mode="disaggregated", is_pool_warm=True, engines=2, routing="load", detect_s=0.010, failures=[failure]
    )
    ended, world = play(wanted, costs(lease_s=0.001), asks((0.0, BASE, 5, 9), (0.001, BASE, 5, 9), (0.010, 0, 4, 1)))
    assert [one.is_done for one in ended] == [True, True, True]
    assert not any(engine.leases.wanted for engine in world.engines.values())


def test_a_dead_group_makes_its_rows_wait_for_another() -> None:
    """Steps of 11 ms from 0.115 on. It dies at 0.250 in the 13th, which is let end; 14 of 20 tokens are known.

    10 ms after the death the second group is asked, and has it from the store in 100 ms: 6 steps more.
    """
    failure = {"kind": "group", "index": 0, "at_s": 0.250, "for_s": 9.0}
    wanted = fleet(mode="disaggregated", groups=2, detect_s=0.010, failures=[failure])
    ended, world = play(wanted, costs(), asks((0.0, 0, 5, 20)))
    assert ended[0].is_done
    assert world.timeline.now == close(0.360 + 6 * 0.011)


@pytest.mark.parametrize("kind", ["engine", "group"])
def test_what_fails_again_while_it_is_away_is_back_after_the_longer_of_both(kind: str) -> None:
    failures = [{"kind": kind, "index": 0, "at_s": at_s, "for_s": for_s} for at_s, for_s in ((1.0, 9.0), (2.0, 1.0))]
    wanted = fleet(mode="disaggregated", failures=failures)
    ended, world = play(wanted, costs(), asks((5.0, 0, 5, 1)))
    assert ended[0].is_done
    assert world.timeline.now > 10.0


@pytest.mark.parametrize("can_stretch", [True, False])
def test_a_sequence_that_pauses_goes_on_where_it_stood_while_others_ran(can_stretch: bool) -> None:
    """The base request runs alone to 0.103 in steps of 11 ms; the adapter's prompt joins for 16, then both take 12.

    Its group dies at 0.250, in a step that ends at 0.251 with 12 of its 20 tokens. The base request goes on alone. The
    second group has the adapter at 0.360, one step of 11 ms ends at 0.361, and each step from there is 12 ms again:
    one row of each, for what the paused one had computed is still there. 8 of those end it, 21 of 11 ms the other.
    """
    failure = {"kind": "group", "index": 0, "at_s": 0.250, "for_s": 9.0}
    wanted = fleet(mode="disaggregated", groups=2, detect_s=0.010, failures=[failure])
    ended, world = play(wanted, costs(), asks((0.0, 0, 5, 20), (0.0, BASE, 5, 60)), can_stretch=can_stretch)
    assert ended[0] == Ended(0, 0, close(0.119), close((0.361 + 8 * 0.012 - 0.119) / 19), True)
    assert world.timeline.now == close(0.361 + 8 * 0.012 + 21 * 0.011)


def test_whoever_waits_for_a_place_has_it_when_one_ends() -> None:
    """Two places. Both prompts in one step of 20 ms; the first ends 12 ms later, then the third comes."""
    ended, _ = play(fleet(max_running=2), costs(), asks((0.0, BASE, 5, 2), (0.0, BASE, 5, 50), (0.0, BASE, 4, 1)))
    assert ended[2].ttft_s == close(0.020 + 0.012 + 0.015)
