"""Attention over paged KV: the protocol and its backends.  Imports none of them until asked.

A backend prepares once a step and runs once a layer.  A layer's pages are
[blocks, 2, size, kv_heads, head_dim], keys before values; slot = block id * size + offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.batch import Batch

BACKENDS = {"cpu": "engine.attention.cpu:CpuAttention"}


class Attention(Protocol):
    """Causal attention of a batch's rows, each over its own sequence's blocks."""

    def prepare(self, batch: Batch) -> None:
        """Build what all layers of this step share: indices and masks."""

    def run(self, query: Tensor, keys: Tensor, values: Tensor, pages: Tensor) -> Tensor:
        """Write the new keys and values [N, kv_heads, head_dim] to their slots, then attend.

        `query` is [N, heads, head_dim], `pages` one layer's; the result is [N, heads * head_dim].
        """
