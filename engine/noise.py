"""Counter-based Gumbel noise: Philox4x32-10 on torch tensors.  Keeps no state, draws no token.

The integers are the contract: any kernel on any device must give the same 32 bits for the same row
and vocabulary id, so that a continued, re-batched or drafted sequence meets the noise it would have
met alone.

    key     = (seed & 0xFFFFFFFF, seed >> 32)            the request's 64-bit seed
    counter = (position, choice, vocabulary id // 4, 0)  each taken modulo 2**32
    n       = output word number (vocabulary id % 4)     0 <= n < 2**32
    w       = (n + 1/2) / 2**32,  u = 1 - w              both inside (0, 1)
    noise   = -log(-log u) = -log(-log1p(-w))

In fp64 all 32 bits of n count.  In fp32 n, then n + 1/2, is rounded to 24 bits, and because that
happens to w and not to u the tail that wins arg-maxes stays whole: noise reaches 22.9 (w = 2**-33),
where rounding u would stop at 16.6.  At the other end w is held at 1 - 2**-24: no noise lies below
-2.82, a tail of mass 2**-24 that no arg-max ever sees.  Floats may differ between devices in the
last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
# Philox4x32 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
M0, M1 = 0xD2511F53, 0xCD9E8D57  # the multipliers
W0, W1 = 0x9E3779B9, 0xBB67AE85  # what each round adds to the key
ROUNDS = 10
CHUNK = 1 << 18  # counters worked on at a time on a CPU: enough for two threads, 2 MiB a buffer


def philox(
    key_lo: Tensor, key_hi: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of every counter under its key: four words in [0, 2**32) as int64.

    All six are int64 tensors of words in [0, 2**32) that broadcast together; the outputs have the
    common shape.  Products wrap modulo 2**64, which keeps all the bits that are looked at.  Words
    stay the size of what they depend on for as long as possible: with one varying counter word, two
    of the ten rounds cost next to nothing.
    """
    x0, x1, x2, x3 = c0, c1, c2, c3
    for number in range(ROUNDS):
        key0 = (key_lo + number * W0) & WORD
        key1 = (key_hi + number * W1) & WORD
        low, high = x0 * M0, x2 * M1
        # x1 and x3 keep the upper halves of their products: the masks take those away in the end.
        x0, x1 = _mix(high, x1, key0), high
        x2, x3 = _mix(low, x3, key1), low
    return x0, x1 & WORD, x2, x3 & WORD


def _mix(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """The upper half of `product`, xor `word`, xor `key`: one new counter word."""
    mixed = product >> 32
    for other in (word, key):
        # In place where the shape allows: fresh memory costs more than the arithmetic.
        mixed = mixed.bitwise_xor_(other) if _fits(other, mixed) else mixed ^ other
    return mixed.bitwise_and_(WORD)


def _fits(other: Tensor, into: Tensor) -> bool:
    """Whether broadcasting `other` against `into` leaves the shape of `into`."""
    pairs = zip(reversed(other.shape), reversed(into.shape), strict=False)
    return other.dim() <= into.dim() and all(theirs in (1, ours) for theirs, ours in pairs)


def gumbel(
    seeds: Tensor, choices: Tensor, positions: Tensor, vocab: int, dtype: torch.dtype
) -> Tensor:
    """Standard Gumbel noise [R, vocab] in fp32 or fp64; a row depends on its three numbers alone.

    `seeds` [R] int64 holds the 64 bits of each request's seed, `choices` [R] the index among its n
    choices, `positions` [R] the absolute position of the token to draw.
    """
    assert dtype in (torch.float32, torch.float64), f"noise in {dtype}; expected float32 or float64"
    device, quads = seeds.device, -(-vocab // 4)
    noise = torch.empty(len(seeds), quads * 4, dtype=dtype, device=device)
    ids = torch.arange(quads, device=device)
    rows = max(1, CHUNK // max(quads, 1)) if device.type == "cpu" else max(len(seeds), 1)
    for start in range(0, len(seeds), rows):
        part = slice(start, start + rows)
        seed, choice, position = (t[part, None].long() for t in (seeds, choices, positions))
        words = philox(
            seed & WORD, (seed >> 32) & WORD, position & WORD, choice & WORD, ids, ids.new_zeros(())
        )
        lanes = noise[part].view(-1, quads, 4)
        for lane, word in enumerate(words):
            lanes[:, :, lane] = word
        _to_gumbel(noise[part])
    return noise[:, :vocab]


def gumbel_at(
    seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """The noise of single vocabulary ids, [R, K] for `ids` [R, K] int64; see `gumbel`."""
    seed, choice, position = (t[:, None].long() for t in (seeds, choices, positions))
    words = philox(
        seed & WORD, (seed >> 32) & WORD, position & WORD, choice & WORD, ids >> 2,
        ids.new_zeros(()),
    )  # fmt: skip
    noise = torch.stack(words, -1).gather(-1, (ids & 3)[..., None])[..., 0].to(dtype)
    _to_gumbel(noise)
    return noise


def _to_gumbel(words: Tensor) -> None:
    """Replace integers below 2**32 by their noise, in place."""
    words.add_(0.5).mul_(2.0**-32)
    if words.dtype == torch.float32:
        words.clamp_(max=1 - 2.0**-24)
    words.neg_().log1p_().neg_().log_().neg_()
