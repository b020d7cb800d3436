import pytest

from infinilora.pool.backoff import MAX_REMEMBERED, MAX_TOLD, MAX_WORDS, Backoff, Failures, NotStored
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError, StoreRefused, Unavailable
from infinilora.protocol.ids import Digest, digest_of

A = digest_of(b"a")


@pytest.mark.parametrize(
    ("attempt", "dice", "pause_s"),
    [(0, 0.0, 1.5), (0, 0.999, 2.9985), (1, 0.0, 3.0), (4, 0.0, 24.0), (5, 0.0, 30.0), (10_000, 0.999, 59.97)],
)
def test_pauses_double_up_to_the_most_and_spread_over_their_upper_half(
    attempt: int, dice: float, pause_s: float
) -> None:
    assert Backoff(3.0, 60.0).pause_s(attempt, dice) == pytest.approx(pause_s)


def failed_until(failures: Failures, digest: Digest, start: float) -> float:
    """When it may be tried again, to a hundredth of a second."""
    now = start
    while failures.known(digest, now):
        now += 0.01
    return now


def test_a_broken_adapter_is_left_alone_for_longer_each_time() -> None:
    failures, now, pauses = Failures(), 100.0, []
    for _ in range(6):
        failures.note(A, AdapterFailed("broken"), now, 0.0)
        until = failed_until(failures, A, now)
        pauses.append(until - now)
        now = until
    assert pauses == pytest.approx([1.5, 3.0, 6.0, 12.0, 24.0, 30.0], abs=0.02)


@pytest.mark.parametrize("error", [Unavailable("away"), StoreRefused("no")])
def test_a_store_that_is_away_is_left_alone_for_a_moment_only(error: InfiniLoraError) -> None:
    failures = Failures()
    for start in (0.0, 10.0, 20.0):
        failures.note(A, error, start, 0.5)
        assert failures.known(A, start + 0.1) is error
        assert failures.known(A, start + 0.25) is None


def test_what_the_store_does_not_have_is_asked_for_every_few_seconds_however_often_it_was_missing() -> None:
    failures, now = Failures(), 100.0
    for _ in range(6):
        failures.note(A, NotStored("gone"), now, 0.999)
        until = failed_until(failures, A, now)
        assert until - now == pytest.approx(3.0, abs=0.02)
        now = until


def test_what_was_had_after_all_fails_for_the_first_time_again() -> None:
    failures = Failures()
    for _ in range(5):
        failures.note(A, AdapterFailed("broken"), 0.0, 0.0)
    failures.forgive(A)
    assert failures.known(A, 0.1) is None
    failures.note(A, AdapterFailed("broken"), 0.0, 0.0)
    assert failures.known(A, 1.6) is None


def test_the_first_pause_is_a_setting_and_the_longest_twenty_times_that() -> None:
    failures, now, pauses = Failures(0.5), 100.0, []
    for error in (*[AdapterFailed("broken")] * 7, NotStored("gone")):
        failures.note(A, error, now, 0.999)
        until = failed_until(failures, A, now)
        pauses.append(until - now)
        now = until
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5], abs=0.02)


def test_the_latest_failures_are_told_until_they_are_forgiven() -> None:
    failures = Failures()
    many = [digest_of(b"%d" % number) for number in range(MAX_TOLD + 1)]
    for digest in (*many, many[1]):
        failures.note(digest, AdapterFailed("why" * MAX_WORDS), 0.0, 0.0)
    told = failures.told()
    assert [failure.digest for failure in told] == [many[1], *reversed(many[2:])]
    assert (told[0].code, told[0].message) == ("adapter_failed", ("why" * MAX_WORDS)[:MAX_WORDS])
    failures.forgive(many[1])
    assert [failure.digest for failure in failures.told()] == [*reversed(many[2:]), many[0]]


def test_failures_of_names_without_number_are_bounded() -> None:
    failures = Failures()
    for i in range(MAX_REMEMBERED + 100):
        failures.note(digest_of(str(i).encode()), AdapterFailed("broken"), 0.0, 0.0)
    assert failures.known(digest_of(b"0"), 0.1) is None
    assert failures.known(digest_of(str(MAX_REMEMBERED + 99).encode()), 0.1)
