"""Cut a step's rows into work items for the attention kernels, in numpy.  Touches no device.

Two lists, because the two kernels divide the work differently:

    short rows (1 .. SHORT tokens)    tiles of `tile` tokens x splits of the context
    chunks     (more than SHORT)      tiles of `tile` tokens, each over its whole context

The kernels read positions and counts from the device, so `starts` and `counts` here may be upper
bounds: a step that is planned before the host has seen how many drafts the one before it accepted
passes the largest start that is possible, and items beyond the truth do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

SHORT = 32  # tokens of a row up to which it is short: a token and 31 drafts
LINES = 16  # query lines of a short tile: the smallest matrix product of a tensor core
FEW = 6  # rows up to which a loop of a few calls a row is quicker than numpy
LISTED = 32  # rows up to which the items in lists, by loops, are
TILES = 32  # tiles that a short row can have: one token each when a KV head has 16 query heads

Ints = NDArray[np.int32]


def short_tile(group: int) -> int:
    """Tokens a short tile holds when `group` query heads share a KV head."""
    assert 1 <= group <= LINES, f"{group} query heads a KV head; the tile has {LINES} lines"
    return LINES // group


def fill_short(starts: Ints, counts: Ints, items: Ints, *, tile: int, split: int) -> int:
    """Write the items of all short rows into `items` [2, W]; return how many.

    Item i is split items[1, i] of tile items[0, i] % TILES of row items[0, i] // TILES.  Splits cut
    the context at multiples of `split` positions; those of one tile lie side by side, from 0
    upwards, which the kernel relies on to find its neighbours' partial results.  Rows with a count
    of 0 or above SHORT get no items.  `starts` and `counts` are [S].
    """
    rows = np.flatnonzero((counts > 0) & (counts <= SHORT))
    tokens = counts[rows]
    tiles = -(-tokens // tile)
    place = np.zeros_like(tiles)
    if tiles.size and tiles.max() > 1:
        rows, tokens = np.repeat(rows, tiles), np.repeat(tokens, tiles)
        place = ramps(tiles)
    last = starts[rows] + np.minimum(tokens, (place + 1) * tile) - 1
    splits = last // split + 1
    total = int(splits.sum())
    assert total <= items.shape[1], f"{total} short items, room for {items.shape[1]}"
    items[0, :total] = np.repeat(rows * TILES + place, splits)
    items[1, :total] = ramps(splits)
    return total


def few_short(
    starts: Sequence[int], counts: Sequence[int], *, tile: int, split: int, first: int = 0
) -> tuple[list[int], list[int]]:
    """The items that `fill_short` would write, row by row: quicker for up to LISTED of them.

    `first` is the number of the first row.
    """
    tiles, splits = list[int](), list[int]()
    for row, (start, count) in enumerate(zip(starts, counts, strict=True), first):
        if 0 < count <= tile and start + count <= split:  # most: the loop's usual result
            tiles.append(row * TILES)
            splits.append(0)
        elif 0 < count <= SHORT:
            for place in range(-(-count // tile)):
                many = (start + min(count, (place + 1) * tile) - 1) // split + 1
                tiles += [row * TILES + place] * many
                splits += range(many)
    return tiles, splits


def few_chunks(
    starts: Sequence[int], counts: Sequence[int], *, tile: int, first: int = 0
) -> tuple[list[int], list[int]]:
    """The items that `fill_chunks` would write; `first` is the number of the first row."""
    found = [(-start - begin, row, begin)
             for row, (start, count) in enumerate(zip(starts, counts, strict=True), first)
             if count > SHORT for begin in range(0, count, tile)]
    found.sort(key=itemgetter(0))  # stable, as that is
    return [row for _, row, _ in found], [begin for _, _, begin in found]


def fill_chunks(starts: Ints, counts: Ints, items: Ints, *, tile: int) -> int:
    """Write the items of all chunks into `items` [2, C]; return how many.

    Item i is the `tile` tokens of row items[0, i] from its token items[1, i] on.  Those with the
    longest context come first, so that the short ones fill the gaps at the end.
    """
    rows = np.flatnonzero(counts > SHORT)
    if not rows.size:
        return 0
    tiles = -(-counts[rows] // tile)
    rows = np.repeat(rows, tiles)
    begins = ramps(tiles) * tile
    order = np.argsort(-(starts[rows] + begins), kind="stable")
    total = rows.size
    assert total <= items.shape[1], f"{total} chunk items, room for {items.shape[1]}"
    items[0, :total] = rows[order]
    items[1, :total] = begins[order]
    return total


def most_short_items(rows: int, tokens: int, max_len: int, *, tile: int, split: int) -> int:
    """An upper bound of short items: `rows` rows of at most `tokens` tokens, up to `max_len`."""
    return rows * -(-min(tokens, SHORT) // tile) * -(-max_len // split)


def most_chunk_items(rows: int, tokens: int, *, tile: int) -> int:
    """An upper bound of chunk items: `tokens` flat tokens in at most `rows` rows."""
    rows = min(rows, tokens // (SHORT + 1))
    # Each row's last tile may be nearly empty; the others are full.
    return 0 if rows == 0 else (tokens - rows) // tile + rows


def ramps(runs: Ints) -> Ints:
    """0 .. n - 1 for each n of `runs`, end to end."""
    ends = np.cumsum(runs, dtype=np.int32)
    places = np.arange(ends[-1] if ends.size else 0, dtype=np.int32)
    places -= np.repeat(ends - runs, runs)
    return places
