"""What decoder layers share: the linear layer, rotary tables and scaling rules.  Runs no layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from engine.checkpoint import ModelConfig

Norm = tuple[Tensor, float]  # gain [hidden] and epsilon of an RMSNorm (Zhang and Sennrich, 2019)


class Linear:
    """x [N, in] -> x W^T + b [N, out], with the weight laid out as the device's kernels want it.

    On a CPU bf16 weights are reordered once into oneDNN's blocked layout, which torch would
    otherwise do in every call: the same bits, 1.4-1.8 times faster up to 16 rows (a SmolLM2 layer's
    four products at one row: 311 -> 205 us on two cores).  Those operators are what torch's own
    compiler emits; where a build lacks them the plain product is used.

    There a row's bits do not depend on the rows beside it, but for one that is alone: for long rows
    oneDNN has another kernel then.  Where that shows, a lone row is computed twice over, so that a
    decode with drafts is the one without, bit for bit, in steps whose sequences have at most 16
    rows each (engine/attention/cpu.py).  It costs 1 % of a step.
    """

    __slots__ = ("bias", "differs_alone", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` [out, in] is let go when it could be packed."""
        self.bias = bias
        self.packed = _pack(weight)
        self.weight = weight if self.packed is None else None
        self.differs_alone = self.packed is not None and _differs_alone(self.packed, weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it to rows of the weight's type."""
        if self.packed is not None:
            if self.differs_alone and len(x) == 1:
                return self(x.expand(2, -1))[:1]
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.packed, self.bias, "none", [], ""
            )
            return out
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


class Apart(Linear):
    """Projections that share an input, each by the tensor that it came in: none is copied.

    For a model that reads a few texts beside the one that is served; a launch each is slower.
    """

    __slots__ = ("_parts",)

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None = None) -> None:
        self.bias = self.packed = self.weight = None
        self.differs_alone = False
        none: list[Tensor | None] = [None] * len(weights)
        self._parts = list(zip(weights, biases or none, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        """Apply all to rows of the weights' type, the results side by side."""
        return torch.cat([F.linear(x, weight, bias) for weight, bias in self._parts], dim=-1)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer of the Llama shape."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


_ALONE: dict[tuple[int, int, int], bool] = {}  # by shape and torch's threads
LOOKS = 64  # rows compared: at SmolLM2's down projection 2 to 5 of them differ
DEAR = 1 << 23  # numbers of a weight from which on it is looked at less


def _differs_alone(packed: Tensor, shape: torch.Size) -> bool:
    """Whether some of many random rows has other bits alone than beside another."""
    out, inside = shape
    key = out, inside, torch.get_num_threads()
    if key not in _ALONE:
        count = LOOKS if out * inside < DEAR else LOOKS // 8
        noise = torch.Generator().manual_seed(0)
        rows = torch.randn(count, inside, generator=noise).to(torch.bfloat16)
        product = torch.ops.mkldnn._linear_pointwise
        beside = product(rows, packed, None, "none", [], "")
        _ALONE[key] = any(
            not torch.equal(product(row[None], packed, None, "none", [], "")[0], among)
            for row, among in zip(rows, beside, strict=True)
        )
    return _ALONE[key]


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout; None where that does not exist or does not give the same."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        torch.ops.mkldnn._linear_pointwise(weight[:1], packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return packed


def join_gate(parts: list[Tensor], *, paired: bool) -> Tensor:
    """Gate and up projection as one: gate above up, or their rows in turns when `paired`.

    A kernel's tile of paired rows holds both halves of what it multiplies.
    """
    if not paired:
        return torch.cat(parts)
    return torch.stack(parts, dim=1).flatten(0, 1)


def join_heads(parts: list[Tensor], *, dim: int, paired: bool) -> Tensor:
    """Query, key and value projection as one; `paired` puts what rotates together side by side.

    Rows i and i + dim / 2 of each query and key head then lie at 2i and 2i + 1.  Scores do not
    change: queries and keys are reordered alike, and nothing else reads them.
    """
    if not paired:
        return torch.cat(parts)
    *turning, values = parts
    mixed = [
        part.view(-1, 2, dim // 2, *part.shape[1:]).transpose(1, 2).reshape(part.shape)
        for part in turning
    ]
    return torch.cat([*mixed, values])


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] float64 angles a position, after the checkpoint's scaling rule.

    Plain and linear: Su et al., RoFormer (2021); `llama3`: the Llama 3.1 release's rule, which
    keeps short wavelengths, divides long ones by `factor` and blends between.
    """
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = 1.0 / (config.rope_theta ** (steps / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    assert scaling.kind == "llama3", f"rope scaling {scaling.kind} passed the loader"
    wavelengths = 2 * math.pi / frequencies
    ratio = scaling.original_max_len / wavelengths
    blend = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies / scaling.factor * (1 - blend) + frequencies * blend


def rotary_tables(config: ModelConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, 1, head_dim]; sin is negative in the first half.

    With that sign folded in, rotating is x * cos + roll(x, head_dim / 2) * sin: two passes, no
    halves.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rotary_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), dim=-1)[:, None].to(dtype).contiguous(),
        torch.cat((-sin, sin), dim=-1)[:, None].to(dtype).contiguous(),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [N, heads, head_dim] by position; cos, sin [N, 1, head_dim] are of `rotary_tables`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
