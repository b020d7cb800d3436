"""What an engine's clock says of all that decode is the sum of what each says."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infinilora.planner.simulate.load import Request
from infinilora.planner.simulate.sequence import CountedSequence, StepClock
from infinilora.protocol.ids import Digest

acts = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["decode", "freeze", "append", "step"])), max_size=40)


def sequence(number: int) -> CountedSequence:
    """Prompts of 1, 3, 5... tokens; every third is of the base, the others share two adapters."""
    digest = Digest(f"adapter {number % 3}") if number % 3 else None
    return CountedSequence(Request(number, 0.0, number % 3 - 1, 2 * number + 1, 100), digest, now=0.0)


@given(acts)
def test_the_clock_knows_what_decodes_as_a_whole(told: list[tuple[int, str]]) -> None:
    clock, sequences = StepClock(), [sequence(i) for i in range(6)]
    for number, act in told:
        one = sequences[number]
        if act == "step":
            clock.steps += number
        elif act == "freeze":
            one.freeze()
        elif not one.is_decoding:
            one.append() if act == "append" else one.decode(clock)
        decoding = [s for s in sequences if s.is_decoding]
        assert clock.num_decoding == len(decoding)
        assert clock.num_known == sum(s.num_known for s in decoding)
        assert clock.digests == Counter(s.digest for s in decoding if s.digest is not None)
        assert all((s.num_missing, s.num_computed) == (1, s.num_known - 1) for s in decoding)
