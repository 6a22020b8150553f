"""An EAGLE-3 head: its shape, its tensors' names, one pass over rows.  Keeps no KV, draws no token.

    aux features [n, taps * target_hidden] --fuse--> f_i                      true features only
    (f_i, x[i+1]) --run--> h_i --read--> the feature for the next row, logits of x[i+2]

Two entries instead of a test of widths: `fuse` is never applied to the head's own features.

Li et al., EAGLE-3 (2025); norms of each fused chunk and of what is fed on: EAGLE-3.1 (2026).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers import Linear, join_heads, rotate
from engine.model_config import BadCheckpoint, RopeScaling
from speculative.latent import Latent, LatentAttention
from speculative.rotary import Yarn, turns

# (layer, query [n, heads, dim], key [n, kv_heads, dim], value) -> [n, heads * dim]: writes KV, too.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# (x [n, width], cos, sin, attend) -> [n, hidden]: a layer's whole attention.
Mix = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The dimensions and switches of a head, whatever dialect its file was written in."""

    hidden: int
    target_hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    rope_scaling: RopeScaling | Yarn | None
    draft_vocab: int  # tokens it can draw
    vocab: int  # tokens of the target
    layers: int
    taps: tuple[int, ...]  # boundaries: the target's residual stream after so many layers; rising
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_before_fc: bool = False  # one norm over all chunks of a true feature; or
    fc_norm: bool = False  # one for each chunk
    norm_output: bool = False  # the normed feature is fed on, not the bare one
    fc_bias: bool = False
    attention_bias: bool = False  # on q, k, v and o
    latent: Latent | None = None  # then `head_dim` is its plain + turned, and there is one layer

    def __post_init__(self) -> None:
        """Refuse what cannot be; raise BadCheckpoint."""
        if not self.taps or any(b <= a for a, b in zip(self.taps, self.taps[1:], strict=False)):
            raise BadCheckpoint(
                f"The draft reads the target's layers {list(self.taps)}; they must rise, and each "
                "be named once. Its config is damaged.")
        if self.norm_before_fc and self.fc_norm:
            raise BadCheckpoint(
                "The draft has input_norm.weight and fc_norm.*.weight; it can have one of the two. "
                "Its files are of two drafts.")
        if self.latent and (self.layers > 1 or self.attention_bias):
            raise BadCheckpoint(
                f"The draft has latent attention, {self.layers} layers and "
                f"{'biases' if self.attention_bias else 'no biases'}; one layer without biases is "
                "run. Choose another draft.")
        if self.draft_vocab > self.vocab:
            raise BadCheckpoint(
                f"The draft draws {self.draft_vocab:,} tokens, its target has {self.vocab:,}. "
                "It is a draft of another model.")

    @property
    def fused(self) -> int:
        """Width of a true feature before `fc`."""
        return len(self.taps) * self.target_hidden


def shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a head but embed_tokens, d2t and t2d, as we name them."""
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, config.fused)}
    if config.fc_bias:
        found["fc.bias"] = (hidden,)
    if config.norm_before_fc:
        found["input_norm.weight"] = (config.fused,)
    if config.fc_norm:
        for i in range(len(config.taps)):
            found[f"fc_norm.{i}.weight"] = (config.target_hidden,)
    for i in range(config.layers):
        at, wide = f"layers.{i}.", hidden if i else 2 * hidden
        norms = ["input_layernorm", "post_attention_layernorm", *([] if i else ["hidden_norm"])]
        found.update({f"{at}{norm}.weight": (hidden,) for norm in norms})
        products = {
            "self_attn.q_proj": (q, wide), "self_attn.k_proj": (kv, wide),
            "self_attn.v_proj": (kv, wide), "self_attn.o_proj": (hidden, q),
        }  # fmt: skip
        if config.latent:
            found.update(config.latent.shapes(hidden, config.heads))
            products = {}
        products |= {
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in products.items():
            found[f"{at}{name}.weight"] = shape
            if config.attention_bias and name.startswith("self_attn"):
                found[f"{at}{name}.bias"] = shape[:1]
    found["norm.weight"] = (hidden,)
    found["lm_head.weight"] = (config.draft_vocab, hidden)
    return found


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer of a head."""

    attention_norm: Tensor
    mix: Mix
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Head:
    """Weights and the pass over rows; exact torch in any float type."""

    def __init__(
        self,
        config: HeadConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        kept: Tensor | None,
        max_len: int,
    ) -> None:
        """Take the tensors that `shapes` names, and `embedding` [vocab, hidden] of the tokens.

        `kept` [draft_vocab] int64 are the target's ids of what it can draw, rising; None = all.
        Positions go up to `max_len`.
        """
        self.config, self.embedding, self.kept = config, embedding, kept
        self._input_norm = weights.get("input_norm.weight")
        self._chunk_norms = [
            weights[f"fc_norm.{i}.weight"] for i in range(len(config.taps) if config.fc_norm else 0)
        ]
        # [chunks, width] of what is normed before `fc`, chunk by chunk.
        gains = self._chunk_norms or [one for one in (self._input_norm,) if one is not None]
        self.fuse_gains = torch.stack(gains) if gains else None
        self.fc = Linear(weights["fc.weight"], weights.get("fc.bias"))
        self.hidden_norm = weights["layers.0.hidden_norm.weight"]
        self.layers = [_layer(config, weights, i) for i in range(config.layers)]
        self.norm = weights["norm.weight"]
        self.lm_head = Linear(weights["lm_head.weight"])
        self.dtype, self.device = self.norm.dtype, self.norm.device
        turned = config.latent.turned if config.latent else config.head_dim
        cos, sin = turns(turned, config.rope_theta, config.rope_scaling, max_len, self.dtype)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)

    def fuse(self, aux: Tensor) -> Tensor:
        """[n, taps * target_hidden] of the target -> [n, hidden] true features."""
        aux = aux.to(self.dtype)
        if self._input_norm is not None:
            aux = self._normed(aux, self._input_norm)
        if self._chunk_norms:
            chunks = zip(aux.chunk(len(self._chunk_norms), dim=-1), self._chunk_norms, strict=True)
            aux = torch.cat([self._normed(chunk, gain) for chunk, gain in chunks], dim=-1)
        return self.fc(aux)

    def run(self, feature: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All layers: [n, hidden] out of rows (feature [n, hidden], next token [n]).

        `positions` [n] are those of the features.
        """
        config = self.config
        places = positions.clamp(max=self._cos.shape[0] - 1)
        cos, sin = self._cos.index_select(0, places), self._sin.index_select(0, places)
        normed = self._normed(feature, self.hidden_norm)
        x = normed if config.norm_before_residual else feature
        token = F.embedding(tokens, self.embedding).to(self.dtype)
        for i, layer in enumerate(self.layers):
            read = self._normed(x if i else token, layer.attention_norm)
            x = x + layer.mix(read if i else torch.cat((read, normed), dim=-1), cos, sin, attend)
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return x

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Of `run`'s output the feature for the next row [n, hidden], and logits [n, draft_vocab].
        """
        normed = self._normed(state, self.norm)
        return normed if self.config.norm_output else state, self.lm_head(normed)

    def ids(self, places: Tensor) -> Tensor:
        """The target's ids of draft vocabulary places."""
        return places if self.kept is None else self.kept[places]

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], gain, self.config.eps)


