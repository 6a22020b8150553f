"""Which blocks of a sequence others can find, under which names.  Hands out no block.

Only committed tokens are published: never drafts, never what a step still computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.blocks import BlockPool
    from engine.sequence import Sequence


def publish(pool: BlockPool, seq: Sequence) -> None:
    """Give every block that is full of committed tokens its key: others can share it."""
    size = pool.size
    while (len(seq.keys) + 1) * size <= seq.computed:
        i = len(seq.keys)
        parent = seq.keys[-1] if seq.keys else seq.root
        block = seq.blocks[i]
        seq.keys.append(pool.publish(block, parent, seq.tokens[i * size : (i + 1) * size]))
        if block.key is not None:
            fresh = max(0, min(seq.prompt_len, (i + 1) * size) - i * size)
            seq.written = min(seq.written + fresh, seq.prompt_len - (seq.cached or 0))


def publish_tail(pool: BlockPool, seq: Sequence) -> None:
    """Let the block that is not full be found too: the next turn goes on in its middle."""
    size, full = pool.size, len(seq.keys)
    tail = seq.tokens[full * size : seq.computed]
    if not pool.part <= len(tail) < size:
        return
    block = seq.blocks[full]
    if block.key is None and block.twin is None:
        pool.publish(block, seq.keys[-1] if full else seq.root, tail)
