"""What the kernels of filtered rows share: ranks, weights, noise.  Launches nothing.

A token's rank is the bit pattern of -x, x its scaled logit (the row's best is 0): it rises as x
falls.  Its weight is exp(x) as an integer, so that sums of weights have no order.
"""

# mypy: disable-error-code="no-untyped-def,no-any-unimported,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels import sampler_tables as tables
from engine.kernels.philox import gumbel, words_at
from engine.kernels.sampler_score import CHOICE, SEED, TEMPERATURE, number

TOP_K, TOP_P = tl.constexpr(tables.TOP_K), tl.constexpr(tables.TOP_P)
FLOOR = tl.constexpr(tables.FLOOR)
# Columns of a row's facts: float bits of the largest logit, whether there is a token, the state of
# chunks that do not count, the pivot, how many tokens reach it, whether those leave the row open.
TOP, LEGAL, BANNED, PIVOT, FOUND, SEARCH = (tl.constexpr(n) for n in range(6))
FACTS = tl.constexpr(tables.FACTS)
UNIT = tl.constexpr(2.0**40)  # 2**17 tokens of weight 2**40 fit an int64 sixty times
NEVER = tl.constexpr(0x7F800000)  # the rank of -inf
LAST = tl.constexpr(2**31 - 1)  # behind every rank
EMPTY = tl.constexpr(2**62)  # behind every key


@triton.jit
def ranked(x, top, record):
    """The scaled logits (the best is 0) and their ranks: int32, rising as they fall."""
    scaled = tl.minimum(tl.div_rn(x - top, number(record, TEMPERATURE)), 0.0)
    # abs, not minus: -0 must not have a sign in its rank.
    return scaled, tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def weight(scaled):
    """exp as an integer multiple of 2**-40."""
    return (tl.exp(scaled) * UNIT).to(tl.int64)


@triton.jit
def top_p_of(record):
    """The wanted share of the mass, fp64: 0.9 in fp32 would be a smaller one."""
    low = tl.load(record + TOP_P).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + TOP_P + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def noisy(scaled, record, position, ids):
    """The scaled logits plus the noise of their ids."""
    words = words_at(
        tl.load(record + SEED), tl.load(record + SEED + 1), position, tl.load(record + CHOICE), ids
    )
    return scaled + gumbel(words)


@triton.jit
def ranks_at(
    ids, shaped, states, row, vocab, top, banned, record, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Scaled logits and ranks of these ids of a row; what may not be drawn has the rank NEVER."""
    inside = ids < vocab
    x = tl.load(shaped + row.to(tl.int64) * vocab + ids, mask=inside, other=-float("inf"))
    state = tl.load(states + row * CHUNKS + ids // BLOCK, mask=inside, other=0)
    return ranked(tl.where((state & banned) != 0, -float("inf"), x), top, record)
