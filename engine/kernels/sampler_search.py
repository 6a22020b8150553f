"""The draw of filtered rows whose best TILE tokens do not decide them: flat or huge selections.

Does nothing for other rows.  One program bisects a row's ranks, bit by bit, for the k-th best or
for the first rank at which the wanted mass is reached; the cut is (rank, how many of the tokens at
that rank, lowest ids first), which is the prefix that a sort would have given.
"""

# mypy: disable-error-code="no-untyped-def,no-any-unimported,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.sampler_ranks import (
    BANNED,
    FACTS,
    FLOOR,
    LAST,
    NEVER,
    SEARCH,
    TOP,
    TOP_K,
    chunk_ranks,
    noisy,
    top_p_of,
    weight,
)
from engine.kernels.sampler_score import FILTERED, FLAGS, NO_ID, WORDS, number
from engine.kernels.sampler_tables import BLOCK, Results, Rows, Scratch, SlotTables


@triton.jit
def _upto(
    limit, shaped, states, row, vocab, top, banned, record,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many legal tokens have a rank up to `limit`, and their weight."""
    counts, masses = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for chunk in range(CHUNKS):
        _, scaled, rank = chunk_ranks(
            shaped, states, row, chunk, vocab, top, banned, record, CHUNKS, BLOCK
        )
        near = (rank <= limit) & (rank < NEVER)
        counts += near.to(tl.int32)
        masses += tl.where(near, weight(scaled), 0)
    return tl.sum(counts), tl.sum(masses)


@triton.jit
def _first_rank(
    k, target, shaped, states, row, vocab, top, banned, record,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest rank up to which there are k tokens, or for k = 0 the mass `target`."""
    low = tl.full((), 0, tl.int32)
    for step in range(31):
        middle = low + ((1 << (30 - step)) - 1)
        number_near, mass = _upto(
            middle, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK
        )
        enough = tl.where(k > 0, number_near >= k, mass.to(tl.float64) >= target)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _cut(
    shaped, states, row, vocab, top, banned, record, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """The last rank that is kept, and how many of the tokens at that rank are."""
    rank, room = tl.full((), LAST, tl.int32), tl.full((), LAST, tl.int32)
    k, share = tl.load(record + TOP_K), top_p_of(record)
    _, total = _upto(LAST, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK)
    nothing = total.to(tl.float64) * 0
    if k > 0:
        rank = _first_rank(
            k, nothing, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK
        )
        above, mass = _upto(
            rank - 1, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK
        )
        # Fewer than k legal tokens leave the rank at LAST: nothing is cut, the total stands.
        if rank < NEVER:
            room = k - above
            each = weight(-rank.to(tl.float32, bitcast=True))
            total = mass + room.to(tl.int64) * each
    if share < 1:
        target = total.to(tl.float64) * share
        rank = _first_rank(
            k * 0, target, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK
        )
        _, mass = _upto(
            rank - 1, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK
        )
        each = tl.maximum(weight(-rank.to(tl.float32, bitcast=True)), 1)
        missing = (target - mass.to(tl.float64)) / each.to(tl.float64)
        room = tl.maximum(tl.ceil(missing).to(tl.int32), 1)
    return rank, room


@triton.jit
def _search(
    count, vocab, row_slot, row_position, records, states, shaped, facts, results,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(count):
        record = records + tl.load(row_slot + row).to(tl.int64) * WORDS
        fact = facts + row * FACTS
        if ((tl.load(record + FLAGS) & FILTERED) != 0) & (tl.load(fact + SEARCH) != 0):
            top = tl.load(fact + TOP).to(tl.float32, bitcast=True)
            banned = tl.load(fact + BANNED)
            cut, room = _cut(shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK)
            floor, position = number(record, FLOOR), tl.load(row_position + row)
            best, token = tl.full((), -float("inf"), tl.float32), tl.full((), NO_ID, tl.int32)
            passed = tl.full((), 0, tl.int32)
            for chunk in range(CHUNKS):
                ids, scaled, rank = chunk_ranks(
                    shaped, states, row, chunk, vocab, top, banned, record, CHUNKS, BLOCK
                )
                level = (rank == cut).to(tl.int32)
                kept = (rank < cut) | ((level != 0) & (passed + tl.cumsum(level) <= room))
                kept = kept & (rank < NEVER) & (scaled >= floor)
                passed += tl.sum(level)
                score = tl.where(kept, noisy(scaled, record, position, ids), -float("inf"))
                here = tl.max(score)
                lowest = tl.min(tl.where(kept & (score == here), ids, NO_ID))
                # Chunks rise: at equal scores the one before has the lower id.
                token = tl.where(here > best, lowest, token)
                best = tl.maximum(best, here)
            tl.store(results + row, token)


def search(
    rows: Rows, slots: SlotTables, scratch: Scratch, results: Results, count: int, vocab: int
) -> None:
    """Write the tokens of the rows that sampler_filter.py left open."""
    _search[(count,)](
        rows.count, vocab, rows.slot, rows.position, slots.records, scratch.state, scratch.shaped,
        scratch.row, results.tokens,
        CHUNKS=scratch.peak.shape[1], BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
