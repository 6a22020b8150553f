"""Which buckets a start captures, and which can wait for an idle moment.  Captures none itself.

A bucket costs a start ten to thirty milliseconds and there are about 150, of which a first minute
needs few.  What is met before its idle moment came is captured at its first use, with the same
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from engine.cuda.buckets import bucket
from engine.cuda.ops import chunks_possible
from engine.kernels.sampler import Needs

PLAIN = Needs()
FILTERED = Needs(filters=True)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward pass of so many flat tokens."""

    size: int
    chunks: bool  # some row is longer than a short one


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draw of so many rows."""

    size: int
    needs: Needs
    masked: bool


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a device drafts for so many sequences."""

    size: int


Bucket = Forwarded | Drawn | Drafted


def ordered(
    forwards: Sequence[int], draws: Sequence[int], chains: Sequence[int] = ()
) -> tuple[list[Bucket], list[Bucket]]:
    """What to capture at the start, and what later, each the most wanted first.

    `forwards`, `draws` and `chains` are the sizes in use, ascending.  First come steps without
    chunks or masks, prompts, and chains, at the sizes that hold a power of two: one to all clients
    decoding, prompts short and long.
    """
    steps: list[Bucket] = [Forwarded(size, False) for size in forwards]
    prompts: list[Bucket] = [Forwarded(size, True) for size in forwards if chunks_possible(size)]
    plain: list[Bucket] = [Drawn(size, needs, False) for size in draws
                           for needs in (PLAIN, FILTERED)]  # fmt: skip
    masked: list[Bucket] = [Drawn(size, needs, True) for size in draws
                            for needs in (PLAIN, FILTERED)]  # fmt: skip
    drafted: list[Bucket] = [Drafted(size) for size in chains]
    most = {Forwarded: _powers(forwards), Drawn: _powers(draws), Drafted: _powers(chains)}
    found = [*steps, *prompts, *plain, *drafted]
    first = [one for one in found if one.size in most[type(one)]]
    rest = [one for one in found if one.size not in most[type(one)]]
    # The others by size: small steps are met long before large ones.
    return first, sorted([*masked, *rest], key=lambda one: one.size)


def every(
    forwards: Sequence[int], draws: Sequence[int], chains: Sequence[int] = ()
) -> list[Bucket]:
    """All buckets, and draws with whatever else a request may ask for: what kernels there are.

    Draws with bias, penalties or logprobs are captured at their first use only.
    """
    first, later = ordered(forwards, draws, chains)
    return [*first, *later, *rare(draws)]


def rare(draws: Sequence[int]) -> list[Bucket]:
    """Draws that few requests want, at one size: their kernels are those of every size."""
    return [
        Drawn(draws[0], Needs(shaped, filters, logprobs), masked)
        for shaped, filters, logprobs, masked in product((False, True), repeat=4)
        if shaped or logprobs
    ]


def _powers(sizes: Sequence[int]) -> set[int]:
    """The sizes that powers of two are rounded up to."""
    powers = range(sizes[-1].bit_length()) if sizes else ()
    return {bucket(list(sizes), 1 << power) for power in powers}
