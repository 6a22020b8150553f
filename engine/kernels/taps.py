"""Keep a layer's output for a device draft, which reads it behind the step.  Computes nothing.

A plain copy would do, but it would end the overlap of the layers' kernels three times a step.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.norm import warps
from engine.kernels.overlap import launch_options, release, wait


@triton.jit
def _keep(x, out, stride, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    wait(OVERLAP)
    kept = tl.load(x + row * width + at, mask=there, other=0.0)
    release(OVERLAP)
    tl.store(out + row * stride + at, kept, mask=there)


def keep(x: Tensor, out: Tensor, *, overlap: int = 0) -> None:
    """Copy the rows of `x` [N, width], contiguous, to `out` [N, width]; its rows may lie apart."""
    rows, width = x.shape
    enqueue(_keep, (rows,))(
        x, out, out.stride(0), width, BLOCK=triton.next_power_of_2(width), OVERLAP=int(overlap),
        num_warps=warps(width), **launch_options(overlap),
    )  # fmt: skip
