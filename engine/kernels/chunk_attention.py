"""Attention of prompt chunks over paged KV.  Writes no KV; plans no work; leaves short rows alone.

One program computes one query head of a tile of tokens over its whole context with an online
softmax (Dao, FlashAttention-2, 2023): first the pages that every token of the tile sees, without a
mask, then the few on the diagonal with one.  Heads are the fastest axis of the grid, so the heads
that share a KV head run side by side and share its pages in the cache.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.decode_attention import LOG2_E
from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, release, wait


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """How a program is cut out of the work."""

    tile: int  # query tokens a program; the plan must use the same
    pages: int  # pages a loop step, 1 or 2
    warps: int
    stages: int  # loop steps in flight


SHAPES = {
    32: ChunkShape(tile=64, pages=1, warps=4, stages=3),
    64: ChunkShape(tile=64, pages=2, warps=4, stages=3),
    128: ChunkShape(tile=64, pages=1, warps=4, stages=3),
}


def chunk_attention(
    query: Tensor,
    pages: Tensor,
    out: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    most: int,
    shape: ChunkShape | None = None,
    overlap: int = 0,
) -> None:
    """Attend for all chunks of `meta`; other tokens of `out` are left as they are.

    `query` [N, >= heads * head_dim] holds the rotated queries in its first columns, `pages`
    [blocks, 2, size, kv_heads, head_dim] is one layer with this step's keys and values already
    written, `out` is [N, heads * head_dim]; all of one type, rows contiguous.  `scale` (above 0)
    multiplies the scores.  `most` is the launch's bucket of items: programs beyond
    meta.chunk_total return at once, items beyond `most` would be left out.  `shape` replaces the
    tuned one of the head dimension; its tile must be the plan's.  `overlap`: see
    kernels/overlap.py.  Allocates nothing and reads nothing on the host.
    """
    _, _, size, kv_heads, dim = pages.shape
    heads = out.shape[1] // dim
    shape = shape or SHAPES[dim]
    assert 0 < most <= meta.chunk_items.shape[1], f"{most} of {meta.chunk_items.shape[1]} items"
    assert shape.pages in (1, 2), f"{shape.pages} pages a step"
    assert query.stride(1) == out.stride(1) == 1 and pages.is_contiguous()
    assert query.dtype == pages.dtype == out.dtype
    enqueue(_chunk_kernel, (heads, most))(
        query, pages, out,
        meta.table, meta.slot, meta.first, meta.start, meta.count,
        meta.chunk_items, meta.chunk_total,
        query.stride(0), out.stride(0), meta.table.stride(0), meta.chunk_items.stride(0),
        scale * LOG2_E,
        TILE=shape.tile, GROUP=heads // kv_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=size,
        PAGES=shape.pages, STAGES=shape.stages,
        PRECISION="ieee" if pages.dtype == torch.float32 else "tf32",
        OVERLAP=int(overlap), num_warps=shape.warps, num_stages=shape.stages,
        **launch_options(overlap),
    )  # fmt: skip


@triton.jit(do_not_specialize=["items_stride"])  # it differs from bucket to bucket
def _chunk_kernel(
    query, pages, out, table, row_slot, row_first, row_start, row_count, items, items_total,
    query_stride, out_stride, table_stride, items_stride, scale,
    TILE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Query head program_id(0) of item program_id(1)."""
    head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(items_total):
        return
    row = tl.load(items + item)
    begin = tl.load(items + items_stride + item)
    tokens = tl.minimum(tl.load(row_count + row) - begin, TILE)
    if tokens <= 0:  # the host may have planned for more tokens than there are
        return
    start = tl.load(row_start + row) + begin
    table += tl.load(row_slot + row).to(tl.int64) * table_stride
    line = tl.arange(0, TILE)
    dim = tl.arange(0, DIM)
    live = (line < tokens)[:, None]
    flat = tl.load(row_first + row) + begin + line
    column = head * DIM + dim
    wait(OVERLAP)
    q = tl.load(query + (flat * query_stride)[:, None] + column[None, :], mask=live, other=0.0)
    pages += (head // GROUP) * DIM
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, DIM], tl.float32)
    width: tl.constexpr = PAGE * PAGES
    # positions  0 ........ full * width | ... last
    #            seen by every token     | masked
    last = start + tokens - 1
    full = (start + 1) // width
    # A step's block ids are read one step early: an address that hangs on a load of its own step
    # could not be fetched ahead.
    final = last // PAGE
    block, other = _ids(table, 0, final, PAGES)
    for step in tl.range(0, full, num_stages=STAGES):
        next_block, next_other = _ids(table, step + 1, final, PAGES)
        top, total, acc = _advance(
            q, pages, block, other, start + line, last, step, top, total, acc, scale,
            KV_HEADS, DIM, PAGE, PAGES, False, PRECISION,
        )  # fmt: skip
        block, other = next_block, next_other
    for step in tl.range(full, last // width + 1, num_stages=STAGES):
        next_block, next_other = _ids(table, step + 1, final, PAGES)
        top, total, acc = _advance(
            q, pages, block, other, start + line, last, step, top, total, acc, scale,
            KV_HEADS, DIM, PAGE, PAGES, True, PRECISION,
        )  # fmt: skip
        block, other = next_block, next_other
    release(OVERLAP)
    result = acc / total[:, None]
    out_at = out + (flat * out_stride)[:, None] + column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _ids(table, step, final, PAGES: tl.constexpr):
    """Blocks of the first and the last page of a step; 0 beyond page `final`, whose tokens hide."""
    first = step * PAGES
    last = first + PAGES - 1
    block = tl.load(table + first, mask=first <= final, other=0)
    return block, tl.load(table + last, mask=last <= final, other=0)


@triton.jit
def _advance(
    q, pages, block, other, position, last, step, top, total, acc, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the next PAGES pages into the softmax.

    Masked: positions after `last` were perhaps never written and are not read.  The first step
    holds position 0, which every token sees, so `top` is finite from then on.
    """
    row: tl.constexpr = KV_HEADS * DIM
    width: tl.constexpr = PAGE * PAGES
    lane = tl.arange(0, width)
    dim = tl.arange(0, DIM)
    here = step * width + lane
    if PAGES == 2:
        block = tl.where(lane < PAGE, block, other)
    keys = pages + block.to(tl.int64) * (2 * PAGE * row) + (lane % PAGE) * row
    k_at = keys[None, :] + dim[:, None]
    v_at = keys[:, None] + PAGE * row + dim[None, :]
    if MASKED:
        k = tl.load(k_at, mask=(here <= last)[None, :], other=0.0)
        v = tl.load(v_at, mask=(here <= last)[:, None], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    score = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        score = tl.where(here[None, :] <= position[:, None], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return higher, total, acc
