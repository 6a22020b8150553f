"""EAGLE-3 drafts on a GPU, as launches on fixed buffers that graphs can hold.  Verifies nothing.

The same rows in the same slots as speculative/eagle3.py, whose head says what is computed.  Which
rows are true and what was drawn is known to the device alone, so every flat token of a step gives
a row, and those behind a wrong draft go to a block that is nobody's (engine/cuda/chaining.py).
Rounding may differ from there: it decides how often a draft is right, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels.chain_attention import LINES, chain_attention
from engine.kernels.chain_draw import chain_draw
from engine.kernels.chain_gate import chain_gate
from engine.kernels.chain_inputs import chain_inputs
from engine.kernels.chain_norms import chain_norms
from engine.kernels.norm import norm
from engine.kernels.overlap import LATE, OFF, OVERLAPS
from engine.kernels.rope import rotate_and_store
from engine.layers import Linear
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
        """Raise BadCheckpoint for heads of another shape than a GPU's kernels know.

        Lays weights of `head` out anew, in place of the old ones; it gives the same as before.
        """
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
        self.shape: object = config, head.dtype, head.kept is None, max_len
        self.taps = tuple(boundary - 1 for boundary in config.taps)
        self._heads = config.heads * config.head_dim
        layer.mix.pair()
        self._qkv = layer.mix.qkv
        self._width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self._overlap = LATE if OVERLAPS and head.device.type == "cuda" else OFF
        cos, sin = turns(config.head_dim, config.rope_theta, config.rope_scaling, max_len + SPARE,
                         torch.float32)
        half = config.head_dim // 2
        self._cos = cos[:, 0, :half].contiguous().to(head.device)
        self._sin = sin[:, 0, half:].contiguous().to(head.device)
        self._kept = None if head.kept is None else head.kept.to(head.device, torch.int32)

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
        self._both = buffer(tokens, self._width)
        self._feature = buffer(rows, config.hidden)

    def copy(self, source: int, target: int) -> None:
        """See DeviceDraft."""
        self.pages[target].copy_(self.pages[source])
        self.last_features[target].copy_(self.last_features[source])

    # ---- passes ----------------------------------------------------------------------------------

    def extend(
        self, kept: Sequence[Tensor], tokens: Tensor, positions: Tensor, slots: Tensor,
        ends: Tensor,
    ) -> None:  # fmt: skip
        """See CapturedDraft."""
        head, fused = self.head, self._fused[: len(tokens)]
        joined = torch.cat(list(kept), dim=1)
        if head.fuse_gains is None:
            read = joined.to(head.dtype)
        else:
            read = torch.empty_like(joined, dtype=head.dtype)
            chain_norms(joined, head.fuse_gains, read, head.config.eps)
        _product(read, head.fc, fused)
        read = self._inputs(tokens, fused, ends=ends, kept=self.last_features)
        self._project(read, positions, slots, self._both[: len(tokens)])

    def join(self, tokens: Tensor, positions: Tensor, slots: Tensor, blocks: Tensor) -> None:
        """See CapturedDraft."""
        read = self._inputs(tokens, self.last_features, picked=blocks)
        self._project(read, positions, slots, read.new_empty(len(tokens), self._width))

    def draw(
        self, chains: Chains, step: int, place: Tensor, table: Tensor, records: Tensor
    ) -> None:
        """See CapturedDraft."""
        head, layer, many = self.head, self._layer, len(place)
        positions, x = chains.positions[step], self._feature[:many]
        if step:
            both, picked = x.new_empty(many, self._width), None
            normed = x if head.config.norm_before_residual else None
            read = self._inputs(chains.tokens[step - 1], x, normed=normed)
            self._project(read, positions, chains.slots[step], both)
        else:
            both, picked = self._both, chains.row
            self._take(chains.row, x)
        mixed = x.new_empty(many, self._heads)
        chain_attention(both, self.pages, table, place, positions, chains.begin, mixed,
                        picked=picked, overlap=self._overlap)
        # From a feature to the next one in place: torch copies what it adds to elsewhere.
        _add(x, mixed, self._mix.out)
        inner = x.new_empty(many, head.config.intermediate)
        chain_gate(layer.gate_up(self._normed(x, layer.mlp_norm)), inner)
        _add(x, inner, layer.down)
        normed = x if head.config.norm_output else torch.empty_like(x)
        norm(x, head.norm, normed, head.config.eps)
        chain_draw(head.lm_head(normed), self._kept, records, place, positions,
                   chains.tokens[step], 2, overlap=self._overlap)

    def _take(self, rows: Tensor, x: Tensor) -> None:
        """What the residual begins with: the true features of these rows of `extend`."""
        head = self.head
        if head.config.norm_before_residual:
            norm(self._fused, head.hidden_norm, x, head.config.eps, picked=rows,
                 overlap=self._overlap)
        else:
            torch.index_select(self._fused, 0, rows, out=x)

    def _inputs(self, tokens: Tensor, feature: Tensor, **more: Tensor | None) -> Tensor:
        """What the layer reads of such rows; `more` as kernels/chain_inputs.py has it."""
        head = self.head
        read = feature.new_empty(len(tokens), 2 * feature.shape[1])
        chain_inputs(tokens, head.embedding, self._layer.attention_norm, feature,
                     head.hidden_norm, read, head.config.eps, overlap=self._overlap, **more)
        return read

    def _project(self, read: Tensor, positions: Tensor, slots: Tensor, both: Tensor) -> None:
        """Queries of these rows to `both`, keys and values to their slots."""
        _product(read, self._qkv, both)
        rotate_and_store(both, self.pages, positions, slots, self._cos, self._sin,
                         overlap=self._overlap)

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        out = torch.empty_like(x)
        norm(x, gain, out, self.head.config.eps)
        return out


def _product(x: Tensor, linear: Linear, out: Tensor) -> None:
    assert linear.weight is not None, "a packed weight cannot run here"
    if linear.bias is None:
        torch.mm(x, linear.weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x, linear.weight.t(), out=out)


def _add(x: Tensor, inner: Tensor, linear: Linear) -> None:
    """x += linear(inner), in one product where there is no bias."""
    assert linear.weight is not None, "a packed weight cannot run here"
    x.addmm_(inner, linear.weight.t())
    if linear.bias is not None:
        x.add_(linear.bias)
