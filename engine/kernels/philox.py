"""The noise of engine/noise.py inside a kernel: Philox4x32-10 words and what becomes of them.

Draws no token and launches nothing.  The words are bit-equal to `engine.noise.philox`; the floats
follow its fp32 transform and may differ from it in the last bits.
"""

# mypy: disable-error-code="no-untyped-def,no-any-unimported,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from engine.noise import M0, M1, ROUNDS, W0, W1

_M0, _M1 = tl.constexpr(M0), tl.constexpr(M1)
_W0, _W1 = tl.constexpr(W0), tl.constexpr(W1)
_ROUNDS = tl.constexpr(ROUNDS)
_WORD = tl.constexpr(2.0**-32)
_MOST = tl.constexpr(1 - 2.0**-24)


@triton.jit
def philox(key_lo, key_hi, c0, c1, c2, c3):
    """Four uint32 words of a counter under its key; uint32 arguments that broadcast together.

    Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    for _ in tl.static_range(_ROUNDS):
        # One wide product gives both halves: a single instruction on the cards we know.
        low = c0.to(tl.uint64) * _M0
        high = c2.to(tl.uint64) * _M1
        c0 = (high >> 32).to(tl.uint32) ^ c1 ^ key_lo
        c1 = high.to(tl.uint32)
        c2 = (low >> 32).to(tl.uint32) ^ c3 ^ key_hi
        c3 = low.to(tl.uint32)
        key_lo = (key_lo.to(tl.uint64) + _W0).to(tl.uint32)
        key_hi = (key_hi.to(tl.uint64) + _W1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def quad_words(key_lo, key_hi, position, choice, quads):
    """The words of the ids 4q .. 4q + 3 of each q in `quads` [Q] int32: uint32 [Q, 4].

    `key_lo`, `key_hi`, `position` and `choice` are int32 scalars whose bits count.
    """
    zero = tl.full((), 0, tl.uint32)
    w0, w1, w2, w3 = philox(
        key_lo.to(tl.uint32, bitcast=True), key_hi.to(tl.uint32, bitcast=True),
        position.to(tl.uint32, bitcast=True), choice.to(tl.uint32, bitcast=True),
        quads.to(tl.uint32), zero,
    )  # fmt: skip
    # join(join(0, 2), join(1, 3)) read row by row is 0 1 2 3.
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(pairs, [quads.shape[0], 4])


@triton.jit
def words_at(key_lo, key_hi, position, choice, ids):
    """The word of each single vocabulary id in `ids` [N] int32: uint32 [N]."""
    zero = tl.full((), 0, tl.uint32)
    w0, w1, w2, w3 = philox(
        key_lo.to(tl.uint32, bitcast=True), key_hi.to(tl.uint32, bitcast=True),
        position.to(tl.uint32, bitcast=True), choice.to(tl.uint32, bitcast=True),
        (ids >> 2).to(tl.uint32), zero,
    )  # fmt: skip
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def exponential(words):
    """-log1p(-w), w = (n + 1/2) / 2**32: a standard exponential of each uint32 word, above 0.

    u = 1 - w is rounded; what the rounding lost is known exactly and is added to the logarithm,
    since log(u + e) = log u + e to fp32 precision where e counts at all (u near 1).
    """
    w = tl.minimum((words.to(tl.float32) + 0.5) * _WORD, _MOST)
    u = 1.0 - w
    return (w - (1.0 - u)) - tl.log(u)


@triton.jit
def gumbel(words):
    """Standard Gumbel noise of each uint32 word: -log of its exponential."""
    return -tl.log(exponential(words))
