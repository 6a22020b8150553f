"""Attention of short rows whose unit is a page: few pages, one program each.  Writes no KV.

As kernels/decode_attention.py (tiles, splits, items, the last to arrive merges), but a page is
summed on its own and joined to those before it in the order of pages, then splits.  Joining is
plain arithmetic, so where it happens does not matter: a step of few pages gives each to a program
of its own, a large one gives a program a whole split, and a token's bits are the same.

The order of the sums: pages of a split from its first, splits from the first, each join being
(top, total, sum) of Milakov and Gimelshein (2018), with every multiplication and addition fused.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_plan import LINES, TILES, short_tile
from engine.kernels.decode_attention import LOG2_E, STAGES, WARPS, DecodeScratch, _item
from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, mode, release, wait

FINE = 32  # pages of a step up to which each has a program of its own: joining takes time, too


def page_attention(
    query: Tensor,
    pages: Tensor,
    out: Tensor,
    meta: AttentionMeta,
    scratch: DecodeScratch,
    *,
    scale: float,
    split: int,
    workers: int,
    warps: int | None = None,
    stages: int | None = None,
    fine: int = FINE,
    overlap: int = 0,
) -> None:
    """Attend for all short rows of `meta`; other tokens of `out` are left as they are.

    Everything but `fine`, which has no influence on the result, is as in decode_attention.
    """
    _, _, size, kv_heads, dim = pages.shape
    group = out.shape[1] // (kv_heads * dim)
    held = split // size
    assert dim in WARPS, f"head_dim {dim}; the kernel knows {sorted(WARPS)}"
    assert held > 0 and held * size == split and held & (held - 1) == 0, (
        f"split {split} is not the page size {size} times a power of two"
    )
    assert query.stride(1) == out.stride(1) == 1 and pages.is_contiguous()
    assert query.dtype == pages.dtype == out.dtype
    assert meta.short_items.is_contiguous()
    assert meta.short_items.shape[1] <= scratch.capacity, "the item list is longer than the scratch"
    enqueue(_page_kernel, (kv_heads, workers))(
        query, pages, out,
        meta.table, meta.slot, meta.first, meta.start, meta.count,
        meta.short_items, meta.short_total,
        scratch.partial, scratch.stats, scratch.arrived,
        query.stride(0), out.stride(0), meta.table.stride(0), meta.short_items.stride(0),
        scale * LOG2_E,
        TILE=short_tile(group), GROUP=group, ALONE=triton.next_power_of_2(group),
        KV_HEADS=kv_heads, DIM=dim, PAGE=size, SPLIT=split, LINES=LINES, TILES=TILES,
        FINE=min(fine, scratch.capacity), STAGES=stages or STAGES[dim],
        PRECISION="ieee" if pages.dtype == torch.float32 else "tf32",
        OVERLAP=mode(overlap), num_warps=warps or WARPS[dim],
        num_stages=stages or STAGES[dim], **launch_options(overlap),
    )  # fmt: skip


@triton.jit(do_not_specialize=["items_stride"])  # it differs from bucket to bucket
def _page_kernel(
    query, pages, out, table, row_slot, row_first, row_start, row_count, items, items_total,
    partial, stats, arrived, query_stride, out_stride, table_stride, items_stride, scale,
    TILE: tl.constexpr, GROUP: tl.constexpr, ALONE: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, LINES: tl.constexpr,
    TILES: tl.constexpr, FINE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program takes the units program_id(1), + workers, ...: splits, or pages if FINE."""
    held: tl.constexpr = SPLIT // PAGE
    head = tl.program_id(0)
    line = tl.arange(0, LINES)
    token, column = line // GROUP, _column(head, line, GROUP, DIM)
    workers = tl.num_programs(1)
    where = (table, row_slot, row_first, row_start, row_count, items, table_stride, items_stride)
    total_items = tl.load(items_total)
    fine = total_items * held <= FINE
    cut = tl.where(fine, held, 1)  # units an item
    ahead = _item(tl.program_id(1) // cut, total_items, where, TILE, TILES, PAGE, SPLIT)
    own = pages + head * DIM
    if OVERLAP:
        first = tl.where(fine, tl.program_id(1) % held, 0)
        _prefetch(own + _block(ahead[4], first, held) * (2 * PAGE * KV_HEADS * DIM),
                  KV_HEADS * DIM, DIM, PAGE)  # fmt: skip
    wait(OVERLAP)
    for unit in range(tl.program_id(1), total_items * cut, workers):
        split, start, tokens, flat, ids = ahead
        # Loads that hang on one another: a lone row's programs, which have no next unit, skip them.
        if unit + workers < total_items * cut:
            ahead = _item((unit + workers) // cut, total_items, where, TILE, TILES, PAGE, SPLIT)
        last = start + tokens - 1
        page = split * held + tl.where(fine, unit % held, 0)  # of the tile's context
        if (tokens > 0) & (page * PAGE <= last):
            asked = query + ((flat + token) * query_stride + column)[:, None]
            asked += tl.arange(0, DIM)[None, :]
            stop = tl.minimum(tl.where(fine, page + 1, (split + 1) * held), last // PAGE + 1)
            top, total, acc = _attend(
                asked, token < tokens, own, ids, start + token, last, page, stop, scale,
                KV_HEADS, DIM, PAGE, held, LINES, STAGES, PRECISION,
            )  # fmt: skip
            to = out + flat * out_stride
            origin = ((unit // cut - split) * cut).to(tl.int64) * KV_HEADS + head
            cell = origin + tl.where(fine, page, split) * KV_HEADS
            cells = tl.where(fine, last // PAGE, last // SPLIT) + 1
            if cells == 1:
                _store(to, acc / total[:, None], out_stride, head, tokens, GROUP, LINES, DIM)
            elif _last_to_arrive(top, total, acc, partial, stats, arrived, origin, cell, cells,
                                 token < tokens, DIM, LINES):  # fmt: skip
                if tokens > 1:
                    _join_all(partial, stats, origin, cells, fine, to, out_stride, head, tokens,
                              GROUP, LINES, KV_HEADS, DIM, LINES, held)  # fmt: skip
                else:
                    _join_all(partial, stats, origin, cells, fine, to, out_stride, head, tokens,
                              GROUP, ALONE, KV_HEADS, DIM, LINES, held)  # fmt: skip
    release(OVERLAP)


@triton.jit
def _column(head, line, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Where a line's head begins in a token's queries and results."""
    return (head * GROUP + line % GROUP) * DIM


@triton.jit
def _store(
    to, result, stride, head, tokens,
    GROUP: tl.constexpr, LIVE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write the first LIVE lines of a tile whose first token's results begin at `to`."""
    line = tl.arange(0, LIVE)
    token = line // GROUP
    at = to + (token * stride + _column(head, line, GROUP, DIM))[:, None]
    at += tl.arange(0, DIM)[None, :]
    tl.store(at, result.to(to.dtype.element_ty), mask=(token < tokens)[:, None])


@triton.jit
def _last_to_arrive(
    top, total, acc, partial, stats, arrived, origin, cell, cells, live,
    DIM: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Leave a cell for the join; whether all the others of the tile are there."""
    line = tl.arange(0, LINES)
    at = line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(partial + cell * (LINES * DIM) + at, acc, mask=live[:, None])
    tl.store(stats + cell * (2 * LINES) + line, top)
    tl.store(stats + cell * (2 * LINES) + LINES + line, total)
    # One thread's release publishes what all threads stored, once all have stored.
    tl.debug_barrier()
    last = tl.atomic_add(arrived + origin, 1, sem="acq_rel") == cells - 1
    if last:
        tl.store(arrived + origin, 0)
    return last


@triton.jit
def _block(ids, which, HELD: tl.constexpr):
    """Block `which` of a split."""
    return tl.sum(tl.where(tl.arange(0, HELD) == which, ids, 0)).to(tl.int64)


@triton.jit
def _prefetch(keys, row, DIM: tl.constexpr, PAGE: tl.constexpr):
    """Bring a page's keys and values into the cache that all multiprocessors share.

    Before the kernel before has ended: earlier steps wrote them, but for the newest, which that
    kernel writes into the very cache.  Lines are 128 bytes, elements two.
    """
    at = keys + tl.arange(0, 2 * PAGE) * row
    for part in tl.static_range((DIM + 63) // 64):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(at + part * 64).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _attend(
    asked, live, pages, ids, position, last, begin, stop, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, HELD: tl.constexpr,
    LINES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted values of pages begin .. stop - 1 of one split.

    Positions after `last` were perhaps never written: neither keys nor values are read.
    """
    row: tl.constexpr = KV_HEADS * DIM
    offset = tl.arange(0, PAGE)
    dim = tl.arange(0, DIM)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, DIM], tl.float32)
    for page in tl.range(begin, stop, num_stages=STAGES):
        here = page * PAGE + offset
        keys = pages + _block(ids, page % HELD, HELD) * (2 * PAGE * row)
        k = tl.load(
            keys + dim[:, None] + offset[None, :] * row, mask=(here <= last)[None, :], other=0.0
        )
        v = tl.load(
            keys + PAGE * row + offset[:, None] * row + dim[None, :],
            mask=(here <= last)[:, None], other=0.0,
        )  # fmt: skip
        # The same queries for every page; but a load before the loop would have to arrive before
        # any page is asked for, and so the address must seem to differ from page to page.
        q = tl.load(asked + (page >> 30) * DIM, mask=live[:, None], other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        score = tl.where(here[None, :] <= position[:, None], score, float("-inf"))
        height = tl.max(score, 1)
        weight = tl.exp2(score - _finite(height)[:, None])
        part = tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top, total, acc = _join(top, total, acc, height, tl.sum(weight, 1), part)
    return top, total, acc


@triton.jit
def _finite(top):
    """Something to subtract where a line has seen nothing yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _join(top, total, acc, height, weight, part):
    """What was summed so far, and what comes behind it; exactly either where the other is empty."""
    higher = tl.maximum(top, height)
    safe = _finite(higher)
    fade = tl.exp2(top - safe)
    share = tl.exp2(height - safe)
    total = tl.fma(total, fade, weight * share)
    acc = tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), part * share[:, None])
    return higher, total, acc


@triton.jit
def _join_all(
    partial, stats, origin, cells, fine, to, stride, head, tokens,
    GROUP: tl.constexpr, LIVE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    LINES: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Join a tile's cells, pages or splits, and store its first LIVE lines."""
    if fine:
        result = _joined(partial, stats, origin, cells, LIVE, KV_HEADS, DIM, LINES, HELD)
    else:
        result = _joined(partial, stats, origin, cells, LIVE, KV_HEADS, DIM, LINES, 1)
    _store(to, result, stride, head, tokens, GROUP, LIVE, DIM)


@triton.jit
def _joined(
    partial, stats, origin, cells,
    LIVE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LINES: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """The first LIVE lines of a tile: HELD cells a split joined in their order, then the splits.

    As many cells are asked for together as registers allow: a lone row's join is all latency.
    """
    fit: tl.constexpr = 4096 // (LIVE * DIM)
    once: tl.constexpr = 16 if fit > 16 else HELD if fit < HELD else fit
    line = tl.arange(0, LIVE)
    at = line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    top = tl.full([LIVE], float("-inf"), tl.float32)
    total = tl.zeros([LIVE], tl.float32)
    acc = tl.zeros([LIVE, DIM], tl.float32)
    for begin in tl.range(0, cells, once):
        for i in tl.static_range(once // HELD):
            high = tl.full([LIVE], float("-inf"), tl.float32)
            weight = tl.zeros([LIVE], tl.float32)
            part = tl.zeros([LIVE, DIM], tl.float32)
            for j in tl.static_range(HELD):
                cell = begin + i * HELD + j
                there = line * 0 + cell < cells
                own = stats + (origin + cell * KV_HEADS) * (2 * LINES) + line
                values = partial + (origin + cell * KV_HEADS) * (LINES * DIM) + at
                # .cg: other programs wrote these, so they must come from the cache all share.
                height = tl.load(own, mask=there, other=float("-inf"), cache_modifier=".cg")
                summed = tl.load(own + LINES, mask=there, other=0.0, cache_modifier=".cg")
                value = tl.load(values, mask=there[:, None], other=0.0, cache_modifier=".cg")
                high, weight, part = _join(high, weight, part, height, summed, value)
            top, total, acc = _join(top, total, acc, high, weight, part)
    return acc / total[:, None]
