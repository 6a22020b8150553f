"""What a decoder layer asks of a device, and the torch reference of it.  Owns no weights.

A model family (engine/models/) is written once against `Ops`.  `TorchOps` is exact in any float
type and quick on a CPU; engine/cuda/ops.py gives the same operations as fused kernels on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F
from torch import Tensor

from engine.layers import Linear, Norm, rotate

if TYPE_CHECKING:
    from engine.attention import Attention
    from engine.batch import Batch
    from engine.model_config import ModelConfig


class Ops(Protocol):
    """The operations of one step over N flat tokens; a result is valid until the next one of its
    kind, except that of `keep`."""

    def embed(self, table: Tensor) -> Tensor:
        """[N, hidden]: the rows of `table` [vocab, hidden] that the step's tokens name."""

    def attend(self, layer: int, x: Tensor, norm: Norm, qkv: Linear) -> Tensor:
        """Norm `x` [N, hidden], project, rotate, write the layer's KV and attend.

        Gives [N, heads * head_dim].
        """

    def add(self, x: Tensor, inner: Tensor, linear: Linear) -> Tensor:
        """x + linear(inner); may overwrite `x`."""

    def gated(self, x: Tensor, norm: Norm, gate_up: Linear) -> Tensor:
        """silu(gate) * up [N, intermediate] of normed `x`, by a joined projection (`join_gate`)."""

    def keep(self, x: Tensor) -> Tensor:
        """`x` as it is now, for whoever reads it behind the last layer."""


class TorchOps:
    """One step in plain torch operations."""

    def __init__(
        self,
        config: ModelConfig,
        batch: Batch,
        pages: Tensor,
        attention: Attention,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """`pages` [layers, blocks, 2, size, kv_heads, head_dim]; cos, sin of `rotary_tables`."""
        self._config, self._batch, self._pages, self._attention = config, batch, pages, attention
        self._cos = cos.index_select(0, batch.positions)
        self._sin = sin.index_select(0, batch.positions)

    def embed(self, table: Tensor) -> Tensor:
        """See Ops."""
        return F.embedding(self._batch.tokens, table)

    def attend(self, layer: int, x: Tensor, norm: Norm, qkv: Linear) -> Tensor:
        """See Ops."""
        heads, kv_heads = self._config.heads, self._config.kv_heads
        dim = self._config.head_dim
        rotated = (heads + kv_heads) * dim
        both = qkv(F.rms_norm(x, x.shape[-1:], *norm))
        turned = rotate(both[:, :rotated].view(-1, heads + kv_heads, dim), self._cos, self._sin)
        values = both[:, rotated:].view(-1, kv_heads, dim)
        return self._attention.run(turned[:, :heads], turned[:, heads:], values, self._pages[layer])

    def add(self, x: Tensor, inner: Tensor, linear: Linear) -> Tensor:
        """See Ops."""
        return x + linear(inner)

    def gated(self, x: Tensor, norm: Norm, gate_up: Linear) -> Tensor:
        """See Ops."""
        gate, up = gate_up(F.rms_norm(x, x.shape[-1:], *norm)).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def keep(self, x: Tensor) -> Tensor:
        """See Ops; nothing here overwrites it."""
        return x
