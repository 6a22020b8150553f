"""From where on a device draft knows a sequence: steps that it slept through left gaps in its KV.

By block, on the host: its rows lie in the target's own blocks, so that what was cached in a gap is
known for one as well.  Touches no device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.cuda.layout import Ints


class Known:
    """The newest gap of each block; row i of a sequence lies in slot i + 1 (proposer.Features)."""

    def __init__(self, blocks: int, size: int) -> None:
        """`size` is tokens a block."""
        self._size = size
        self._from: Ints = np.zeros(blocks, dtype=np.int32)  # slots from here on hold rows; 0 = all
        self._gaps = False  # there ever was one

    def follow(self, fresh: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Some blocks were copied (from, to), in order; then these were handed out anew."""
        for source, target in copies:  # first: a source may be handed out in the same plan
            self._from[target] = self._from[source]
        if self._gaps and fresh:
            self._from[fresh] = 0

    def slept(self, slots: Ints) -> None:
        """No rows were made of the tokens in these page slots; of a block the last comes last."""
        block, inner = np.divmod(slots, self._size)
        self._from[block] = inner + 2  # its row would lie in the next slot
        self._gaps = True

    def begins(self, ids: Ints, starts: Ints) -> Ints:
        """The first slot, at least 1, from which on there is no gap up to the newest token.

        `ids` int32 [G, blocks] of each sequence, `starts` [G] positions in its newest block.
        """
        if not self._gaps:
            return np.ones(len(starts), dtype=np.int32)
        many = starts // self._size + 1
        ids = ids[:, : int(many.max())]
        gaps = self._from[ids]
        places = np.arange(ids.shape[1], dtype=np.int32)
        ends = np.where((gaps > 0) & (places < many[:, None]), places * self._size + gaps, 1)
        # What was slept through may have been guesses that did not stand.
        found: Ints = np.minimum(ends.max(axis=1), starts + 1)
        return found
