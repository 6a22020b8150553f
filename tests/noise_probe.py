"""Kernels that show what engine/kernels/philox.py computes.  Asserts nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.philox import exponential, gumbel, quad_words, words_at
from tests.sampler_rig import DEVICE


@triton.jit
def _quads(counter, out, N: tl.constexpr):
    words = quad_words(
        tl.load(counter), tl.load(counter + 1), tl.load(counter + 2), tl.load(counter + 3),
        tl.arange(0, N),
    )  # fmt: skip
    at = tl.arange(0, N)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + at, words.to(tl.int64))


@triton.jit
def _singles(counter, ids, out, N: tl.constexpr):
    place = tl.arange(0, N)
    words = words_at(
        tl.load(counter), tl.load(counter + 1), tl.load(counter + 2), tl.load(counter + 3),
        tl.load(ids + place),
    )  # fmt: skip
    tl.store(out + place, words.to(tl.int64))


@triton.jit
def _floats(words, first, second, N: tl.constexpr):
    place = tl.arange(0, N)
    word = tl.load(words + place).to(tl.uint32, bitcast=True)
    tl.store(first + place, exponential(word))
    tl.store(second + place, gumbel(word))


def quads(counter: torch.Tensor, count: int) -> torch.Tensor:
    """The words of ids below 4 * count under (seed lo, seed hi, position, choice), on the host."""
    out = torch.zeros(4 * count, dtype=torch.int64, device=DEVICE)
    _quads[(1,)](counter, out, N=count)
    return out.cpu()


def singles(counter: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The words of these ids (a power of two of them), on the host."""
    out = torch.zeros(len(ids), dtype=torch.int64, device=DEVICE)
    _singles[(1,)](counter, ids.int().to(DEVICE), out, N=len(ids))
    return out.cpu()


def exponentials(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponential and the Gumbel noise of each word, on the host."""
    size = triton.next_power_of_2(len(words))
    wide = torch.zeros(size, dtype=torch.int64)
    wide[: len(words)] = words
    bits = ((wide + 2**31) % 2**32 - 2**31).int().to(DEVICE)
    first, second = (torch.zeros(size, device=DEVICE) for _ in range(2))
    _floats[(1,)](bits, first, second, N=size)
    return first[: len(words)].cpu(), second[: len(words)].cpu()
