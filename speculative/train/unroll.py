"""An EAGLE-3 head unrolled on its own features, as it will be used.  Changes no weight.

    step 0   row i: (true feature f_i, x[i+1]) at position i       -> g0_i, the odds of x[i+2]
    step s   row i: (own feature g(s-1)_i, x[i+1+s]) at i+s        -> gs_i, the odds of x[i+2+s]

Row i of step s attends to step 0's keys up to i, and of steps 1 .. s to its own row only: exactly
the KV that it finds in serving (training-time test; Li et al., EAGLE-3, 2025).  Rows of a prompt
give keys and nothing else.  The one formula of the head is that of speculative/head.py, here over
rows of rows and with gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers import rotate
from engine.model_config import ModelConfig
from speculative.head import HeadConfig, shapes
from speculative.rotary import turns
from speculative.train.packing import Batch
from speculative.train.target import Wanted, additive

Weights = Mapping[str, Tensor]
DECAY = 0.8  # weight of a step over that of the step before
CAUTION = 0.35  # of a fresh head's logits: SmolLM2's begin 8 nats off the target, at 1 it was 17


def head_config(target: ModelConfig, draft_vocab: int) -> HeadConfig:
    """A head of one layer of the target's own shape, with EAGLE-3.1's norms."""
    layers = target.layers
    # A boundary is the residual stream after so many layers; shallow targets have fewer than three.
    taps = tuple(sorted({max(tap, 1) for tap in (min(2, layers), layers // 2, layers - 3)}))
    return HeadConfig(
        hidden=target.hidden, target_hidden=target.hidden, intermediate=target.intermediate,
        heads=target.heads, kv_heads=target.kv_heads, head_dim=target.head_dim,
        eps=target.rms_eps, rope_theta=target.rope_theta, rope_scaling=target.rope_scaling,
        draft_vocab=draft_vocab, vocab=target.vocab, layers=1, taps=taps, fc_norm=True,
        norm_output=True,
    )


def fresh(
    config: HeadConfig, lm_head: Tensor, norm: Tensor, kept: Tensor, seed: int
) -> dict[str, Tensor]:
    """Weights to begin with, fp32 on the CPU: little noise around "the target's late feature is the
    answer", read by its own last norm and output rows.

    The norm's gain goes into those rows: what a head feeds on is then as large as a true feature.
    """
    noise = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        # What is added to the late feature begins small.
        small = name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight"))
        gain = 0.2 if small else 1.0
        weights[name] = torch.randn(shape, generator=noise) * gain * shape[1] ** -0.5
    if config.hidden == config.target_hidden:
        weights["fc.weight"][:, -config.hidden :] += torch.eye(config.hidden)
    weights["lm_head.weight"] = lm_head[kept].float().cpu() * norm.float().cpu() * CAUTION
    return weights


@dataclass(frozen=True, slots=True)
class Drawn:
    """One step of the unroll."""

    logits: Tensor  # [R, draft_vocab]
    chains: Tensor  # [R] int64: those of the batch that still have a token to meet
    wanted: Tensor  # [R] int64: each one's row of `Wanted`


def unroll(
    weights: Weights, config: HeadConfig, batch: Batch, features: Tensor, wanted: Wanted,
    embedding: Tensor, steps: int,
) -> Iterator[Drawn]:
    """The head's logits step by step, at most `steps`, while any chain is left.

    `features` [rows, length, taps * hidden] of the target; teacher-forced.
    """
    steps = min(steps, len(batch.alive))
    turning = _turning(config, batch.tokens.shape[1] + steps, features.dtype, features.device)
    fused = _fused(weights, config, features)
    following = batch.tokens.roll(-1, 1)
    first = _inputs(weights, config, fused, F.embedding(following, embedding))
    seen = [_keys(weights, config, first, turning.at(batch.positions))]
    pick = batch.starts[..., None]
    inputs = first.gather(1, pick.expand(-1, -1, first.shape[-1]))
    feature = fused.gather(1, pick.expand(-1, -1, config.hidden))
    start = batch.positions.gather(1, batch.starts)
    mask = _visible(batch, steps, seen[0][1].dtype)
    for step in range(steps):
        turn = turning.at(start + step)
        if step:
            token = batch.tokens.gather(1, batch.behind(1 + step))
            inputs = _inputs(weights, config, feature, F.embedding(token, embedding))
            seen.append(_keys(weights, config, inputs, turn))
        mixed = _attended(_query(weights, config, inputs, turn), seen, mask)
        state = feature + F.linear(mixed, weights["layers.0.self_attn.o_proj.weight"])
        state = state + _mlp(weights, config, state)
        feature = _normed(state, weights["norm.weight"], config)
        chains = batch.living(step)
        picked = feature.flatten(0, 1).index_select(0, chains)
        logits = F.linear(picked, weights["lm_head.weight"])
        yield Drawn(logits, chains, wanted.met(batch, step))


# -- parts of the head


class Turning:
    """Rotary tables, by position."""

    def __init__(
        self, config: HeadConfig, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        cos, sin = turns(config.head_dim, config.rope_theta, config.rope_scaling, length, dtype)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [rows, n, 1, head_dim], for `positions` [rows, n]."""
        return self._cos[positions], self._sin[positions]


