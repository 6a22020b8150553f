"""Llama 2, 3, 3.1 and SmolLM2, in as few and large operations as torch allows.  Samples nothing.

Projections that read the same input are one matrix (q, k and v; gate and up): on a CPU a step at
batch one is bound by reading weights, and by the number of operations beside them.

Touvron et al., LLaMA (2023): pre-norm with RMSNorm, rotary positions, SwiGLU, no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers import Linear, rotary_tables, rotate
from engine.models import Hidden

if TYPE_CHECKING:
    from engine.attention import Attention
    from engine.batch import Batch
    from engine.checkpoint import ModelConfig


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one decoder layer."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Weights and forward pass; `taps` name the layers whose outputs a device draft reads."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        max_len: int,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.config = config
        self.taps = taps
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = Linear(self.embedding if config.tied else weights["lm_head.weight"])
        self.layers = [_layer(weights, i) for i in range(config.layers)]
        dtype, device = self.embedding.dtype, self.embedding.device
        cos, sin = rotary_tables(config, max_len, dtype)
        self.cos, self.sin = cos.to(device), sin.to(device)

    @staticmethod
    def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor the family needs, in the checkpoint's own names."""
        hidden, inner = config.hidden, config.intermediate
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tied:
            shapes["lm_head.weight"] = (config.vocab, hidden)
        for i in range(config.layers):
            at = f"model.layers.{i}."
            shapes[at + "input_layernorm.weight"] = (hidden,)
            shapes[at + "post_attention_layernorm.weight"] = (hidden,)
            products = {
                "self_attn.q_proj": (q, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, q),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            for name, shape in products.items():
                shapes[f"{at}{name}.weight"] = shape
                biased = config.mlp_bias if name.startswith("mlp") else config.attention_bias
                if biased:
                    shapes[f"{at}{name}.bias"] = shape[:1]
        return shapes

    def forward(self, batch: Batch, pages: Tensor, attention: Attention) -> Hidden:
        """Run all layers over the flat tokens; writes their KV.  See the Model protocol."""
        config = self.config
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        rotated = (heads + kv_heads) * dim
        x = F.embedding(batch.tokens, self.embedding)
        cos = self.cos.index_select(0, batch.positions)
        sin = self.sin.index_select(0, batch.positions)
        tapped: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            normed = F.rms_norm(x, x.shape[-1:], layer.attention_norm, config.rms_eps)
            qkv = layer.qkv(normed)
            turned = rotate(qkv[:, :rotated].view(-1, heads + kv_heads, dim), cos, sin)
            values = qkv[:, rotated:].view(-1, kv_heads, dim)
            mixed = attention.run(turned[:, :heads], turned[:, heads:], values, pages[i])
            x = x + layer.out(mixed)
            normed = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, config.rms_eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
            if i in self.taps:
                tapped.append(x)
        last = F.rms_norm(x, x.shape[-1:], self.norm, config.rms_eps)
        return Hidden(last, torch.cat(tapped, dim=-1) if tapped else None)

    def logits(self, rows: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab]."""
        return self.head(rows)


def _layer(weights: dict[str, Tensor], i: int) -> _Layer:
    """Take a layer's tensors out of `weights` and join those that share an input."""
    at = f"model.layers.{i}."

    def joined(kind: str, *names: str) -> Tensor | None:
        parts = [weights.pop(f"{at}{name}.{kind}", None) for name in names]
        if any(part is None for part in parts):
            return None
        return torch.cat([part for part in parts if part is not None])

    def norm(name: str) -> Tensor:
        return weights.pop(f"{at}{name}.weight")

    def linear(*names: str) -> Linear:
        weight = joined("weight", *names)
        assert weight is not None, f"layer {i} lacks one of {names}; the loader checks this"
        return Linear(weight, joined("bias", *names))

    return _Layer(
        attention_norm=norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=linear("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
