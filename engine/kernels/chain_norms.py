"""RMSNorm of each chunk of a row by a gain of its own: what a draft's fuse reads.  Adds nothing.

The chunks are the outputs of the target's tapped layers, side by side; a head that norms them
together has one chunk.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.norm import scale_of, warps


@triton.jit
def _norms(x, gain, out, width, eps, BLOCK: tl.constexpr):
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, BLOCK)
    there = at < width
    g = tl.load(gain + chunk * width + at, mask=there, other=0.0).to(tl.float32)
    begin = (row * chunks + chunk) * width
    # A target of another type: rounded first, as a head on its own would read it.
    a = tl.load(x + begin + at, mask=there, other=0.0).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + begin + at, (a * scale_of(a, width, eps) * g).to(out.dtype.element_ty), there)


def chain_norms(x: Tensor, gains: Tensor, out: Tensor, eps: float) -> None:
    """Norm the chunks of `x` [N, chunks * width] by `gains` [chunks, width] to `out`, shaped alike.

    All contiguous; `x` may be of another type.
    """
    chunks, width = gains.shape
    assert x.shape == out.shape and x.shape[1] == chunks * width
    assert x.is_contiguous() and out.is_contiguous() and gains.is_contiguous()
    enqueue(_norms, (x.shape[0], chunks))(
        x, gains, out, width, eps, BLOCK=triton.next_power_of_2(width),
        num_warps=warps(width),
    )  # fmt: skip
