"""The first kernel of a step: which tokens it has, their embeddings, new table entries.

Does not touch pages.  A token is either known to the host, or the newest one of a sequence, which
the step before drew and which only the device has.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, release, wait

UPDATES = 256  # table entries written at a time


@triton.jit
def _embed(
    tokens, origin, last, weights, out, width,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    wait(OVERLAP)
    slot = tl.load(origin + flat)
    token = tl.load(tokens + flat)
    if slot >= 0:
        token = tl.load(last + slot)
        tl.store(tokens + flat, token)
    row = tl.load(weights + token.to(tl.int64) * width + at, mask=there, other=0.0)
    release(OVERLAP)
    tl.store(out + flat * width + at, row, mask=there)


def embed(
    tokens: Tensor,
    origin: Tensor,
    last: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    overlap: int = 0,
) -> None:
    """Write the embedding of N flat tokens to `out` [N, width], contiguous.

    `tokens` int32 [N] are ids; where `origin` int32 [N] is a slot and not negative, the id is
    last[slot] instead, and is written to `tokens` for whoever reads them after.
    """
    count, width = out.shape
    enqueue(_embed, (count,))(
        tokens, origin, last, weights, out, width,
        BLOCK=triton.next_power_of_2(width), OVERLAP=int(overlap),
        num_warps=4 if width <= 2048 else 8, **launch_options(overlap),
    )  # fmt: skip


@triton.jit
def _update(table, slots, places, blocks, count, width, BLOCK: tl.constexpr):
    total = tl.load(count)
    for begin in range(0, total, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        there = at < total
        slot = tl.load(slots + at, mask=there, other=0).to(tl.int64)
        place = tl.load(places + at, mask=there, other=0)
        block = tl.load(blocks + at, mask=there, other=0)
        tl.store(table + slot * width + place, block, mask=there)


def update_table(
    table: Tensor, slots: Tensor, places: Tensor, blocks: Tensor, count: Tensor
) -> None:
    """table[slots[i], places[i]] = blocks[i] for i below count[0]; all int32, table contiguous."""
    enqueue(_update, (1,))(
        table, slots, places, blocks, count, table.shape[1], BLOCK=UPDATES, num_warps=4
    )
