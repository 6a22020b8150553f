"""The frozen target over packed rows: what a head reads, what it should have said.  Keeps no KV.

The served model itself (engine/models/) runs here, on operations for whole rows: causal attention
within each sequence of a row, and nothing written.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.layers import Linear, Norm, rotary_tables, rotate
from engine.models import Model, family
from engine.weights import load
from speculative.train.packing import Batch

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint
    from engine.model_config import ModelConfig

CHUNK = 8192  # rows of logits over the whole vocabulary at a time
MASKED = -3e4  # added to a score: its share is 0 exactly, and no kernel meets -inf minus -inf


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention may look and MASKED elsewhere: what fused kernels read, made once."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, MASKED)


def kernels(device: torch.device) -> AbstractContextManager[None]:
    """Which of torch's attention kernels may be chosen.

    On a GPU the one that reads masks and keeps no scores, or the plain formula.  cuDNN's plans anew
    for every shape, and here most batches have one of their own.
    """
    if device.type != "cuda":
        return nullcontext()
    # Without types in torch.
    chosen: AbstractContextManager[None] = sdpa_kernel(  # type: ignore[no-untyped-call]
        [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return chosen


@dataclass(frozen=True, slots=True)
class Wanted:
    """The target's distributions of tokens that drafts are compared with, at temperature 1."""

    row: Tensor  # [rows, length] int64: where a place's distribution of the NEXT token is; -1
    share: Tensor  # [C, draft_vocab] float: probability of each token that is kept
    inside: Tensor  # [C] bool: the likeliest token of all is one of them
    best: Tensor  # [C] int64: that token's place in the draft vocabulary, where it is inside

    def met(self, batch: Batch, step: int) -> Tensor:
        """[R] int64: the row here that each of `batch.living(step)` is compared with."""
        return self.row.gather(1, batch.behind(1 + step)).flatten()[batch.living(step)]


class Target:
    """One model's weights, in no_grad."""

    def __init__(
        self, checkpoint: Checkpoint, taps: tuple[int, ...], length: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`taps` are boundaries from 1 on; positions go up to `length`.  Raise BadWeights."""
        kind = family(checkpoint.architecture)
        self.config: ModelConfig = checkpoint.config
        self.device, self.dtype = device, dtype
        weights = load(checkpoint, kind.expected(self.config), dtype, None, device)
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.model: Model = kind(self.config, weights, length, tuple(tap - 1 for tap in taps))
        cos, sin = rotary_tables(self.config, length, dtype)
        self._cos, self._sin = cos.to(device), sin.to(device)

    @torch.no_grad()
    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features [rows, length, taps * hidden], and the last layer's output [rows, length, h]."""
        hidden = self.model.run(PackedOps(self.config, batch, self._cos, self._sin))
        taps, shape = hidden.taps, batch.tokens.shape
        assert taps is not None, "the model was built without taps"
        return taps.view(*shape, -1), hidden.last.view(*shape, -1)

    @torch.no_grad()
    def wanted(self, batch: Batch, last: Tensor, kept: Tensor) -> Wanted:
        """Distributions over the `kept` ids [draft_vocab] wherever a chain may need one."""
        # A chain that begins at i meets the tokens i+2 .. i+1+left, which are drawn one place
        # before; and every one of those is met by one chain as its first.
        count, length = batch.starts.shape[1], batch.tokens.shape[1]
        begins = batch.starts.flatten()[batch.chains]
        places = batch.chains // count * length + begins + 1
        rows = last.flatten(0, 1)[places]
        row = torch.full_like(batch.tokens, -1)
        row.view(-1)[places] = torch.arange(len(rows), device=row.device)
        parts = [self._part(rows[at : at + CHUNK], kept) for at in range(0, len(rows), CHUNK)]
        share, best = (torch.cat(part) for part in zip(*parts, strict=True))
        place = torch.searchsorted(kept, best).clamp_(max=len(kept) - 1)
        return Wanted(row, share, kept[place] == best, place)

    def _part(self, rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(rows)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        share = (wide[:, kept] - wide.logsumexp(-1, keepdim=True)).exp_()
        return share, logits.argmax(-1)


class PackedOps:
    """Ops (engine/ops.py) over whole rows."""

    def __init__(self, config: ModelConfig, batch: Batch, cos: Tensor, sin: Tensor) -> None:
        """cos, sin of `rotary_tables`."""
        self._config, self._tokens = config, batch.tokens.view(-1)
        self._shape = batch.tokens.shape
        positions = batch.positions.view(-1)
        self._cos, self._sin = cos.index_select(0, positions), sin.index_select(0, positions)
        documents = batch.documents
        # Padding attends to itself: a row of attention without a key would be a mean of all.
        same = documents[:, :, None] == documents[:, None, :]
        self._mask = additive(same.tril_(), cos.dtype)[:, None]

    def embed(self, table: Tensor) -> Tensor:
        """See Ops."""
        return F.embedding(self._tokens, table)

    def attend(self, layer: int, x: Tensor, norm: Norm, qkv: Linear) -> Tensor:
        """See Ops; no KV is written."""
        config, dim = self._config, self._config.head_dim
        turning = config.heads + config.kv_heads
        both = qkv(F.rms_norm(x, x.shape[-1:], *norm))
        turned = rotate(both[:, : turning * dim].view(-1, turning, dim), self._cos, self._sin)
        heads = turned.view(*self._shape, turning, dim).transpose(1, 2)
        value = both[:, turning * dim :].view(*self._shape, config.kv_heads, dim).transpose(1, 2)
        query, key = heads[:, : config.heads], heads[:, config.heads :]
        groups = config.heads // config.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self._mask)
        return mixed.transpose(1, 2).reshape(len(x), -1)

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
