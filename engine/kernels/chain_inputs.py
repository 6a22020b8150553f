"""What a draft's layer reads: a token's embedding and a feature, each normed, side by side.

Two RMSNorms in one launch.  Multiplies by no weight.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.norm import scale_of, warps


@triton.jit
def _inputs(
    tokens, embedding, gain, feature, other_gain, out, width, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    token = tl.load(tokens + row).to(tl.int64)
    for half in tl.static_range(2):
        source = (embedding + token * width) if half == 0 else (feature + row * width)
        gains = gain if half == 0 else other_gain
        a = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(gains + at, mask=there, other=0.0).to(tl.float32)
        result = a * scale_of(a, width, eps) * g
        tl.store(out + (2 * row + half) * width + at, result.to(out.dtype.element_ty), there)


def chain_inputs(
    tokens: Tensor, embedding: Tensor, gain: Tensor, feature: Tensor, other_gain: Tensor,
    out: Tensor, eps: float,
) -> None:  # fmt: skip
    """out [N, 2 * width] = normed embedding[tokens], normed feature; `tokens` int32 [N].

    `embedding` [vocab, width] and `feature` [N, width]; all contiguous.
    """
    count, width = feature.shape
    enqueue(_inputs, (count,))(
        tokens, embedding, gain, feature, other_gain, out, width, eps,
        BLOCK=triton.next_power_of_2(width), num_warps=warps(width),
    )  # fmt: skip
