"""The rows of a step that compute one token and draw one: most that a server runs.  Sends none.

They are the first of a plan.  All integers of theirs follow from slot and position, so numpy makes
them without a loop; and what a step of nothing else had in the same host buffer is left as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.cuda.layout import Ints

if TYPE_CHECKING:
    from engine.cuda.slots import Place, Slots
    from engine.plan import Row


class Plain(msgspec.Struct, frozen=True, gc=False):
    """What forward and settle want to know of such rows, S of them."""

    whole: bool  # the plan has no others
    slots: Ints  # [S] of the sequences
    starts: Ints  # [S] position of the token that is computed
    kv: Ints  # [S] page slot that its K and V go to
    least: Ints  # [S] position before which stop ids are held back
    tokens: Ints | None  # [S] ids, -1 where the device alone knows it; None = it does for all

    @property
    def count(self) -> int:
        """S."""
        return len(self.slots)


_EMPTY: Ints = np.zeros(0, dtype=np.int32)
NONE = Plain(False, _EMPTY, _EMPTY, _EMPTY, _EMPTY, None)  # a plan that begins with another row


def plain(rows: list[Row], places: list[Place], tables: Slots, size: int) -> Plain:
    """The first rows of a plan, up to a chunk or a verification; `size` is tokens a block."""
    count = 0
    for row in rows:
        if row.count != 1 or not row.last:
            break
        count += 1
    if not count:
        return NONE
    whole = count == len(rows)
    if not whole:
        rows, places = rows[:count], places[:count]
    slots = np.array([place.slot for place in places], dtype=np.int32)
    starts = np.array([row.start for row in rows], dtype=np.int32)
    kv = tables.ids[slots, starts // size] * size + starts % size
    tokens = None
    if not all([row.pending for row in rows]):  # a list: quicker than a generator of few
        known = [-1 if row.pending else row.seq.tokens[row.start] for row in rows]
        tokens = np.array(known, dtype=np.int32)
    return Plain(whole, slots, starts, kv, tables.least[slots], tokens)


class Written:
    """What each host buffer holds of the last plain step in it: its bucket, rows and so on."""

    def __init__(self, buffers: int) -> None:
        self._keys: list[object] = [None] * buffers

    def forget(self, number: int) -> None:
        """Something else was, or will be, written there."""
        self._keys[number] = None

    def holds(self, number: int, key: object) -> bool:
        """Whether the buffer holds all that `key` stands for."""
        return self._keys[number] == key

    def note(self, number: int, key: object) -> None:
        """It does now."""
        self._keys[number] = key
