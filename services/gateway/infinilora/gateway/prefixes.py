"""Which engines have computed the beginning of a prompt before. A guess for routing, never a truth: pure, and bounded.

A prompt is a chain of hashes, one for each BLOCK_TOKENS, that begins with its digest: block k stands for the adapter
and all tokens up to there. Link 0, before any token, tells who served the adapter at all.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from infinilora.protocol.ids import Digest

BLOCK_TOKENS = 64
MAX_BLOCKS = 32768
MAX_HOLDERS = 4
"""Engines remembered for one block, the last ones."""

Chain = tuple[bytes, ...]


def chain_of(digest: Digest | None, tokens: Sequence[int]) -> Chain:
    """The links of a prompt: its digest's, then one for each whole block of its tokens."""
    links = [_link(b"base" if digest is None else b"adapter " + digest.encode(), b"")]
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        links.append(_link(links[-1], array("I", tokens[at : at + BLOCK_TOKENS]).tobytes()))
    return tuple(links)


class PrefixMemory:
    """The last blocks that were computed and by whom. At most `max_blocks`; the least recently used go first."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, chain: Chain, engine: str) -> None:
        """This engine computes these tokens now."""
        for link in reversed(chain):  # the deepest are the oldest: a chain is forgotten from its end
            others = [known for known in self._holders.get(link, ()) if known != engine]
            self._holders[link] = (engine, *others[: MAX_HOLDERS - 1])
            self._holders.move_to_end(link)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def matches(self, chain: Chain) -> dict[str, int]:
        """Engines that know the digest, each with how many of the first tokens it has computed before."""
        found: dict[str, int] = {}
        for depth, link in enumerate(chain):
            holders = self._holders.get(link)
            if holders is None:
                break
            found |= dict.fromkeys(holders, depth * BLOCK_TOKENS)
        return found


def _link(parent: bytes, data: bytes) -> bytes:
    return blake2b(parent + data, digest_size=16).digest()