def kept_ids(d2t: Tensor) -> Tensor:
    """[draft_vocab] int64 target ids out of the offsets that checkpoints hold."""
    return d2t + torch.arange(len(d2t), dtype=torch.int64, device=d2t.device)


class Grouped:
    """The Mix of a layer with query, key and value projections; groups of heads share keys."""

    def __init__(self, config: HeadConfig, weights: Mapping[str, Tensor], i: int) -> None:
        self._shape = config.heads, config.kv_heads, config.head_dim
        self._layer, at = i, f"layers.{i}.self_attn."
        self.qkv = joined(weights, at + "q_proj", at + "k_proj", at + "v_proj")
        self.out = joined(weights, at + "o_proj")
        self._paired = False

    def pair(self) -> None:
        """Lay query and key rows out as a GPU's kernels turn them (engine.layers.join_heads).

        In place of the old projection: there is one of it.  What a call gives does not change.
        """
        if self._paired:
            return
        heads, kv_heads, dim = self._shape
        widths = [heads * dim, kv_heads * dim, kv_heads * dim]

        def paired(rows: Tensor) -> Tensor:
            return join_heads(list(torch.split(rows, widths)), dim=dim, paired=True)

        weight, bias = self.qkv.weight, self.qkv.bias
        assert weight is not None, "a packed weight cannot be laid out anew"
        self.qkv = Linear(paired(weight), None if bias is None else paired(bias))
        self._paired = True

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Project, turn, attend."""
        heads, kv_heads, dim = self._shape
        turning = heads + kv_heads
        both = self.qkv(x)
        bare = both[:, : turning * dim].view(-1, turning, dim)
        if self._paired:
            bare = bare.view(-1, turning, dim // 2, 2).transpose(2, 3).reshape(-1, turning, dim)
        turned = rotate(bare, cos, sin)
        value = both[:, turning * dim :].view(-1, kv_heads, dim)
        return self.out(attend(self._layer, turned[:, :heads], turned[:, heads:], value))


def joined(weights: Mapping[str, Tensor], *names: str) -> Linear:
    """Projections that share an input, as one."""
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    weight = torch.cat([weights[f"{name}.weight"] for name in names])
    return Linear(weight, torch.cat(biases) if biases else None)


def _layer(config: HeadConfig, weights: Mapping[str, Tensor], i: int) -> Layer:
    at = f"layers.{i}."
    latent = config.latent
    return Layer(
        attention_norm=weights[f"{at}input_layernorm.weight"],
        mix=Grouped(config, weights, i) if latent is None else LatentAttention(
            latent, config.heads, config.eps, config.rope_scaling, weights),
        mlp_norm=weights[f"{at}post_attention_layernorm.weight"],
        gate_up=joined(weights, f"{at}mlp.gate_proj", f"{at}mlp.up_proj"),
        down=joined(weights, f"{at}mlp.down_proj"),
    )
