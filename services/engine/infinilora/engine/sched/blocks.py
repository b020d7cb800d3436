"""KV blocks: who holds which, and which full ones can be found again by their content.

             take                      release (last holder)
free, blank ------> held, by n holders ---------------------> free, blank        if never committed
                      |        ^                              free, remembered   if committed
               commit(key)     | find(key)                          |
                      v        +------------------------------------+
                held, remembered                                    | taken when it is the oldest
                                                                    v
                                                                  blank again
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from infinilora.protocol.ids import Digest


def chain_root(digest: Digest | None) -> bytes:
    """The key of the empty prefix under an adapter, or under the base: KV of different digests never meets."""
    kind, name = (b"base", b"") if digest is None else (b"adapter", digest.encode())
    return _key(kind, name)


def chain_next(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block: its tokens after everything before them."""
    return _key(b"block", parent, struct.pack(f"<{len(tokens)}I", *tokens))


def _key(*parts: bytes) -> bytes:
    """Length-prefixed parts, so that no two lists of parts spell the same bytes."""
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


class BlockPool:
    """Blocks 0..num_blocks-1. A block is free (no holder) or held (by one sequence or more, never negative).

    Free blocks are taken oldest first, so that what was released last is found again longest.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The longest run of remembered blocks for a chain of keys. They are not held yet."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of these have a holder already: holding them again costs nothing."""
        return sum(1 for b in blocks if self._holders[b])

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each: blocks that `find` gave."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int] | None:
        """`count` blank blocks, each held once; None, and nothing taken, if there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
            if block in self._key_of:
                del self._by_key[self._key_of.pop(block)]
        return taken

    def commit(self, block: int, key: bytes) -> None:
        """Remember a full, computed block by its key. The first block of a key keeps it."""
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each. Ends of chains become the oldest: a prefix outlives what follows it."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise AssertionError unless every block is free or held, never both, and the maps agree."""
        for block, holders in enumerate(self._holders):
            assert holders >= 0, f"block {block} has {holders} holders"
            assert (holders == 0) == (block in self._free), f"block {block}: {holders} holders, free list differs"
        assert len(self._by_key) == len(self._key_of), "two keys name one block, or one key two"
        for key, block in self._by_key.items():
            assert self._key_of[block] == key, f"block {block} is remembered under another key"

    def check_idle(self) -> None:
        """As `check`, and nobody holds a block."""
        self.check()
        assert self.num_free == self.num_blocks, f"{self.num_blocks - self.num_free} blocks leaked"
