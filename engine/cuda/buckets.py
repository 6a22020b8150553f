"""Sizes that steps are rounded up to: a captured graph has one size.  Pads nothing itself."""

from __future__ import annotations

from bisect import bisect_left


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
