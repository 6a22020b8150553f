"""Attention of short rows (decode, verification) over paged KV.  Writes no KV; plans no work.

A tile is 16 query lines: 16 // group tokens x the `group` query heads of one KV head.  Its context
is cut at multiples of `split` positions, and one program computes one split of one tile with an
online softmax over 64-token pages (Milakov and Gimelshein, 2018); the program that arrives last at
a tile merges the splits in their order (the split along the context: Dao et al., Flash-Decoding,
2023), so no second launch follows and the arrival order cannot change a bit.

A token's result depends on its own position only: tile shape, page order and splits are the same
whatever runs beside it, and what lies beyond its position adds exactly nothing (a weight of 0, a
rescaling by 1).  Hence a row alone, among others, and inside a longer verification row has the same
bits.  `split`, `warps` and the page size must be constants of the engine for that to hold.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_plan import LINES, TILES, short_tile
from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, release, wait

LOG2_E = 1.4426950408889634
# Pages in flight a program, and warps, by head dimension.
STAGES = {32: 3, 64: 4, 128: 3}
WARPS = {32: 4, 64: 4, 128: 4}
AT_ONCE = {32: 2, 64: 8, 128: 4}  # splits that a merge loads together: registers allow no more
# Programs a multiprocessor: four times what it holds at once, so that those that end early (a last
# split is short) are followed by others.  Measured on an H200 beside 2, 4 and 8.
PROGRAMS = 16


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results between programs; its counters are 0 whenever no kernel runs.

    Use one scratch a stream: two launches that overlap must not share it.
    """

    partial: Tensor  # [capacity, kv_heads, LINES, head_dim] float32, weighted values
    stats: Tensor  # [capacity, kv_heads, 2, LINES] float32: largest score (base 2), sum of weights
    arrived: Tensor  # [capacity, kv_heads] int32, at the first item of a tile

    @classmethod
    def allocate(
        cls, capacity: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeScratch:
        """Room for `capacity` items (see attention_plan.most_short_items)."""
        shape = (capacity, kv_heads, LINES, head_dim)
        return cls(
            partial=torch.empty(shape, dtype=torch.float32, device=device),
            stats=torch.empty((capacity, kv_heads, 2, LINES), dtype=torch.float32, device=device),
            arrived=torch.zeros((capacity, kv_heads), dtype=torch.int32, device=device),
        )

    @property
    def capacity(self) -> int:
        """Items that a launch may have."""
        return self.arrived.shape[0]


def workers(processors: int, kv_heads: int) -> int:
    """Programs a KV head for a device of so many multiprocessors."""
    return max(1, processors * PROGRAMS // kv_heads)


def decode_attention(
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
    overlap: int = 0,
) -> None:
    """Attend for all short rows of `meta`; other tokens of `out` are left as they are.

    `query` [N, >= heads * head_dim] holds the rotated queries in its first columns (a view of qkv
    will do), `pages` [blocks, 2, size, kv_heads, head_dim] is one layer with this step's keys and
    values already written, `out` is [N, heads * head_dim]; all of one type, rows contiguous.
    `scale` multiplies the scores, `split`, in positions, is the page size times a power of two;
    `workers` is the programs a KV head (see the function).  `overlap`: see kernels/overlap.py.
    Allocates nothing and reads nothing on the host.
    """
    _, _, size, kv_heads, dim = pages.shape
    group = out.shape[1] // (kv_heads * dim)
    assert dim in WARPS, f"head_dim {dim}; the kernel knows {sorted(WARPS)}"
    held = split // size
    assert held > 0 and held * size == split and held & (held - 1) == 0, (
        f"split {split} is not the page size {size} times a power of two"
    )
    assert query.stride(1) == out.stride(1) == 1 and pages.is_contiguous()
    assert query.dtype == pages.dtype == out.dtype
    assert meta.short_items.is_contiguous()
    assert meta.short_items.shape[1] <= scratch.capacity, "the item list is longer than the scratch"
    enqueue(_short_kernel, (kv_heads, workers))(
        query, pages, out,
        meta.table, meta.slot, meta.first, meta.start, meta.count,
        meta.short_items, meta.short_total,
        scratch.partial, scratch.stats, scratch.arrived,
        query.stride(0), out.stride(0), meta.table.stride(0), meta.short_items.stride(0),
        scale * LOG2_E,
        TILE=short_tile(group), GROUP=group, KV_HEADS=kv_heads, DIM=dim, PAGE=size, SPLIT=split,
        LINES=LINES, TILES=TILES, STAGES=stages or STAGES[dim],
        PRECISION="ieee" if pages.dtype == torch.float32 else "tf32",
        OVERLAP=int(overlap), AT_ONCE=AT_ONCE[dim], num_warps=warps or WARPS[dim],
        num_stages=stages or STAGES[dim], **launch_options(overlap),
    )  # fmt: skip


@triton.jit(do_not_specialize=["items_stride"])  # it differs from bucket to bucket
def _short_kernel(
    query, pages, out, table, row_slot, row_first, row_start, row_count, items, items_total,
    partial, stats, arrived, query_stride, out_stride, table_stride, items_stride, scale,
    TILE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, LINES: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program takes the items program_id(1), + workers, ... for KV head program_id(0)."""
    head = tl.program_id(0)
    line = tl.arange(0, LINES)
    dim = tl.arange(0, DIM)
    token = line // GROUP
    column = (head * GROUP + line % GROUP) * DIM
    workers = tl.num_programs(1)
    where = (table, row_slot, row_first, row_start, row_count, items, table_stride, items_stride)
    # What an item says is read one round early, and the first before anything has to be waited for:
    # each load that hangs on another costs a fifth of what a lone row's attention takes.
    total_items = tl.load(items_total)
    ahead = _item(tl.program_id(1), total_items, where, TILE, TILES, PAGE, SPLIT)
    wait(OVERLAP)
    for item in range(tl.program_id(1), total_items, workers):
        split, start, tokens, flat, ids = ahead
        ahead = _item(item + workers, total_items, where, TILE, TILES, PAGE, SPLIT)
        flat = flat + token
        last = start + tokens - 1
        splits = last // SPLIT + 1
        # The host may have planned for more tokens than there are.
        if (tokens > 0) & (split < splits):
            live = (token < tokens)[:, None]
            q_at = query + (flat * query_stride + column)[:, None] + dim[None, :]
            q = tl.load(q_at, mask=live, other=0.0)
            top, total, acc = _attend(
                q, pages + head * DIM, ids, start + token, last, split * SPLIT, scale,
                KV_HEADS, DIM, PAGE, SPLIT, LINES, STAGES, PRECISION,
            )  # fmt: skip
            out_at = out + (flat * out_stride + column)[:, None] + dim[None, :]
            if splits == 1:
                result = acc / total[:, None]
                tl.store(out_at, result.to(out.dtype.element_ty), mask=live)
            else:
                base = (item - split).to(tl.int64) * KV_HEADS + head
                cell = base + split * KV_HEADS
                at = line[:, None] * DIM + dim[None, :]
                tl.store(partial + cell * (LINES * DIM) + at, acc, mask=live)
                tl.store(stats + cell * (2 * LINES) + line, top)
                tl.store(stats + cell * (2 * LINES) + LINES + line, total)
                # One thread's release publishes what all threads stored, once all have stored.
                tl.debug_barrier()
                before = tl.atomic_add(arrived + base, 1, sem="acq_rel")
                if before == splits - 1:
                    tl.store(arrived + base, 0)
                    result = _merge(
                        partial, stats, base, splits, live, KV_HEADS, DIM, LINES, AT_ONCE
                    )
                    tl.store(out_at, result.to(out.dtype.element_ty), mask=live)
    release(OVERLAP)


@triton.jit
def _item(
    item, total, where,
    TILE: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Split, first position, tokens, flat index and block ids of an item.

    Beyond the list these are of its first row's, and nobody looks at them: what lies there is left
    over from steps with another layout, and would name no row.
    """
    table, row_slot, row_first, row_start, row_count, items, table_stride, items_stride = where
    there = item < total
    code = tl.load(items + item, mask=there, other=0)
    split = tl.load(items + items_stride + item, mask=there, other=0)
    row = code // TILES
    begin = (code % TILES) * TILE  # first token of the tile, in the row
    start = tl.load(row_start + row) + begin
    tokens = tl.minimum(tl.load(row_count + row) - begin, TILE)
    flat = tl.load(row_first + row) + begin
    slot = tl.load(row_slot + row).to(tl.int64)
    # All ids at once: a load in the loop that a page's address hangs on would have to be awaited
    # with everything that was asked for before it, and no page could be fetched ahead.
    which = split * (SPLIT // PAGE) + tl.arange(0, SPLIT // PAGE)
    known = (which * PAGE <= start + tokens - 1) & (which < table_stride)
    ids = tl.load(table + slot * table_stride + which, mask=known, other=0)
    return split, start, tokens, flat, ids


@triton.jit
def _attend(
    q, pages, ids, position, last, begin, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    LINES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted values of positions begin .. begin + SPLIT - 1.

    A line that sees none of them gives -inf, 0, 0.  Positions after `last` were perhaps never
    written and may hold anything: neither their keys nor their values are read.
    """
    row: tl.constexpr = KV_HEADS * DIM
    offset = tl.arange(0, PAGE)
    dim = tl.arange(0, DIM)
    which = tl.arange(0, SPLIT // PAGE)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, DIM], tl.float32)
    count = (tl.minimum(last + 1 - begin, SPLIT) + PAGE - 1) // PAGE
    for i in tl.range(0, count, num_stages=STAGES):
        block = tl.sum(tl.where(which == i, ids, 0)).to(tl.int64)
        here = begin + i * PAGE + offset
        keys = pages + block * (2 * PAGE * row)
        k = tl.load(
            keys + dim[:, None] + offset[None, :] * row, mask=(here <= last)[None, :], other=0.0
        )
        v = tl.load(
            keys + PAGE * row + offset[:, None] * row + dim[None, :],
            mask=(here <= last)[:, None], other=0.0,
        )  # fmt: skip
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        score = tl.where(here[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = higher
    return top, total, acc


@triton.jit
def _merge(
    partial, stats, base, splits, live,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, LINES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The softmax over all splits of a tile, summed from split 0 upwards.

    AT_ONCE splits are asked for together: a lone row's merge is all latency.
    """
    line = tl.arange(0, LINES)
    at = line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    top = tl.full([LINES], float("-inf"), tl.float32)
    # .cg: other programs wrote these, so they must come from the cache that all share.
    for begin in tl.range(0, splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            cell = stats + (base + (begin + i) * KV_HEADS) * (2 * LINES)
            there = line * 0 + begin + i < splits
            own = tl.load(cell + line, mask=there, other=float("-inf"), cache_modifier=".cg")
            top = tl.maximum(top, own)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, DIM], tl.float32)
    for begin in tl.range(0, splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            cell = base + (begin + i) * KV_HEADS
            own = stats + cell * (2 * LINES) + line
            there = line * 0 + begin + i < splits
            height = tl.load(own, mask=there, other=float("-inf"), cache_modifier=".cg")
            weight = tl.load(own + LINES, mask=there, other=0.0, cache_modifier=".cg")
            part = tl.load(
                partial + cell * (LINES * DIM) + at, mask=live & there[:, None], other=0.0,
                cache_modifier=".cg",
            )
            share = tl.exp2(height - top)
            total += weight * share
            acc += part * share[:, None]
    return acc / total[:, None]
