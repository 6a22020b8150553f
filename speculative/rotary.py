"""Rotary tables of draft heads, YaRN included, which targets do not have here.  Rotates nothing.

They reach as far as the server serves, whatever length a draft's config names: published ones name
2,048 and are used far beyond it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers import rotary_tables
from engine.model_config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Yarn:
    """How YaRN stretches frequencies: slow ones by `factor`, fast ones not, a ramp between.

    Peng et al., YaRN (2023); `mscale` as in DeepSeek-V2's code.
    """

    factor: float
    original_max_len: int  # tokens
    beta_fast: float = 32.0  # turns within original_max_len from which a frequency is kept
    beta_slow: float = 1.0  # up to which it is stretched
    scale: float = 1.0  # of cos and sin: the attention factor
    sharper: float = 1.0  # of scores; only latent attention has it

    def frequencies(self, dim: int, theta: float) -> Tensor:
        """[dim / 2] float64 angles a position."""
        plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

        def place(rounds: float) -> float:
            return dim * math.log(self.original_max_len / (rounds * 2 * math.pi)) / (
                2 * math.log(theta)
            )

        low = max(math.floor(place(self.beta_fast)), 0)
        high = min(math.ceil(place(self.beta_slow)), dim - 1)
        steps = torch.arange(dim // 2, dtype=torch.float64)
        ramp = ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        return plain / self.factor * ramp + plain * (1 - ramp)


def turns(
    dim: int, theta: float, scaling: RopeScaling | Yarn | None, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, 1, dim], as engine/layers.rotate wants them."""
    if isinstance(scaling, Yarn):
        places = torch.arange(length, dtype=torch.float64)
        angles = torch.outer(places, scaling.frequencies(dim, theta))
        cos, sin = angles.cos() * scaling.scale, angles.sin() * scaling.scale
        return (
            torch.cat((cos, cos), dim=-1)[:, None].to(dtype),
            torch.cat((-sin, sin), dim=-1)[:, None].to(dtype),
        )
    shape = ModelConfig(
        "LlamaForCausalLM", 1, dim, 1, 1, 1, dim, 1, length, theta, scaling, 1e-5, True, False,
        False,
    )  # fmt: skip
    return rotary_tables(shape, length, dtype)
