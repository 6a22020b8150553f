"""Top-k, top-p and min-p: the draw of filtered rows, without sorting the vocabulary.

Takes the logits that sampler_score.py left in scratch.  Each filter keeps a prefix of the order
(value down, id up), so a row's best few tokens decide:

    pivot     a value with at least AIM tokens above it, from the maxima of strips (one program)
    compact   the tokens above it, and the total weight of the row (a program a chunk)
    finish    bisect for the cut among those tokens, draw (one program)
    search    what did not fit: bisect for the cut over the whole row (one program, sampler_search)

Weights are exp(x) as integers (unit 2**-40 of the best): their sums have no order, so neither
atomics nor the number of programs can change a bit, and every cut is exact for those weights.
Where a token lands among those that are compacted does not matter: all that follows are sums and
maxima over its key, (rank, id) in one integer.
"""

# mypy: disable-error-code="no-untyped-def,no-any-unimported,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from engine.kernels.launch import enqueue
from engine.kernels.sampler_ranks import (
    BANNED,
    EMPTY,
    FACTS,
    FLOOR,
    FOUND,
    LAST,
    LEGAL,
    NEVER,
    PIVOT,
    SEARCH,
    TOP,
    TOP_K,
    noisy,
    ranked,
    ranks_at,
    top_p_of,
    weight,
)
from engine.kernels.sampler_score import FILTERED, FLAGS, NO_ID, WORDS, chunk_tops, number
from engine.kernels.sampler_search import search
from engine.kernels.sampler_tables import (
    AIM,
    BLOCK,
    STRIP,
    TILE,
    WORDWISE,
    Results,
    Rows,
    Scratch,
    SlotTables,
)

