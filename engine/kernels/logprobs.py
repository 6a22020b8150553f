"""Log-probabilities under the raw logits: of the drawn token and of the row's best.  Draws nothing.

Chunks are fixed, and so is the shape in which their sums meet: a row has the same bits in every
batch.  A logit and its id make one sortable integer, the lower id being the larger of two equals;
so the n best of a row are the n largest integers among its chunks' n largest.
"""

# mypy: disable-error-code="no-untyped-def,no-any-unimported,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import sampler_tables as tables
from engine.kernels.launch import enqueue
from engine.kernels.sampler_score import FLAGS, WORDS
from engine.kernels.sampler_tables import BEST, BLOCK, WORDWISE, Results, Rows, Scratch, SlotTables

LOGPROBS, SCORED = tl.constexpr(tables.LOGPROBS), tl.constexpr(tables.SCORED)
NONE = tl.constexpr(-(2**63))  # below every key
LOW = tl.constexpr(0xFFFFFFFF)
TURN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(x, ids):
    """int64 that order by (x up, id down)."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = tl.where(bits < 0, bits ^ TURN, bits)
    return (ordered.to(tl.int64) << 32) | (ids ^ TURN).to(tl.int64)


@triton.jit
def _largest(keys, into, count):
    """Store the `count` largest keys, falling; NONE where there are no more."""
    for place in range(count):
        best = tl.max(keys)
        tl.store(into + place, best)
        keys = tl.where(keys == best, NONE, keys)


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _chunk(
    logits, stride, vocab, count, row_slot, records, raw, keys,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row < tl.load(count):
        record = records + tl.load(row_slot + row).to(tl.int64) * WORDS
        if (tl.load(record + FLAGS) & SCORED) != 0:
            ids = chunk * BLOCK + tl.arange(0, BLOCK)
            inside = ids < vocab
            at = logits + row.to(tl.int64) * stride + ids
            x = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
            top = tl.max(x)
            base = tl.where(top > -float("inf"), top, 0.0)
            place = row * CHUNKS + chunk
            tl.store(raw + 2 * place, base)
            tl.store(raw + 2 * place + 1, tl.sum(tl.exp(x - base)))
            mine = tl.where(inside, _keys(x, ids), NONE)
            _largest(mine, keys + place * BEST, tl.load(record + LOGPROBS))


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _row(
    logits, stride, count, row_slot, records, raw, keys, tokens, own, best_ids, best_values,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr, BEST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(count):
        record = records + tl.load(row_slot + row).to(tl.int64) * WORDS
        token = tl.load(tokens + row)
        if ((tl.load(record + FLAGS) & SCORED) != 0) & (token >= 0):
            places = tl.arange(0, PADDED)
            real = places < CHUNKS
            at = raw + 2 * (row * CHUNKS + places)
            base = tl.load(at, mask=real, other=-float("inf"))
            top = tl.max(base)
            share = tl.load(at + 1, mask=real, other=0.0) * tl.exp(base - top)
            norm = tl.log(tl.sum(share)) + top
            drawn = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
            tl.store(own + row, drawn - norm)
            wanted = tl.load(record + LOGPROBS)
            columns = tl.arange(0, WIDTH)
            each = keys + (row * CHUNKS + places[:, None]) * BEST + columns[None, :]
            mine = tl.load(each, mask=real[:, None] & (columns[None, :] < wanted), other=NONE)
            for place in range(wanted):
                best = tl.max(mine)
                mine = tl.where(mine == best, NONE, mine)
                bits = (best >> 32).to(tl.int32)
                x = tl.where(bits < 0, bits ^ TURN, bits).to(tl.float32, bitcast=True)
                found = best != NONE
                token_id = (best & LOW).to(tl.int32) ^ TURN
                tl.store(best_ids + row * BEST + place, tl.where(found, token_id, -1))
                value = tl.where(found, x - norm, -float("inf"))
                tl.store(best_values + row * BEST + place, value)


def logprobs(
    logits: Tensor, rows: Rows, slots: SlotTables, scratch: Scratch, results: Results
) -> None:
    """Fill `own`, `best_ids` and `best_values` of the rows that ask; their tokens are drawn."""
    count, vocab = logits.shape
    chunks = scratch.raw.shape[1]
    enqueue(_chunk, (count, chunks))(
        logits, logits.stride(0), vocab, rows.count, rows.slot, slots.records, scratch.raw,
        scratch.best, CHUNKS=chunks, BLOCK=BLOCK, BEST=BEST, num_warps=4,
    )  # fmt: skip
    enqueue(_row, (count,))(
        logits, logits.stride(0), rows.count, rows.slot, slots.records, scratch.raw, scratch.best,
        results.tokens, results.own, results.best_ids, results.best_values,
        CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), BEST=BEST,
        WIDTH=triton.next_power_of_2(BEST), num_warps=8,
    )  # fmt: skip
