"""From where on a device draft knows a sequence: steps that it slept through left gaps in its KV.

By block, on the host: its rows lie in the target's own blocks, so that what was cached in a gap is
known for one as well.  Touches no device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.cuda.layout import Ints

MANY = 256  # steps' worth that is put off


class Known:
    """The newest gap of each block; row i of a sequence lies in slot i + 1 (proposer.Features)."""

    def __init__(self, blocks: int, size: int) -> None:
        """`size` is tokens a block."""
        self._size = size
        self._from: Ints = np.zeros(blocks, dtype=np.int32)  # slots from here on hold rows; 0 = all
        self._gaps = False  # there ever was one
        # What is not in `_from` yet, in order: slots that were slept through, and lists of blocks
        # that were handed out anew.  Whoever sleeps for long pays for looking at it once.
        self._later: list[Ints | Sequence[int]] = []

    def follow(self, fresh: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Some blocks were copied (from, to), in order; then these were handed out anew.

        While something is put off, a copy is a gap to its end: its source may have one.
        """
        if not self._gaps:
            return
        for source, target in copies:  # first: a source may be handed out in the same plan
            if self._later:
                last = (target + 1) * self._size - 2
                self._put_off(np.array([last], dtype=np.int32))
            else:
                self._from[target] = self._from[source]
        if fresh and self._later:
            self._put_off(fresh)
        elif fresh:
            self._from[fresh] = 0

    def slept(self, slots: Ints) -> None:
        """No rows were made of the tokens in these page slots; of a block the last comes last."""
        self._gaps = True
        self._put_off(slots.copy())

    def _put_off(self, what: Ints | Sequence[int]) -> None:
        self._later.append(what)
        if len(self._later) >= MANY:
            self._settle()

    def _settle(self) -> None:
        if not self._later:
            return
        # A block that was handed out is a slot below 0.
        slots = np.concatenate([one if isinstance(one, np.ndarray)
                                else (-1 - np.array(one, dtype=np.int32)) * self._size
                                for one in self._later])[::-1]
        self._later.clear()
        block, inner = np.divmod(np.abs(slots), self._size)
        block -= slots < 0
        block, newest = np.unique(block, return_index=True)
        # The row of a slot would lie in the next one.
        self._from[block] = np.where(slots[newest] < 0, 0, inner[newest] + 2)

    def begins(self, ids: Ints, starts: Ints) -> Ints:
        """The first slot, at least 1, from which on there is no gap up to the newest token.

        `ids` int32 [G, blocks] of each sequence, `starts` [G] positions in its newest block.
        """
        if not self._gaps:
            return np.ones(len(starts), dtype=np.int32)
        self._settle()
        many = starts // self._size + 1
        ids = ids[:, : int(many.max())]
        gaps = self._from[ids]
        places = np.arange(ids.shape[1], dtype=np.int32)
        ends = np.where((gaps > 0) & (places < many[:, None]), places * self._size + gaps, 1)
        # What was slept through may have been guesses that did not stand.
        found: Ints = np.minimum(ends.max(axis=1), starts + 1)
        return found