SMALL = 1024  # a tile for the usual row: top-k, or a sharp distribution


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _pivot(
    count, row_slot, records, peaks, states, strips, facts, mass, aim,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(count):
        record = records + tl.load(row_slot + row).to(tl.int64) * WORDS
        if (tl.load(record + FLAGS) & FILTERED) != 0:
            top, legal, banned = chunk_tops(peaks, states, row, CHUNKS, PADDED)
            places = tl.arange(0, STRIPS)
            real = places < CHUNKS * EACH
            x = tl.load(strips + row * (CHUNKS * EACH) + places, mask=real, other=-float("inf"))
            state = tl.load(states + row * CHUNKS + places // EACH, mask=real, other=0)
            x = tl.where((state & banned) != 0, -float("inf"), x)
            _, rank = ranked(x, top, record)
            k = tl.load(record + TOP_K)
            want = tl.where(k > 0, tl.minimum(k, aim), aim)
            low = tl.full((), 0, tl.int32)
            # Half the bits are enough: a pivot a little too low only lets a few more tokens in.
            for step in range(16):
                middle = low + ((1 << (30 - step)) - 1)
                enough = tl.sum((rank <= middle).to(tl.int32)) >= want
                low = tl.where(enough, low, middle + 1)
            fact = facts + row * FACTS
            tl.store(fact + TOP, top.to(tl.int32, bitcast=True))
            tl.store(fact + LEGAL, legal.to(tl.int32))
            tl.store(fact + BANNED, banned)
            tl.store(fact + PIVOT, low + ((1 << 15) - 1))
            tl.store(fact + FOUND, 0)
            tl.store(fact + SEARCH, 0)
            tl.store(mass + row, tl.full((), 0, tl.int64))


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _compact(
    count, vocab, row_slot, records, states, shaped, facts, mass, found,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row < tl.load(count):
        record = records + tl.load(row_slot + row).to(tl.int64) * WORDS
        if (tl.load(record + FLAGS) & FILTERED) != 0:
            fact = facts + row * FACTS
            if tl.load(fact + LEGAL) != 0:
                banned = tl.load(fact + BANNED)
                top = tl.load(fact + TOP).to(tl.float32, bitcast=True)
                ids = chunk * BLOCK + tl.arange(0, BLOCK)
                scaled, rank = ranks_at(
                    ids, shaped, states, row, vocab, top, banned, record, CHUNKS, BLOCK
                )
                tl.atomic_add(mass + row, tl.sum(weight(scaled)), sem="relaxed")
                taken = (rank <= tl.load(fact + PIVOT)) & (rank < NEVER)
                number_taken = tl.sum(taken.to(tl.int32))
                if number_taken > 0:
                    base = tl.atomic_add(fact + FOUND, number_taken, sem="relaxed")
                    place = base + tl.cumsum(taken.to(tl.int32)) - 1
                    key = (rank.to(tl.int64) << ID_BITS) | ids.to(tl.int64)
                    fits = taken & (place < TILE)
                    tl.store(found + row.to(tl.int64) * TILE + place, key, mask=fits)


@triton.jit
def _last(keys, each, target, BITS: tl.constexpr):
    """The lowest number below 2**BITS up to which the keys' `each` sum to at least `target`.

    Two bits a step: the three sums of a step are independent, so they overlap.
    """
    low = tl.full((), 0, tl.int64)
    quarter = tl.full((), 1, tl.int64) << (BITS - 2)
    for _ in range(BITS // 2):
        first = tl.sum(tl.where(keys < low + quarter, each, 0))
        second = tl.sum(tl.where(keys < low + 2 * quarter, each, 0))
        third = tl.sum(tl.where(keys < low + 3 * quarter, each, 0))
        low += quarter * (first < target).to(tl.int64)
        low += quarter * (second < target).to(tl.int64)
        low += quarter * (third < target).to(tl.int64)
        quarter = quarter >> 2
    return low


@triton.jit
def _kept(keys, scaled, size, mass, record, TILE: tl.constexpr, BITS: tl.constexpr):
    """Which of the tile's tokens all filters keep: a prefix of the order of keys."""
    real = tl.arange(0, TILE) < size
    k, share = tl.load(record + TOP_K), top_p_of(record)
    cut = tl.full((), EMPTY, tl.int64)
    total = mass
    if k > 0:
        cut = _last(keys, real.to(tl.int64), k.to(tl.int64), BITS)
        total = tl.sum(tl.where(real & (keys <= cut), weight(scaled), 0))
    if share < 1:
        each = tl.where(real & (keys <= cut), weight(scaled), 0)
        # Integers reach a real number when they reach the next integer; one token always stays.
        target = tl.maximum(tl.ceil(total.to(tl.float64) * share).to(tl.int64), 1)
        cut = tl.minimum(cut, _last(keys, each, target, BITS))
    return real & (keys <= cut) & (scaled >= number(record, FLOOR))


@triton.jit
def _tile(
    size, fact, found, mass, record, position, result,
    TILE: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Draw from the `size` tokens at `found`, or leave the row open if they do not decide it."""
    place = tl.arange(0, TILE)
    keys = tl.load(found + place, mask=place < size, other=EMPTY)
    ids = (keys & ((1 << ID_BITS) - 1)).to(tl.int32)
    rank = tl.where(place < size, (keys >> ID_BITS).to(tl.int32), NEVER)
    scaled = -rank.to(tl.float32, bitcast=True)
    kept = _kept(keys, scaled, size, mass, record, TILE, 31 + ID_BITS)
    # Whether the cut lies inside the tile: either the tile is the whole row, or the k best are in
    # it, or some token in it is cut off.
    k = tl.load(record + TOP_K)
    ends = tl.sum(kept.to(tl.int32)) < size
    if (tl.load(fact + PIVOT) >= NEVER) | tl.where(k > 0, k <= size, ends):
        score = tl.where(kept, noisy(scaled, record, position, ids), -float("inf"))
        best = tl.max(score)
        tl.store(result, tl.min(tl.where(kept & (score == best), ids, NO_ID)))
    else:
        tl.store(fact + SEARCH, 1)


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _finish(
    count, row_slot, row_position, records, facts, mass, found, results,
    SMALL: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(count):
        record = records + tl.load(row_slot + row).to(tl.int64) * WORDS
        if (tl.load(record + FLAGS) & FILTERED) != 0:
            fact, result = facts + row * FACTS, results + row
            size, position = tl.load(fact + FOUND), tl.load(row_position + row)
            keys, total = found + row.to(tl.int64) * TILE, tl.load(mass + row)
            if tl.load(fact + LEGAL) == 0:
                tl.store(result, -1)
            elif size <= SMALL:
                # Sums of integers: the tile's shape cannot be seen in the result.
                _tile(size, fact, keys, total, record, position, result, SMALL, ID_BITS)
            elif size <= TILE:
                _tile(size, fact, keys, total, record, position, result, TILE, ID_BITS)
            else:
                tl.store(fact + SEARCH, 1)


def draw(
    rows: Rows, slots: SlotTables, scratch: Scratch, results: Results, count: int, vocab: int
) -> None:
    """Write the token of each filtered row; `count` is the bucket's number of rows."""
    chunks, each = scratch.peak.shape[1], BLOCK // STRIP
    facts = scratch.row
    plain: dict[str, Any] = {"enable_fp_fusion": False}
    # Odd, so that rank and id together have an even number of bits: two are found at a time.
    bits = next(bits for bits in (17, 19, 31) if vocab <= 1 << bits)
    # A strip's maximum stands for one token: with few strips, aim at a part of them.
    aim = min(AIM, chunks * each // 4) if vocab > TILE else LAST.value
    enqueue(_pivot, (count,))(
        rows.count, rows.slot, slots.records, scratch.peak, scratch.state, scratch.strips, facts,
        scratch.mass, aim, CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), EACH=each,
        STRIPS=triton.next_power_of_2(chunks * each), num_warps=16, **plain,
    )  # fmt: skip
    enqueue(_compact, (count, chunks))(
        rows.count, vocab, rows.slot, slots.records, scratch.state, scratch.shaped, facts,
        scratch.mass, scratch.found, CHUNKS=chunks, BLOCK=BLOCK, TILE=TILE, ID_BITS=bits,
        num_warps=4, **plain,
    )  # fmt: skip
    enqueue(_finish, (count,))(
        rows.count, rows.slot, rows.position, slots.records, facts, scratch.mass, scratch.found,
        results.tokens, SMALL=SMALL, TILE=TILE, ID_BITS=bits, num_warps=8, **plain,
    )  # fmt: skip
    search(rows, slots, scratch, results, count, vocab)
