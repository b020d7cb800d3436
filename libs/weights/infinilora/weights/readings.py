r"""Which rank and which alpha the patterns of a configuration give a module: as PEFT reads them today, and as it did.

    until 0.13    one key for both: the first of all, ranks' before alphas', by `.*\.KEY$`; what it is no key of stays
    0.14          a key for each, by the same form, which takes `a|b` for `.*\.a` or `b$`
    since 0.15    a key for each, by `(.*\.)?(KEY)$`

Until 0.14 a key that is the whole name holds where no form matches. (Established with the sources of PEFT 0.8.2,
0.13.2, 0.14.0, 0.15.0 and 0.18.0: `tuners/lora/model.py`, `utils/other.py`.) PEFT says which of them it is since 0.18,
but a file of another time is betrayed by the settings that it has not: PEFT writes all that it knows.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from infinilora.weights.patterns import Matcher


class Given(NamedTuple):
    """What patterns say of a module; None: nothing."""

    rank: int | None
    alpha: float | None


class Reading(NamedTuple):
    """How patterns were read by the PEFTs before `until` (major, minor), whose words are `when`."""

    until: tuple[int, int]
    when: str
    form: str
    is_joint: bool = False

    def given(self, matcher: Matcher, ranks: Mapping[str, int], alphas: Mapping[str, float], name: str) -> Given:
        if self.is_joint:
            rank_key = alpha_key = self._key(matcher, [*ranks, *alphas], name)
        else:
            rank_key, alpha_key = self._key(matcher, ranks, name), self._key(matcher, alphas, name)
        rank = None if rank_key is None else ranks.get(rank_key)
        return Given(rank, None if alpha_key is None else alphas.get(alpha_key))

    def _key(self, matcher: Matcher, patterns: Collection[str], name: str) -> str | None:
        """The first pattern that the name matches."""
        found = matcher.first(patterns, self.form, name) if patterns else None
        if found is not None:
            return found[0]
        return None if self.form == TODAY.form else name


_LOOSE = r".*\.{}$"
_NEVER = (1 << 30, 0)
JOINT = Reading((0, 14), "until 0.13", _LOOSE, is_joint=True)
APART = Reading((0, 15), "of 0.14", _LOOSE)
TODAY = Reading(_NEVER, "since 0.15", r"(.*\.)?({})$")

_SINCE_0_14 = frozenset({"eva_config", "exclude_modules", "lora_bias"})
_SINCE_0_15 = frozenset(
    {
        "alora_invocation_tokens",
        "arrow_config",
        "corda_config",
        "ensure_weight_tying",
        "peft_version",
        "qalora_group_size",
        "target_parameters",
        "trainable_token_indices",
        "use_qalora",
    }
)
"""Settings that PEFT writes, set or not, from a version on."""


def reading_of(peft_version: str | None) -> Reading:
    """How the PEFT of this version reads patterns; today's where the version says nothing."""
    found = re.match(r"\s*v?(\d+)\.(\d+)", peft_version or "")
    version = (int(found[1]), int(found[2])) if found else TODAY.until
    return next((reading for reading in (JOINT, APART) if version < reading.until), TODAY)


def other_readings(keys: Collection[str]) -> tuple[Reading, ...]:
    """How else than today a configuration with these settings may have been read by the PEFT that wrote it."""
    if not _SINCE_0_15.isdisjoint(keys):
        return ()
    return (APART,) if not _SINCE_0_14.isdisjoint(keys) else (JOINT, APART)
