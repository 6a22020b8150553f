"""Draw a device draft's tokens: the best of logits / temperature + the target's noise.  No filter.

The target draws with noise that is a function of seed, choice, position and token id; a draft that
uses the same is right the more often.  Greedy rows take the best logit.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.overlap import release
from engine.kernels.philox import gumbel, words_at
from engine.kernels.sampler_score import CHOICE, FLAGS, HOT, SEED, TEMPERATURE, WORDS, number

BLOCK, WARPS = 4096, 16  # ids at a time: a row is one program, so its loads should travel together
# Rows of tables a step or a group long: their alignment must not compile a kernel anew.
WORDWISE = ("place", "position", "tokens")


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _draw(
    logits, kept, records, place, position, tokens, count,
    AHEAD: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    record = records + tl.load(place + row).to(tl.int64) * WORDS
    hot = (tl.load(record + FLAGS) & HOT) != 0
    heat = number(record, TEMPERATURE)
    key_lo, key_hi = tl.load(record + SEED), tl.load(record + SEED + 1)
    choice, where = tl.load(record + CHOICE), tl.load(position + row) + AHEAD
    best = tl.full((), float("-inf"), tl.float32)
    found = tl.full((), 0, tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        there = at < count
        score = tl.load(logits + row.to(tl.int64) * count + at, mask=there,
                        other=float("-inf")).to(tl.float32)
        if hot:
            ids = tl.load(kept + at, mask=there, other=0) if KEPT else at
            score = score / heat + gumbel(words_at(key_lo, key_hi, where, choice, ids))
            score = tl.where(there, score, float("-inf"))
        peak, index = tl.max(score, axis=0, return_indices=True)
        found = tl.where(peak > best, first + index, found)
        best = tl.maximum(peak, best)
    release(OVERLAP)
    tl.store(tokens + row, tl.load(kept + found) if KEPT else found)


def chain_draw(
    logits: Tensor, kept: Tensor | None, records: Tensor, place: Tensor, position: Tensor,
    tokens: Tensor, ahead: int, *, overlap: int = 0,
) -> None:  # fmt: skip
    """Write the drawn ids of `logits` [G, vocabulary] to `tokens` int32 [G].

    `kept` int32 [vocabulary] are the target's ids, None = all; `records` of SlotTables by `place`;
    the token drawn is that of `position` + `ahead`.  Of two as good it is the first.  It waits for
    whatever is before it; with `overlap` the next kernel need not (kernels/overlap.py).
    """
    many, count = logits.shape
    assert logits.is_contiguous()
    enqueue(_draw, (many,))(
        logits, tokens if kept is None else kept, records, place, position, tokens, count,
        AHEAD=ahead, KEPT=kept is not None, BLOCK=BLOCK, OVERLAP=int(overlap),
        num_warps=WARPS,
    )  # fmt: skip
