"""EAGLE-3 drafts on a GPU, as launches on fixed buffers that graphs can hold.  Verifies nothing.

The same rows in the same slots as speculative/eagle3.py, whose head says what is computed.  Which
rows are true and what was drawn is known to the device alone, so every flat token of a step gives
a row, and those behind a wrong draft go to a block that is nobody's (engine/cuda/chaining.py).
Rounding may differ from there: it decides how often a draft is right, never an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.chain_attention import LINES, chain_attention
from engine.kernels.chain_draw import chain_draw
from engine.kernels.chain_inputs import chain_inputs
from engine.kernels.chain_rows import scatter
from engine.kernels.norm import norm
from engine.kernels.rope import rotate_and_store
from engine.layers import Linear, join_heads
from engine.model_config import BadCheckpoint
from speculative.head import Grouped, Head
from speculative.rotary import turns

if TYPE_CHECKING:
    from engine.kernels.chain_rows import Chains

SPARE = 256  # positions beyond the longest sequence: chains that lead there are cut by the host


class CapturedEagle3:
    """A head and its pages; see engine.proposer.CapturedDraft."""

    source = "eagle3"

    def __init__(self, head: Head, max_len: int) -> None:
        """Raise BadCheckpoint for heads of another shape than a GPU's kernels know."""
        config, layer = head.config, head.layers[0]
        if len(head.layers) > 1 or not isinstance(layer.mix, Grouped):
            raise BadCheckpoint(
                f"The draft has {config.layers} layers{', latent attention' * bool(config.latent)};"
                " on a GPU one layer with grouped heads is served. Start with --device cpu, or "
                "choose another draft.")
        group, dim = config.heads // config.kv_heads, config.head_dim
        if group > LINES or dim < 16 or dim & (dim - 1):
            raise BadCheckpoint(
                f"The draft has {group} query heads a key-value head, of {dim} numbers each; on a "
                f"GPU up to {LINES} are served, of a power of two from 16 on. Start with --device "
                "cpu, or choose another draft.")
        self.head, self._layer, self._mix = head, layer, layer.mix
        self.taps = tuple(boundary - 1 for boundary in config.taps)
        self._heads = config.heads * config.head_dim
        qkv = layer.mix.qkv
        assert qkv.weight is not None
        self._qkv = self._paired(qkv.weight)
        self._bias = None if qkv.bias is None else self._paired(qkv.bias)
        cos, sin = turns(config.head_dim, config.rope_theta, config.rope_scaling, max_len + SPARE,
                         torch.float32)
        half = config.head_dim // 2
        self._cos = cos[:, 0, :half].contiguous().to(head.device)
        self._sin = sin[:, 0, half:].contiguous().to(head.device)
        self._kept = None if head.kept is None else head.kept.to(head.device, torch.int32)

    def _paired(self, joined: Tensor) -> Tensor:
        """Query and key rows as the rotation wants them (see engine.layers.join_heads)."""
        config = self.head.config
        kv = config.kv_heads * config.head_dim
        parts = list(torch.split(joined, [self._heads, kv, kv]))
        return join_heads(parts, dim=config.head_dim, paired=True)

    # ---- memory ----------------------------------------------------------------------------------

    def block_bytes(self, size: int) -> int:
        """Of a block of `size` tokens."""
        config, each = self.head.config, self.head.dtype.itemsize
        return each * (2 * size * config.kv_heads * config.head_dim + config.hidden)

    def reserve(self, blocks: int, size: int, dtype: object, device: object) -> None:
        """See DeviceDraft; the pages keep the head's own type."""
        config, head = self.head.config, self.head
        self.pages = torch.zeros(
            (blocks, 2, size, config.kv_heads, config.head_dim), dtype=head.dtype,
            device=head.device)
        self.last_features = torch.zeros(
            (blocks, config.hidden), dtype=head.dtype, device=head.device)

    def prepare(self, tokens: int, rows: int) -> None:
        """See CapturedDraft."""
        config, head = self.head.config, self.head

        def buffer(count: int, width: int) -> Tensor:
            return torch.zeros(count, width, dtype=head.dtype, device=head.device)

        self._fused = buffer(tokens, config.hidden)
        self._both = buffer(tokens, len(self._qkv))
        self._feature = buffer(rows, config.hidden)

    def copy(self, source: int, target: int) -> None:
        """See DeviceDraft."""
        self.pages[target].copy_(self.pages[source])
        self.last_features[target].copy_(self.last_features[source])

    # ---- passes ----------------------------------------------------------------------------------

    def extend(
        self, kept: list[Tensor], tokens: Tensor, positions: Tensor, slots: Tensor, ends: Tensor
    ) -> None:
        """See CapturedDraft."""
        fused = self._fused[: len(tokens)].copy_(self.head.fuse(torch.cat(kept, dim=-1)))
        scatter(fused, ends, self.last_features)
        self._project(fused, tokens, positions, slots, self._both[: len(tokens)])

    def join(self, tokens: Tensor, positions: Tensor, slots: Tensor, blocks: Tensor) -> None:
        """See CapturedDraft."""
        feature = self.last_features.index_select(0, blocks)
        both = feature.new_empty(len(feature), len(self._qkv))
        self._project(feature, tokens, positions, slots, both)

    def draw(
        self, chains: Chains, step: int, place: Tensor, table: Tensor, records: Tensor
    ) -> None:
        """See CapturedDraft."""
        config, layer, many = self.head.config, self._layer, len(place)
        positions = chains.positions[step]
        if step:
            feature = self._feature[:many]
            both = feature.new_empty(many, len(self._qkv))
            self._project(feature, chains.tokens[step - 1], positions, chains.slots[step], both)
        else:
            feature = self._fused.index_select(0, chains.row)
            both = self._both.index_select(0, chains.row)
        mixed = feature.new_empty(many, self._heads)
        chain_attention(both, self.pages, table, place, positions, mixed)
        x = feature
        if config.norm_before_residual:
            x = self._normed(feature, self.head.hidden_norm)
        x = _added(x, mixed, self._mix.out)
        gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
        x = _added(x, F.silu(gate).mul_(up), layer.down)
        normed = self._normed(x, self.head.norm)
        self._feature[:many].copy_(normed if config.norm_output else x)
        logits = self.head.lm_head(normed)
        chain_draw(logits, self._kept, records, place, positions, chains.tokens[step], 2)

    def _project(
        self, feature: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, both: Tensor
    ) -> None:
        """Queries of these rows to `both`, keys and values to their slots."""
        head = self.head
        read = feature.new_empty(len(feature), 2 * feature.shape[1])
        chain_inputs(tokens, head.embedding, self._layer.attention_norm, feature,
                     head.hidden_norm, read, head.config.eps)
        if self._bias is None:
            torch.mm(read, self._qkv.t(), out=both)
        else:
            torch.addmm(self._bias, read, self._qkv.t(), out=both)
        rotate_and_store(both, self.pages, positions, slots, self._cos, self._sin)

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        out = torch.empty_like(x)
        norm(x, gain, out, self.head.config.eps)
        return out


def _added(x: Tensor, inner: Tensor, linear: Linear) -> Tensor:
    """x + linear(inner), in one product where there is no bias."""
    assert linear.weight is not None, "a packed weight cannot run here"
    out = torch.addmm(x, inner, linear.weight.t())
    return out if linear.bias is None else out.add_(linear.bias)
