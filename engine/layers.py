"""What decoder layers share: rotary tables and their scaling rules.  Holds no weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.checkpoint import ModelConfig


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
