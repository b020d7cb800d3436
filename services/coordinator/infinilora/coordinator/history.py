"""What two coordinators know of the same demand, put together. Pure.

    earlier   |----------------------|
    own                          |---------|      the present bucket is not over
    joined    |----------------------------|

Where nobody heard what came, it is taken to have been as one season before, or else as just before.
"""

from infinilora.protocol.traffic import DemandHistory

KEPT_SEASONS = 2
MOST = 20_000
"""Buckets that are kept, at most; a season longer than these is not."""
AVERAGED = 64
"""Latest buckets whose sequences at once are kept: what came before weighs a thousandth in the mean."""


def kept(season: int) -> int:
    """How many buckets are worth keeping."""
    return min(KEPT_SEASONS * season, MOST)


def joined(earlier: DemandHistory, own: DemandHistory, season: int) -> DemandHistory:
    """Own knowledge, and before it what an earlier leader has left. `season`: buckets of one.

    What was left is of no use if its buckets are of another length, or if it ended more than a season ago.
    """
    began_at = own.ended_at - len(own.counts) * own.bucket_s
    missing = round((began_at - earlier.ended_at) / own.bucket_s)
    left = len(earlier.counts) + min(0, missing)
    if earlier.bucket_s != own.bucket_s or missing > season or left <= 0:
        return own
    counts = [*earlier.counts[:left]]
    for _ in range(missing):
        counts.append(counts[-season] if len(counts) >= season else counts[-1])
    in_flight = [*earlier.in_flight[: max(0, len(earlier.in_flight) + min(0, missing))]]
    in_flight += in_flight[-1:] * max(0, missing)
    counts += own.counts
    in_flight += own.in_flight
    return DemandHistory(
        bucket_s=own.bucket_s,
        ended_at=own.ended_at,
        counts=tuple(counts[-kept(season) :]),
        in_flight=tuple(in_flight[-min(AVERAGED, len(counts)) :]),
    )
