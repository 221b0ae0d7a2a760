"""The prefix index: which block holds the KV of which run of tokens, and why a lookup missed.

Keys form a hash chain over full blocks (the scheme that vLLM's automatic prefix caching uses):

    key[0] = H(root, tokens of block 0)      key[i] = H(key[i-1], tokens of block i)

with H = BLAKE2b of 16 bytes (RFC 7693) and a root that names the model, the block size and the
request's salt; so equal keys mean equal tokens from the very first one. At 2^64 blocks a collision
would become likely; a cache holds 2^20.

The index names blocks but owns none: `BlockPool` decides when one is evicted and says so.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from deepinfer.types import PrefixMiss

NUM_GHOSTS = 65536  # keys of evicted blocks that are remembered, to tell "evicted" from "cold"


def root_key(model: str, block_tokens: int, salt: bytes = b"") -> bytes:
    """The parent of every first block."""
    text = f"{model}\0{block_tokens}\0".encode()
    return hashlib.blake2b(text + salt, digest_size=16).digest()


def extend_keys(
    keys: list[bytes], root: bytes, token_ids: NDArray[np.int32], block_tokens: int
) -> None:
    """Appends the keys of the full blocks in `token_ids` [known] that `keys` does not have yet."""
    for index in range(len(keys), len(token_ids) // block_tokens):
        tokens = token_ids[index * block_tokens : (index + 1) * block_tokens]
        parent = keys[index - 1] if index else root
        keys.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())


class PrefixIndex:
    """key <-> block, for published blocks."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.queries_tokens = 0
        self.hits_tokens = 0
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._coming: dict[bytes, int] = {}  # keys that running sequences are computing now

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: list[bytes], most_blocks: int) -> list[int]:
        """Blocks of the longest known prefix, at most `most_blocks` of them."""
        blocks: list[int] = []
        if self.enabled:
            for key in keys[:most_blocks]:
                block = self._block_of.get(key)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def reach(self, keys: list[bytes], most_blocks: int, near: int) -> int:
        """About how many blocks `match` would find, looked for around `near`, the last answer.

        A request that waits is tried in every step; this keeps a try from walking a long prefix
        again. It may be too high where a block inside the prefix was evicted, so `match` decides.
        """
        if not self.enabled:
            return 0
        reached = min(near, most_blocks)
        while reached < most_blocks and keys[reached] in self._block_of:
            reached += 1
        while reached and keys[reached - 1] not in self._block_of:
            reached -= 1
        return reached

    def explain_miss(self, keys: list[bytes], num_hits: int, most_blocks: int) -> PrefixMiss:
        """Why the match of `keys` ended after `num_hits` blocks."""
        if not self.enabled:
            return PrefixMiss.DISABLED
        if most_blocks == 0:
            return PrefixMiss.SHORT
        if num_hits == most_blocks:
            return PrefixMiss.NONE
        if keys[num_hits] in self._ghosts:
            return PrefixMiss.EVICTED
        return PrefixMiss.DIVERGED if num_hits else PrefixMiss.COLD

    def is_coming(self, keys: list[bytes], index: int) -> bool:
        """True while a running sequence computes that block: waiting saves computing it twice."""
        return self.enabled and index < len(keys) and keys[index] in self._coming

    def announce(self, keys: list[bytes]) -> None:
        for key in keys:
            self._coming[key] = self._coming.get(key, 0) + 1

    def withdraw(self, keys: list[bytes]) -> None:
        for key in keys:
            left = self._coming[key] - 1
            if left:
                self._coming[key] = left
            else:
                del self._coming[key]

    def publish(self, block: int, key: bytes) -> bool:
        """False if another block already stands for that key; then nothing changes."""
        if not self.enabled or key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._ghosts.pop(key, None)
        return True

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten."""
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._ghosts[key] = None
        if len(self._ghosts) > NUM_GHOSTS:
            self._ghosts.popitem(last=False)

    def check(self) -> None:
        assert len(self._block_of) == len(self._key_of)
        assert all(self._key_of[block] == key for key, block in self._block_of.items())
        assert all(count > 0 for count in self._coming.values())

    def check_idle(self) -> None:
        assert not self._coming, "keys are announced but nobody computes them"
