"""From where on a device draft knows a sequence: steps that it slept through left gaps in its KV.

By block, on the host: its rows lie in the target's own blocks, so that what was cached in a gap is
known for one as well.  A draft that sleeps on costs nothing a step: what its sequences will write
to is noted when it falls asleep, or is handed out.  Touches no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.cuda.layout import Ints

if TYPE_CHECKING:
    from engine.plan import Plan, Row

BUSY = 16  # sequences beside which a sleeping draft reads no prompt: it would hardly wake for it


def reads(plan: Plan) -> bool:
    """Whether a draft makes rows of the prompts in a plan that it sleeps through otherwise."""
    return plan.reading and plan.drawing <= BUSY


class Known:
    """The newest gap of each block; row i of a sequence lies in slot i + 1 (proposer.Features)."""

    def __init__(self, blocks: int, size: int) -> None:
        """`size` is tokens a block."""
        self._size = size
        self._from: Ints = np.zeros(blocks, dtype=np.int32)  # slots from here on hold rows; 0 = all
        self._gaps = False  # there ever was one
        self._asleep = False  # nothing is noted but blocks that are handed out
        self._handed: list[int] = []  # those, while they are not in `_from` yet

    def follow(self, plan: Plan) -> None:
        """A plan is about to be launched.

        A sequence that wakes without a row in it is known from its next block on.  One that falls
        asleep without (it was paused) is taken for known: what is guessed for it is wrong more
        often, until its next block.
        """
        asleep = plan.asleep and not reads(plan)
        if not (self._gaps or asleep):
            return
        if plan.copies and not asleep:
            self._settle()
        for source, target in plan.copies:  # first: a source may be handed out in the same plan
            self._from[target] = self._size + 1 if asleep else self._from[source]
        if asleep != self._asleep:
            self._settle()
            self._asleep, self._gaps = asleep, True
            for row in plan.rows:
                (self._sleep if asleep else self._wake)(row)
        if not plan.fresh:
            return
        if not asleep:
            self._from[plan.fresh] = 0
            return
        self._handed += plan.fresh
        if len(self._handed) > len(self._from):
            self._settle()

    def _settle(self) -> None:
        """Note that nothing is known of the blocks that were handed out in this sleep."""
        self._from[self._handed] = self._size + 1
        self._handed.clear()

    def _sleep(self, row: Row) -> None:
        """Whatever is written from now on is a gap."""
        for block in row.seq.blocks[row.start // self._size :]:
            self._from[block.id] = self._size + 1

    def _wake(self, row: Row) -> None:
        """Of one that decodes, what was written until now is a gap and what will be is not."""
        if not row.last or row.count > 1 + len(row.draft) or not row.start:
            return  # its blocks were handed out for it, or it found them and knows them
        place, inner = divmod(row.start - 1, self._size)
        blocks = [block.id for block in row.seq.blocks[place:]]
        self._from[blocks] = 0
        self._from[blocks[:1]] = inner + 2  # the row of a slot would lie in the next one

    def slept(self, slots: Ints) -> None:
        """No rows were made of the tokens in these page slots; of a block the last comes last."""
        self._gaps = True
        block, inner = np.divmod(slots, self._size)
        self._from[block] = inner + 2

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