_turning = lru_cache(maxsize=4)(Turning)  # the same for all batches of a training


def _fused(weights: Weights, config: HeadConfig, features: Tensor) -> Tensor:
    chunks = [
        _normed(chunk, weights[f"fc_norm.{i}.weight"], config)
        for i, chunk in enumerate(features.chunk(len(config.taps), dim=-1))
    ]
    return F.linear(torch.cat(chunks, dim=-1), weights["fc.weight"])


def _inputs(weights: Weights, config: HeadConfig, feature: Tensor, token: Tensor) -> Tensor:
    return torch.cat((
        _normed(token, weights["layers.0.input_layernorm.weight"], config),
        _normed(feature, weights["layers.0.hidden_norm.weight"], config),
    ), dim=-1)  # fmt: skip


def _keys(
    weights: Weights, config: HeadConfig, inputs: Tensor, turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, n, kv_heads, head_dim]."""
    heads = (*inputs.shape[:2], config.kv_heads, config.head_dim)
    key = F.linear(inputs, weights["layers.0.self_attn.k_proj.weight"]).view(heads)
    value = F.linear(inputs, weights["layers.0.self_attn.v_proj.weight"]).view(heads)
    return rotate(key, *turn).to(value.dtype), value


def _query(
    weights: Weights, config: HeadConfig, inputs: Tensor, turn: tuple[Tensor, Tensor]
) -> Tensor:
    """[rows, n, heads, head_dim]."""
    query = F.linear(inputs, weights["layers.0.self_attn.q_proj.weight"])
    turned: Tensor = rotate(query.view(*inputs.shape[:2], config.heads, config.head_dim), *turn)
    return turned.to(query.dtype)


def _visible(batch: Batch, steps: int, dtype: torch.dtype) -> Tensor:
    """[rows, 1, Q, length + (steps - 1) * Q]: what is added to the scores of each chain.

    It sees the keys of step 0 up to its beginning, and of each later step its own one.
    """
    rows, count = batch.starts.shape
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    documents = batch.documents.gather(1, batch.starts)
    same = documents[..., None] == batch.documents[:, None, :]
    own = torch.eye(count, dtype=torch.bool, device=places.device).expand(rows, -1, -1)
    seen = torch.cat((same & (places <= batch.starts[..., None]), *[own] * (steps - 1)), dim=-1)
    return additive(seen, dtype)[:, None]


def _attended(query: Tensor, seen: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """One softmax over step 0's visible keys and each row's own later ones.

    [rows, Q, heads * head_dim].  The own keys of all chains stand behind the row's keys, where all
    but one are masked: twice the products, but a kernel of torch's that keeps no scores does it.
    """
    groups = query.shape[2] // seen[0][0].shape[2]
    key, value = (
        torch.cat(parts, dim=1).transpose(1, 2).repeat_interleave(groups, 1)
        for parts in zip(*seen, strict=True)
    )
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask[..., : key.shape[2]])
    return mixed.transpose(1, 2).flatten(2)


def _mlp(weights: Weights, config: HeadConfig, state: Tensor) -> Tensor:
    read = _normed(state, weights["layers.0.post_attention_layernorm.weight"], config)
    gate = F.linear(read, weights["layers.0.mlp.gate_proj.weight"])
    up = F.linear(read, weights["layers.0.mlp.up_proj.weight"])
    return F.linear(F.silu(gate) * up, weights["layers.0.mlp.down_proj.weight"])


def _normed(x: Tensor, gain: Tensor, config: HeadConfig) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], gain.to(x.dtype), config.eps)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# -- loss


@dataclass(frozen=True, slots=True)
class Whole:
    """What the losses of a step's batches are shares of; a list has an entry a step of the unroll.
    """

    chains: list[int]  # that have a token to meet
    inside: list[Tensor]  # of them, those whose likeliest token can be drawn

    @classmethod
    def of(cls, batches: Sequence[tuple[Batch, Wanted]], steps: int) -> Whole:
        """Count all batches of one step of the optimiser."""
        chains, inside = list[int](), list[Tensor]()
        for step in range(min(steps, max(len(batch.alive) for batch, _ in batches))):
            there = [pair for pair in batches if step < len(pair[0].alive)]
            chains.append(sum(batch.alive[step] for batch, _ in there))
            counts = [wanted.inside[wanted.met(batch, step)].sum() for batch, wanted in there]
            inside.append(torch.stack(counts).sum().clamp(min=1))
        return cls(chains, inside)


@dataclass(frozen=True, slots=True)
class Losses:
    """A batch's shares of what its step gives, so that sums over batches are means over the step.

    The lists have an entry a step of the unroll.
    """

    loss: Tensor
    divergence: list[Tensor]  # KL(target || head) over the draft vocabulary, mean
    right: list[Tensor]  # share of rows whose arg-max is the target's, the lost ones counted
    alpha: list[Tensor]  # mean sum of min(p, q): what rejection sampling would accept


def losses(drawn: Iterator[Drawn], wanted: Wanted, whole: Whole, *, hybrid: bool) -> Losses:
    """Soft cross entropy within the draft vocabulary, step s weighted by DECAY ** s.

    Rows whose likeliest token cannot be drawn teach nothing but count as wrong.  `hybrid` mixes in
    the total variation, 1 - alpha, the more of it the better a row is: divergence alone spends
    capacity on tails that acceptance does not feel (LK losses, arXiv 2602.23881).
    """
    found = Losses(torch.zeros(()), [], [], [])
    total: Tensor | None = None
    for step, one in enumerate(drawn):
        share = wanted.share[one.wanted]
        inside = wanted.inside[one.wanted]
        log_q = one.logits.log_softmax(-1, dtype=_wide(one.logits))
        within = share / share.sum(-1, keepdim=True).clamp(min=1e-9)
        divergence = torch.xlogy(within, within).sum(-1) - (within * log_q).sum(-1)
        # Nothing is kept for a gradient that nobody asks for.
        alpha = torch.minimum(share, (log_q if hybrid else log_q.detach()).exp()).sum(-1)
        each = divergence
        if hybrid:
            mix = torch.exp(-3.0 * alpha.detach())
            each = mix * divergence + (1 - mix) * (1 - alpha)
        chains, count = whole.chains[step], whole.inside[step]
        part = (each * inside).sum() / count * DECAY**step
        total = part if total is None else total + part
        right = (one.logits.argmax(-1) == wanted.best[one.wanted]) & inside
        found.divergence.append(((divergence * inside).sum() / count).detach())
        found.right.append(right.sum() / chains)
        found.alpha.append(alpha.detach().sum() / chains)
    assert total is not None, "a batch without a chain"
    return Losses(total, found.divergence, found.right, found.alpha)
