"""RMSNorm of rows, each in a program of its own.  Adds no residual: products do that.

Zhang and Sennrich (2019).  One program a row and one block a row: the order of the sum is a
property of the width, so a row's bits do not depend on how many rows there are.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, release, wait


@triton.jit
def scale_of(a, width, eps):
    """What RMSNorm multiplies a row by, given as one block of fp32 (0 beyond `width`).

    Whoever shares it gets the same bits if the block and the warps are those of `norm`: they order
    the sum.  (bf16 squares are exact in fp32, so a fused multiply and add changes nothing.)
    """
    return tl.rsqrt(tl.sum(a * a, axis=0) / width + eps)


def warps(width: int) -> int:
    """Warps that sum a row of so many numbers."""
    return 4 if width <= 2048 else 8


@triton.jit
def _norm(
    x, picked, gain, out, width, eps,
    PICKED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    g = tl.load(gain + at, mask=there, other=0.0).to(tl.float32)
    wait(OVERLAP)
    source = tl.load(picked + row).to(tl.int64) if PICKED else row
    a = tl.load(x + source * width + at, mask=there, other=0.0).to(tl.float32)
    release(OVERLAP)
    result = a * scale_of(a, width, eps) * g
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), there)


def norm(
    x: Tensor,
    gain: Tensor,
    out: Tensor,
    eps: float,
    *,
    picked: Tensor | None = None,
    overlap: int = 0,
) -> None:
    """Write RMSNorm of the rows of `x` [N, width] to `out` [M, width], times `gain` [width].

    Row i of `out` is row picked[i] (int32 [M]) of `x`, or row i.  All contiguous.
    """
    rows, width = out.shape
    enqueue(_norm, (rows,))(
        x, picked if picked is not None else x, gain, out, width, eps,
        PICKED=picked is not None, BLOCK=triton.next_power_of_2(width), OVERLAP=int(overlap),
        num_warps=warps(width), **launch_options(overlap),
    )  # fmt: skip
