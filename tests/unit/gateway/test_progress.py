"""What a sequence takes along from one engine to the next, and which failures end it."""

from typing import Any

import pytest

from infinilora.gateway.fleet import Engine
from infinilora.gateway.progress import MAX_LOSSES, Job, Progress
from infinilora.protocol.errors import (
    AdapterFailed,
    AdapterNotFound,
    DeadlineExceeded,
    InfiniLoraError,
    Overloaded,
    Unavailable,
)
from infinilora.protocol.generate_pb2 import Finished, GenerateEvent, PromptLogprobs, Sampling, Token
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.rpc import Unreachable

A = digest_of(b"a")
SCORES = GenerateEvent(prompt_logprobs=PromptLogprobs(tokens=[Token(id=6)]))


def token(token_id: int, *, degraded: bool = False) -> GenerateEvent:
    return GenerateEvent(token=Token(id=token_id), degraded=degraded)


def progress(*events: GenerateEvent, sampling: Sampling | None = None, **job: Any) -> Progress:
    """Of a sequence that began at 100 s, may look for an engine for 10 s, and has had these events."""
    defaults: dict[str, Any] = {"digest": A, "fallback_base": False, "deadline": 700.0}
    made = Job(
        request_id="r",
        base=Fingerprint("sha256:b"),
        prompt=(5, 6),
        sampling=sampling or Sampling(max_tokens=4, seed=9, prompt_logprobs=1),
        slo_class="batch",
        patience_s=10.0,
        **defaults | job,
    )
    found = Progress(made, 100.0)
    for event in events:
        found.note(event)
    return found


def fail(found: Progress, error: InfiniLoraError, *, now: float, key: str = "e/1") -> None:
    found.note_failure(Engine(key, key[0], "nowhere:1"), error, now)


def test_the_next_engine_is_told_of_prompt_and_produced_tokens_and_asked_for_no_scores_again() -> None:
    found = progress(SCORES, token(7), token(8))
    request = found.request(101.0)
    assert (list(request.token_ids), request.num_prompt_tokens, request.digest) == ([5, 6, 7, 8], 2, A)
    assert (request.sampling.prompt_logprobs, request.sampling.seed, request.sampling.max_tokens) == (-1, 9, 4)
    assert (request.slo_class, request.deadline_ms) == ("batch", 599_000)
    assert found.job.sampling.prompt_logprobs == 1


def test_before_the_first_event_base_output_stays_allowed_and_after_it_the_adapter_is_bound() -> None:
    assert progress(fallback_base=True).request(100.0).fallback_base
    later = progress(token(7), fallback_base=True).request(100.0)
    assert (later.fallback_base, later.digest) == (False, A)


def test_what_began_as_base_output_goes_on_as_that_and_says_so() -> None:
    found = progress(token(7, degraded=True), fallback_base=True)
    assert (found.request(100.0).digest, found.request(100.0).fallback_base) == ("", False)
    assert found.note(token(8)).degraded
    end = found.note(GenerateEvent(finished=Finished(reason="stop")))
    assert (end.degraded, end.finished.degraded) == (True, True)


def test_a_sequence_that_lost_only_its_end_is_ended_here() -> None:
    assert progress(token(7), token(8), token(9)).lost_end() is None
    end = progress(token(7), token(8), token(9), token(10)).lost_end()
    assert end is not None
    assert (end.finished.reason, end.finished.prompt_tokens, end.finished.completion_tokens) == ("length", 2, 4)


def test_a_prompt_that_is_only_scored_is_ended_here_once_the_scores_are_sent() -> None:
    only = Sampling(max_tokens=0, prompt_logprobs=0)
    assert progress(sampling=only).lost_end() is None
    assert progress(SCORES, sampling=only).lost_end() is not None


def test_an_engine_that_gives_a_sequence_up_has_failed_it() -> None:
    with pytest.raises(Unavailable, match="gave the sequence up"):
        progress(token(7)).note(GenerateEvent(finished=Finished(reason="abort")))


@pytest.mark.parametrize("error", [AdapterNotFound("gone"), DeadlineExceeded("late")])
def test_what_another_engine_would_repeat_is_raised_at_once(error: InfiniLoraError) -> None:
    with pytest.raises(type(error)):
        fail(progress(token(7)), error, now=101.0)


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (Unavailable("away"), "waits", "waits"),
        (Unreachable("dead"), "waits", "waits"),
        (Overloaded("full"), "told", "waits"),
        (AdapterFailed("lost"), "told", "told"),
    ],
)
def test_which_failures_are_waited_for(error: InfiniLoraError, before: str, after: str) -> None:
    for found, wanted in ((progress(), before), (progress(token(7)), after)):
        fail(found, error, now=101.0)
        if wanted == "waits":
            found.check_patience(101.0, "none is there")
        else:
            with pytest.raises(type(error)):
                found.check_patience(101.0, "none is there")


def test_patience_counts_from_the_start_and_again_from_the_loss_of_an_engine_that_had_begun() -> None:
    waiting, running = progress(), progress(token(7))
    for found in (waiting, running):
        fail(found, Unavailable("away"), now=105.0)
    waiting.check_patience(109.9, "none is there")
    running.check_patience(114.9, "none is there")
    with pytest.raises(Unavailable, match="away"):
        waiting.check_patience(110.0, "none is there")
    with pytest.raises(Unavailable, match="away"):
        running.check_patience(115.0, "none is there")


def test_rounds_over_engines_that_are_full_do_not_begin_patience_anew() -> None:
    found = progress(token(7))
    for second in range(10):
        fail(found, Overloaded("full"), now=105.0 + second)
        found.begin_round()
    with pytest.raises(Overloaded):
        found.check_patience(115.0, "none is there")


def test_pauses_double_to_a_bound_and_begin_anew_with_a_new_loss() -> None:
    found, pauses = progress(token(7)), list[float]()
    for _ in range(5):
        pauses.append(found.pause_s)
        found.begin_round()
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0]
    fail(found, Unreachable("dead"), now=101.0)
    assert found.pause_s == 0.25


def test_an_engine_that_failed_before_the_last_one_ran_may_be_asked_again() -> None:
    found = progress(token(7))
    fail(found, Unavailable("draining"), now=101.0, key="a/1")
    found.note(token(8))
    fail(found, Unreachable("dead"), now=102.0, key="b/1")
    assert found.failed == {"b/1"}


def test_a_sequence_under_which_engines_fall_silent_is_given_up() -> None:
    found = progress()
    for number in range(MAX_LOSSES - 1):
        fail(found, Unreachable("dead"), now=101.0, key=f"e/{number}")
    with pytest.raises(Unreachable):
        fail(found, Unreachable("dead"), now=101.0, key="e/x")


def test_at_its_deadline_a_sequence_waits_for_nobody() -> None:
    found = progress(token(7), deadline=102.0)
    fail(found, Unavailable("away"), now=101.0)
    with pytest.raises(DeadlineExceeded):
        found.check_patience(102.0, "none is there")
