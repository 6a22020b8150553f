"""Latent attention of a head's first layer: drafts of Kimi and DeepSeek.  Keeps no KV.

Queries and keys come out of small latents, and a part of each key, which alone is turned by its
position, is the same for all heads.  Keys and values are written out in full here: simple and
right, in a cache that only a draft of one layer can afford.

DeepSeek-AI, DeepSeek-V2 (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers import Linear, rotate
from speculative.rotary import Yarn

AT = "layers.0.self_attn."


@dataclass(frozen=True, slots=True)
class Latent:
    """Widths of latent attention; a head's query and key are `plain + turned` wide."""

    query_rank: int
    key_rank: int
    plain: int  # of a head's query and key: not turned
    turned: int  # even
    value: int  # at most plain + turned

    def shapes(self, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of its tensors; the first projections read embedding and feature."""
        query = heads * (self.plain + self.turned)
        return {
            f"{AT}q_a_proj.weight": (self.query_rank, 2 * hidden),
            f"{AT}q_a_layernorm.weight": (self.query_rank,),
            f"{AT}q_b_proj.weight": (query, self.query_rank),
            f"{AT}kv_a_proj_with_mqa.weight": (self.key_rank + self.turned, 2 * hidden),
            f"{AT}kv_a_layernorm.weight": (self.key_rank,),
            f"{AT}kv_b_proj.weight": (heads * (self.plain + self.value), self.key_rank),
            f"{AT}o_proj.weight": (hidden, heads * self.value),
        }


class LatentAttention:
    """Its weights and its part of a pass over rows."""

    def __init__(
        self, latent: Latent, heads: int, eps: float, scaling: object,
        weights: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self._latent, self._heads, self._eps = latent, heads, eps
        self._sharper = scaling.sharper if isinstance(scaling, Yarn) else 1.0
        self._query_norm = weights[f"{AT}q_a_layernorm.weight"]
        self._key_norm = weights[f"{AT}kv_a_layernorm.weight"]
        self._query_in = Linear(weights[f"{AT}q_a_proj.weight"])
        self._key_in = Linear(_halves(weights[f"{AT}kv_a_proj_with_mqa.weight"], 1, latent.turned))
        self._query_out = Linear(_halves(weights[f"{AT}q_b_proj.weight"], heads, latent.turned))
        self._key_out = Linear(weights[f"{AT}kv_b_proj.weight"])
        self._out = Linear(weights[f"{AT}o_proj.weight"])

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        """[n, 2 * hidden] -> [n, hidden]; `attend` is speculative/head.py's."""
        latent, heads, eps = self._latent, self._heads, self._eps
        small = self._query_in(x)
        small = F.rms_norm(small, small.shape[-1:], self._query_norm, eps)
        query = self._query_out(small).view(-1, heads, latent.plain + latent.turned)
        turned = rotate(query[..., latent.plain :], cos, sin)
        query = torch.cat((query[..., : latent.plain], turned), dim=-1) * self._sharper
        both = self._key_in(x)
        small, shared = both[:, : latent.key_rank], both[:, None, latent.key_rank :]
        small = F.rms_norm(small, small.shape[-1:], self._key_norm, eps)
        both = self._key_out(small).view(-1, heads, latent.plain + latent.value)
        value = both[..., latent.plain :]
        shared = rotate(shared, cos, sin).expand(-1, heads, -1)
        key = torch.cat((both[..., : latent.plain], shared), dim=-1)
        value = F.pad(value, (0, key.shape[-1] - latent.value))  # pages have one width for both
        mixed = attend(0, query, key, value).view(-1, heads, key.shape[-1])
        return self._out(mixed[..., : latent.value].flatten(1))


def _halves(weight: Tensor, heads: int, turned: int) -> Tensor:
    """The last `turned` rows of each head, whose neighbours turn together, as two halves."""
    rows = weight.view(heads, -1, weight.shape[-1])
    kept, last = rows[:, :-turned], rows[:, -turned:]
    return torch.cat((kept, last[:, 0::2], last[:, 1::2]), dim=1).view(weight.shape)
