"""Llama 2, 3, 3.1 and SmolLM2, in as few and large operations as torch allows.  Samples nothing.

Projections that read the same input are one matrix (q, k and v; gate and up): on a CPU a step at
batch one is bound by reading weights, and by the number of operations beside them.

Touvron et al., LLaMA (2023): pre-norm with RMSNorm, rotary positions, SwiGLU, no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers import Apart, Layer, Linear, join_gate, join_heads, rotary_tables
from engine.models import Hidden
from engine.ops import TorchOps

if TYPE_CHECKING:
    from engine.attention import Attention
    from engine.batch import Batch
    from engine.checkpoint import ModelConfig
    from engine.ops import Ops


class Llama:
    """Weights and forward pass; `taps` name the layers whose outputs a device draft reads.

    The output of layer -1 is the embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        max_len: int,
        taps: tuple[int, ...] = (),
        paired: bool = False,
        apart: bool = False,
    ) -> None:
        self.config = config
        self.taps = taps
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = Linear(self.embedding if config.tied else weights["lm_head.weight"])
        self.layers = [
            _layer(weights, i, config.head_dim, paired, apart) for i in range(config.layers)
        ]
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
        """Run all layers in torch; see the Model protocol."""
        return self.run(TorchOps(self.config, batch, pages, attention, self.cos, self.sin))

    def run(self, ops: Ops) -> Hidden:
        """Run all layers on a device's operations; see the Model protocol."""
        eps = self.config.rms_eps
        x = ops.embed(self.embedding)
        tapped = [ops.keep(x)] if -1 in self.taps else []
        for i, layer in enumerate(self.layers):
            mixed = ops.attend(i, x, (layer.attention_norm, eps), layer.qkv)
            x = ops.add(x, mixed, layer.out)
            inner = ops.gated(x, (layer.mlp_norm, eps), layer.gate_up)
            x = ops.add(x, inner, layer.down)
            if i in self.taps:
                tapped.append(ops.keep(x))
        return Hidden(x, tapped)

    def logits(self, rows: Tensor) -> Tensor:
        """See the Model protocol."""
        return self.head(F.rms_norm(rows, rows.shape[-1:], self.norm, self.config.rms_eps))


def _layer(
    weights: dict[str, Tensor], i: int, dim: int, paired: bool, apart: bool
) -> Layer:
    """Take a layer's tensors out of `weights` and join those that share an input."""
    at = f"model.layers.{i}."

    def take(kind: str, *names: str) -> list[Tensor] | None:
        parts = [weights.pop(f"{at}{name}.{kind}", None) for name in names]
        found = [part for part in parts if part is not None]
        return found if len(found) == len(names) else None

    def linear(join: Callable[[list[Tensor]], Tensor], *names: str) -> Linear:
        weight, bias = take("weight", *names), take("bias", *names)
        assert weight is not None, f"layer {i} lacks one of {names}; the loader checks this"
        if apart:
            return Apart(weight, bias)
        return Linear(join(weight), None if bias is None else join(bias))

    return Layer(
        attention_norm=weights.pop(f"{at}input_layernorm.weight"),
        qkv=linear(
            partial(join_heads, dim=dim, paired=paired),
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        ),
        out=linear(torch.cat, "self_attn.o_proj"),
        mlp_norm=weights.pop(f"{at}post_attention_layernorm.weight"),
        gate_up=linear(partial(join_gate, paired=paired), "mlp.gate_proj", "mlp.up_proj"),
        down=linear(torch.cat, "mlp.down_proj"),
    )
