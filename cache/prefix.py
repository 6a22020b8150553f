"""Chained block hashes: the name under which a KV block is found.  Holds no blocks, no torch.

key(i) = xxh3_128(key(i-1) || the block's token ids as u32), with the tenant's root as the first
parent.  A key only finds; every hit is confirmed by comparing parent and ids (cache/blocks.py).
A root is never confirmed, so it is the one cryptographic link of the chain.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import xxhash

BLOCK = 64  # tokens a block; one size everywhere, so that hashes, pages and tables agree
KEY_BYTES = 16  # a block's key; a root is longer, so that neither is ever taken for the other


def root(namespace: bytes) -> bytes:
    """The first parent of a tenant's chains: 32 bytes, SHA-256."""
    return hashlib.sha256(b"slipstream-kv-1" + namespace).digest()


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as u32 in the machine's order; an `array("I")` packs 30 times faster."""
    ids = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    return ids.tobytes()


def digest(parent: bytes, packed: bytes) -> bytes:
    """The 16 byte key of a block whose ids are packed already."""
    return xxhash.xxh3_128_digest(parent + packed)


def key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The 16 byte key of one full block of token ids under its parent's key."""
    return digest(parent, pack(tokens))


def chain(parent: bytes, tokens: Sequence[int], size: int = BLOCK) -> list[bytes]:
    """The keys of all full blocks of `tokens`, in order; a tail shorter than a block has none."""
    packed = pack(tokens)
    keys: list[bytes] = []
    step = size * 4
    for start in range(0, len(tokens) // size * step, step):
        parent = digest(parent, packed[start : start + step])
        keys.append(parent)
    return keys
