"""What a draft's layer reads: a token's embedding and a feature, each normed, side by side.

Two RMSNorms, and whatever else wants the same feature, in one launch.  Multiplies by no weight.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.norm import scale_of, warps
from engine.kernels.overlap import launch_options, release, wait

# Rows of tables a step or a group long: their alignment must not compile a kernel anew.
WORDWISE = ("tokens", "picked", "ends")


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _inputs(
    tokens, embedding, gain, feature, picked, other_gain, out, normed, ends, kept, width, eps,
    PICKED: tl.constexpr, NORMED: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    kind = out.dtype.element_ty
    g = tl.load(gain + at, mask=there, other=0.0).to(tl.float32)
    other = tl.load(other_gain + at, mask=there, other=0.0).to(tl.float32)
    wait(OVERLAP)
    token = tl.load(tokens + row).to(tl.int64)
    source = tl.load(picked + row).to(tl.int64) if PICKED else row
    a = tl.load(embedding + token * width + at, mask=there, other=0.0).to(tl.float32)
    bare = tl.load(feature + source * width + at, mask=there, other=0.0)
    release(OVERLAP)
    tl.store(out + 2 * row * width + at, (a * scale_of(a, width, eps) * g).to(kind), there)
    b = bare.to(tl.float32)
    result = (b * scale_of(b, width, eps) * other).to(kind)
    tl.store(out + (2 * row + 1) * width + at, result, there)
    if NORMED:
        tl.store(normed + row * width + at, result, there)
    if ENDS:
        end = tl.load(ends + row).to(tl.int64)
        if end >= 0:
            tl.store(kept + end * width + at, bare, there)


def chain_inputs(
    tokens: Tensor, embedding: Tensor, gain: Tensor, feature: Tensor, other_gain: Tensor,
    out: Tensor, eps: float, *, picked: Tensor | None = None, normed: Tensor | None = None,
    ends: Tensor | None = None, kept: Tensor | None = None, overlap: int = 0,
) -> None:  # fmt: skip
    """out [N, 2 * width] = normed embedding[tokens], normed feature; `tokens` int32 [N].

    `embedding` [vocab, width] and `feature` [N, width]; all contiguous.  Optional: `picked` (int32
    [N]: row i has feature[picked[i]]), `normed` [N, width], which gets the normed features and may
    be `feature`, and `ends` (int32 [N]), by which kept[ends[i]] gets the bare feature of row i
    unless that is negative.  `overlap`: see kernels/overlap.py.
    """
    count, width = len(out), feature.shape[1]
    assert (ends is None) == (kept is None) and (picked is None or normed is not feature)
    nothing = tokens  # for a pointer that is not followed
    enqueue(_inputs, (count,))(
        tokens, embedding, gain, feature, nothing if picked is None else picked, other_gain, out,
        out if normed is None else normed, nothing if ends is None else ends,
        out if kept is None else kept, width, eps, PICKED=picked is not None,
        NORMED=normed is not None, ENDS=ends is not None, BLOCK=triton.next_power_of_2(width),
        OVERLAP=int(overlap), num_warps=warps(width), **launch_options(overlap),
    )  # fmt: skip
