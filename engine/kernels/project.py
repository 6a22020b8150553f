"""Queries, keys and values in one product, rotated and in their places.  Attends to nothing.

The bits are those of a plain product followed by kernels/rope.py; what is saved is a launch a
layer and a round trip through memory.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.matmul import Tile, accumulate, normed, precision, read_ahead
from engine.kernels.overlap import launch_options, release
from engine.kernels.rope import turned


@triton.jit
def _angles(positions, cos, sin, rm, live, begin, DIM: tl.constexpr, BN: tl.constexpr):
    """Cosines and sines of a tile's pairs: fp32 [BM, BN / 2] each."""
    pair = (begin % DIM) // 2 + tl.arange(0, BN // 2)
    at = tl.load(positions + rm, mask=live, other=0)[:, None] * (DIM // 2) + pair[None, :]
    return tl.load(cos + at), tl.load(sin + at)


@triton.jit(do_not_specialize=["rows"])  # one binary for every number of rows
def _project(
    x, w, gain, bias, query, pages, positions, slots, cos, sin, rows, columns, depth, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, TAIL: tl.constexpr,
    NORM: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BIAS: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BN  # a tile lies within one head
    rn = begin + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rm < rows
    ahead = read_ahead(w, gain, rn, columns, depth, AHEAD, TAIL, NORM, OVERLAP)
    # Eager kernels ask for what the end needs before they multiply: there its latency is hidden.
    if OVERLAP == 2:
        slot = tl.load(slots + rm, mask=live, other=0).to(tl.int64)
        lower, upper = _angles(positions, cos, sin, rm, live, begin, DIM, BN)
    acc = accumulate(
        x, w, ahead, gain, eps, rm, rn, rows, columns, depth,
        BM, BN, BK, AHEAD, TAIL, NORM, WIDTH, STEPS, PRECISION,
    )  # fmt: skip
    release(OVERLAP)
    if BIAS:
        acc += tl.load(bias + rn).to(tl.float32)[None, :]
    kind = query.dtype.element_ty
    head = begin // DIM
    if head < HEADS + KV_HEADS:
        if OVERLAP != 2:
            lower, upper = _angles(positions, cos, sin, rm, live, begin, DIM, BN)
        left, right = tl.split(tl.reshape(acc.to(kind).to(tl.float32), (BM, BN // 2, 2)))
        left, right = turned(left, right, lower, upper)
        acc = tl.reshape(tl.join(left, right), (BM, BN))
    if head < HEADS:
        at = query + rm[:, None].to(tl.int64) * columns + rn[None, :]
        tl.store(at, acc.to(kind), mask=live[:, None])
    else:
        row: tl.constexpr = KV_HEADS * DIM
        is_value = head >= HEADS + KV_HEADS
        inner = rn - HEADS * DIM - tl.where(is_value, row, 0)
        if OVERLAP != 2:
            slot = tl.load(slots + rm, mask=live, other=0).to(tl.int64)
        line = slot // PAGE * (2 * PAGE) + slot % PAGE + tl.where(is_value, PAGE, 0)
        tl.store(pages + line[:, None] * row + inner[None, :], acc.to(kind), mask=live[:, None])


def project(
    x: Tensor,
    w: Tensor,
    both: Tensor,
    pages: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    overlap: int = 0,
) -> None:
    """Project `x` [M, K] by `w` [(heads + 2 * kv_heads) * head_dim, K], rotate, store.

    Rotated queries go to the first columns of `both` [M, rows of w], whose others are left alone;
    rotated keys and values to the page slots (int32 [M]) of `pages` [blocks, 2, size, kv_heads,
    head_dim].  Elements 2i and 2i + 1 of a head turn together by `cos`, `sin` [max_len, head_dim /
    2] at `positions` int32 [M].  `tile.bn` divides head_dim.  `gain`, `eps`: as in `product`.
    """
    _, _, size, kv_heads, dim = pages.shape
    (rows, depth), columns = x.shape, w.shape[0]
    assert dim % tile.bn == 0, f"a tile of {tile.bn} columns, heads of {dim}"
    assert both.shape == (rows, columns) and both.is_contiguous() and pages.is_contiguous()
    enqueue(_project, (columns // tile.bn, triton.cdiv(rows, tile.bm)))(
        x, w, gain if gain is not None else w, bias if bias is not None else w, both, pages,
        positions, slots, cos, sin, rows, columns, depth, eps,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, AHEAD=tile.ahead, TAIL=tile.tail,
        NORM=normed(gain, tile, rows, depth), WIDTH=triton.next_power_of_2(depth),
        HEADS=columns // dim - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=size,
        BIAS=bias is not None, STEPS=tile.steps(depth), OVERLAP=int(overlap),
        PRECISION=precision(x), num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(overlap),
    )  # fmt: skip
