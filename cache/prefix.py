"""Chained block hashes: the name under which a KV block is found.  Holds no blocks, imports no torch.

key(i) = xxh3_128(key(i-1) || the block's token ids as little-endian u32), with the tenant's namespace as
the first parent.  A key only finds; every hit is confirmed by comparing parent and ids (cache/blocks.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

BLOCK = 64  # tokens a block; one size everywhere, so that hashes, pages and tables agree


def root(namespace: bytes) -> bytes:
    """The first parent of a tenant's chains: 16 bytes."""
    return xxhash.xxh3_128_digest(b"slipstream-kv-1" + namespace)


def key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The 16 byte key of one full block of token ids under its parent's key."""
    return xxhash.xxh3_128_digest(parent + array("I", tokens).tobytes())


def chain(parent: bytes, tokens: Sequence[int], size: int = BLOCK) -> list[bytes]:
    """The keys of all full blocks of `tokens`, in order; a tail shorter than a block has none."""
    packed = memoryview(array("I", tokens)).cast("B")
    keys: list[bytes] = []
    step = size * 4
    for start in range(0, len(tokens) // size * step, step):
        parent = xxhash.xxh3_128_digest(parent + packed[start : start + step])
        keys.append(parent)
    return keys
