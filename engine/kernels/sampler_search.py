"""The draw of filtered rows whose best tokens in the tile do not decide them: flat or huge cuts.

Does nothing for other rows.  One program bisects a row's ranks, two bits a pass, for the k-th best
or for the first rank at which the wanted mass is reached; the cut is (rank, how many of the tokens
at that rank, lowest ids first), which is the prefix that a sort would have given.
"""

# mypy: disable-error-code="no-untyped-def,no-any-unimported,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.launch import enqueue
from engine.kernels.sampler_ranks import (
    BANNED,
    FACTS,
    FLOOR,
    LAST,
    NEVER,
    SEARCH,
    TOP,
    TOP_K,
    noisy,
    ranks_at,
    top_p_of,
    weight,
)
from engine.kernels.sampler_score import FILTERED, FLAGS, NO_ID, WORDS, number
from engine.kernels.sampler_tables import BLOCK, WORDWISE, Results, Rows, Scratch, SlotTables

WIDE = 4096  # ids a program looks at together


@triton.jit
def _below(
    first, second, third, k, shaped, states, row, vocab, top, banned, record,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The tokens of rank below each limit: how many, or for k = 0 their weight; int64."""
    sum1, sum2 = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64)
    sum3 = tl.zeros([WIDE], tl.int64)
    for start in range(0, vocab, WIDE):
        ids = start + tl.arange(0, WIDE)
        scaled, rank = ranks_at(
            ids, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK
        )
        each = weight(scaled)
        if k > 0:
            each = (rank < NEVER).to(tl.int64)
        sum1 += tl.where(rank < first, each, 0)
        sum2 += tl.where(rank < second, each, 0)
        sum3 += tl.where(rank < third, each, 0)
    return tl.sum(sum1), tl.sum(sum2), tl.sum(sum3)


@triton.jit
def _first_rank(
    k, target, shaped, states, row, vocab, top, banned, record,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The lowest rank up to which the sum of `_below` is at least `target`, and the sum below it.

    Ranks have 31 bits: the first pass decides a bit that is always 0.
    """
    low, under = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    quarter = tl.full((), 1, tl.int64) << 30
    for _ in range(16):
        sum1, sum2, sum3 = _below(
            low + quarter, low + 2 * quarter, low + 3 * quarter, k, shaped, states, row, vocab,
            top, banned, record, CHUNKS, BLOCK, WIDE,
        )  # fmt: skip
        if sum1 < target:
            low, under = low + quarter, sum1
            if sum2 < target:
                low, under = low + quarter, sum2
                if sum3 < target:
                    low, under = low + quarter, sum3
        quarter = quarter >> 2
    return tl.minimum(low, LAST).to(tl.int32), under


@triton.jit
def _cut(
    shaped, states, row, vocab, top, banned, record, total,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The last rank that is kept, and how many of the tokens at that rank are."""
    rank, room = tl.full((), LAST, tl.int32), tl.full((), LAST, tl.int64)
    k, share = tl.load(record + TOP_K), top_p_of(record)
    if k > 0:
        rank, under = _first_rank(
            k, k.to(tl.int64), shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK, WIDE
        )
        # Fewer than k legal tokens leave the rank at LAST: nothing is cut, the total stands.
        if rank < NEVER:
            room = k.to(tl.int64) - under
            mass, _, _ = _below(
                rank, rank, rank, 0 * k, shaped, states, row, vocab, top, banned, record,
                CHUNKS, BLOCK, WIDE,
            )  # fmt: skip
            total = mass + room * weight(-rank.to(tl.float32, bitcast=True))
    if share < 1:
        # Integers reach a real number when they reach the next integer; one token always stays.
        target = tl.maximum(tl.ceil(total.to(tl.float64) * share).to(tl.int64), 1)
        rank, under = _first_rank(
            0 * k, target, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK, WIDE
        )
        each = tl.maximum(weight(-rank.to(tl.float32, bitcast=True)), 1)
        room = (target - under + each - 1) // each
    return rank, room


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _search(
    count, vocab, row_slot, row_position, records, states, shaped, facts, masses, results,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(count):
        record = records + tl.load(row_slot + row).to(tl.int64) * WORDS
        # Only a filtered row has facts of this step.
        if (tl.load(record + FLAGS) & FILTERED) != 0:
            fact = facts + row * FACTS
            if tl.load(fact + SEARCH) != 0:
                top = tl.load(fact + TOP).to(tl.float32, bitcast=True)
                banned = tl.load(fact + BANNED)
                cut, room = _cut(
                    shaped, states, row, vocab, top, banned, record, tl.load(masses + row),
                    CHUNKS, BLOCK, WIDE,
                )  # fmt: skip
                token = _draw(
                    cut, room, shaped, states, row, vocab, top, banned, record,
                    tl.load(row_position + row), CHUNKS, BLOCK, WIDE,
                )  # fmt: skip
                tl.store(results + row, token)


@triton.jit
def _draw(
    cut, room, shaped, states, row, vocab, top, banned, record, position,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The best noisy token up to the cut and above the floor."""
    floor = number(record, FLOOR)
    best, token = tl.full((), -float("inf"), tl.float32), tl.full((), NO_ID, tl.int32)
    passed = tl.full((), 0, tl.int64)
    for start in range(0, vocab, WIDE):
        ids = start + tl.arange(0, WIDE)
        scaled, rank = ranks_at(
            ids, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK
        )
        level = (rank == cut).to(tl.int32)
        kept = (rank < cut) | ((level != 0) & (passed + tl.cumsum(level) <= room))
        kept = kept & (rank < NEVER) & (scaled >= floor)
        passed += tl.sum(level)
        score = tl.where(kept, noisy(scaled, record, position, ids), -float("inf"))
        here = tl.max(score)
        lowest = tl.min(tl.where(kept & (score == here), ids, NO_ID))
        # Ids rise: at equal scores the one before is the lower.
        token = tl.where(here > best, lowest, token)
        best = tl.maximum(best, here)
    return token


def search(
    rows: Rows, slots: SlotTables, scratch: Scratch, results: Results, count: int, vocab: int
) -> None:
    """Write the tokens of the rows that sampler_filter.py left open."""
    enqueue(_search, (count,))(
        rows.count, vocab, rows.slot, rows.position, slots.records, scratch.state, scratch.shaped,
        scratch.row, scratch.mass, results.tokens,
        CHUNKS=scratch.peak.shape[1], BLOCK=BLOCK, WIDE=WIDE, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
