"""Attention of a draft's newest rows, one query a sequence, over its own pages.  Writes no KV.

A row of position p lies in slot p + 1 and sees the slots 1 .. p + 1: slot 0 of a sequence holds
nothing.  What it gives decides how good a draft is and never what is answered, so the number of
splits may follow the number of sequences.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, release, wait

BLOCK = 64  # positions at a time
LINES = 16  # query heads of a KV head, padded to what a tensor core takes
FULL = 264  # programs that fill a device: two a multiprocessor of the largest we know
SPLITS = 32  # at most
# Rows of tables a step or a group long: their alignment must not compile a kernel anew.
WORDWISE = ("picked", "place", "position", "start")


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _attend(
    query, picked, pages, table, place, position, start, out, parts, sums, peaks, width, scale,
    stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, PICKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, LINES)
    at = tl.arange(0, DIM)
    wait(OVERLAP)
    last = tl.load(position + row) + 1  # the newest slot that is seen
    oldest = tl.minimum(tl.load(start + row), last)
    each = (last - oldest + SPLIT * BLOCK) // (SPLIT * BLOCK) * BLOCK
    first = oldest + split * each
    end = tl.minimum(first + each, last + 1)
    source = tl.load(picked + row) if PICKED else row
    q = tl.load(
        query + source.to(tl.int64) * stride + (head * GROUP + line[:, None]) * DIM + at[None, :],
        mask=line[:, None] < GROUP, other=0.0,
    )  # fmt: skip
    own = table + tl.load(place + row).to(tl.int64) * width
    peak = tl.full((LINES,), float("-inf"), tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    mixed = tl.zeros((LINES, DIM), tl.float32)
    step: tl.constexpr = KV_HEADS * DIM
    for begin in range(first, end, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        seen = slot < end
        block = tl.load(own + slot // PAGE, mask=seen, other=0).to(tl.int64)
        where = (block * (2 * PAGE) + slot % PAGE) * step + head * DIM
        k = tl.load(pages + where[:, None] + at[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(pages + where[:, None] + PAGE * step + at[None, :], mask=seen[:, None],
                    other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        odds = tl.exp(score - higher[:, None])
        fade = tl.exp(peak - higher)
        total = total * fade + tl.sum(odds, axis=1)
        mixed = mixed * fade[:, None] + tl.dot(odds.to(v.dtype), v, input_precision="ieee")
        peak = higher
    release(OVERLAP)
    if SPLIT == 1:
        whose = (row.to(tl.int64) * KV_HEADS + head) * GROUP + line
        tl.store(out + whose[:, None] * DIM + at[None, :],
                 (mixed / total[:, None]).to(out.dtype.element_ty), mask=line[:, None] < GROUP)
    else:
        part = (row * KV_HEADS + head) * SPLIT + split
        tl.store(parts + (part * LINES + line[:, None]) * DIM + at[None, :], mixed)
        tl.store(sums + part * LINES + line, total)
        tl.store(peaks + part * LINES + line, peak)


@triton.jit
def _merge(
    parts, sums, peaks, out,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
    LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    line, at = head % GROUP, tl.arange(0, DIM)
    begin = (row * KV_HEADS + head // GROUP) * SPLIT
    split = tl.arange(0, SPLIT)
    wait(OVERLAP)
    peak = tl.load(peaks + (begin + split) * LINES + line)
    total = tl.load(sums + (begin + split) * LINES + line)
    highest = tl.max(peak, axis=0)
    share = tl.where(total > 0, tl.exp(peak - highest), 0.0)
    part = tl.load(parts + ((begin + split[:, None]) * LINES + line) * DIM + at[None, :])
    mixed = tl.sum(part * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    where = (row.to(tl.int64) * KV_HEADS * GROUP + head) * DIM + at
    tl.store(out + where, mixed.to(out.dtype.element_ty))


def splits_of(rows: int, kv_heads: int) -> int:
    """Programs that share a row and KV head: a power of two that fills the device."""
    wanted = max(1, FULL // (rows * kv_heads))
    return min(SPLITS, 1 << (wanted.bit_length() - 1))


def chain_attention(
    query: Tensor, pages: Tensor, table: Tensor, place: Tensor, position: Tensor, start: Tensor,
    out: Tensor, *, picked: Tensor | None = None, overlap: int = 0,
) -> None:  # fmt: skip
    """Attend with `query` [G, heads * dim] (rows contiguous) to `pages` [blocks, 2, size, kv, dim].

    `table` int32 [slots + 1, width], `place`, `position` and `start` int32 [G]: seen are the slots
    from `start`, at least 1, up to the one behind `position`; `out` [G, heads * dim].
    With `picked` int32 [G] the query of row i is query[picked[i]].  `overlap`: see
    kernels/overlap.py.
    """
    many, heads = out.shape[0], out.shape[1] // pages.shape[-1]
    _, _, size, kv_heads, dim = pages.shape
    group, split = heads // kv_heads, splits_of(many, kv_heads)
    assert group <= LINES and query.stride(1) == 1 and out.is_contiguous()
    lines = (many, kv_heads, split, LINES) if split > 1 else (0,)  # nothing to merge
    parts = torch.empty(*lines, dim, dtype=torch.float32, device=query.device)
    sums, peaks = (torch.empty(lines, dtype=torch.float32, device=query.device) for _ in range(2))
    shared = {"GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "SPLIT": split, "LINES": LINES,
              "OVERLAP": int(overlap), **launch_options(overlap)}  # fmt: skip
    enqueue(_attend, (many, kv_heads, split))(
        query, place if picked is None else picked, pages, table, place, position, start, out,
        parts, sums, peaks, table.shape[1], 1 / math.sqrt(dim), query.stride(0), PAGE=size,
        BLOCK=BLOCK, PICKED=picked is not None, num_warps=4, **shared,
    )  # fmt: skip
    if split > 1:
        enqueue(_merge, (many, heads))(parts, sums, peaks, out, num_warps=2, **shared)
