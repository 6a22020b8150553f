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
    mean = tl.sum(a * a, axis=0) / width
    tl.store(out + row * width + at, (a * tl.rsqrt(mean + eps) * g).to(out.dtype.element_ty), there)


def norm(
    x: Tensor,
    gain: Tensor,
    out: Tensor,
    eps: float,
    *,
    picked: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Write RMSNorm of the rows of `x` [N, width] to `out` [M, width], times `gain` [width].

    Row i of `out` is row picked[i] (int32 [M]) of `x`, or row i.  All contiguous.
    """
    rows, width = out.shape
    enqueue(_norm, (rows,))(
        x, picked if picked is not None else x, gain, out, width, eps,
        PICKED=picked is not None, BLOCK=triton.next_power_of_2(width), OVERLAP=overlap,
        num_warps=4 if width <= 2048 else 8, **launch_options(overlap),
    )  # fmt: skip
