"""What one step computes: a Plan of Rows.  Decides nothing; see scheduler.py for that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engine.sequence import Sequence


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step, fixed when it is planned: the sequence itself moves on."""

    seq: Sequence
    start: int  # position of the first token computed
    count: int
    last: bool  # the row reaches the newest token: it gives at least one new token
    pending: bool = False  # that newest token is its first one, and still on the device alone
    draft: tuple[int, ...] = ()  # guesses, at the end; only when the row is `last`
    replaced: int = 0  # `replaced` of the sequence when this was planned

    @property
    def vain(self) -> bool:
        """It was computed behind a token that the sequence has not: nothing of it counts."""
        return self.replaced != self.seq.replaced

    @property
    def drafts(self) -> int:
        """How many guesses."""
        return len(self.draft)

    @property
    def position(self) -> int:
        """Where the first token that a `last` row draws will stand."""
        return self.start + self.count - len(self.draft)


@dataclass(slots=True)
class Plan:
    """What one step computes; nothing of it changes once it was launched."""

    rows: list[Row]
    fresh: list[int]  # ids of blocks that were handed out for it: their pages hold nothing of value
    copies: list[tuple[int, int]]  # (from, to) block ids to copy first, in order: forks
    guesses: int = 0  # tokens that a device draft may make behind each row
    asleep: bool = False  # the device draft leaves the step out: it makes no row of its own
    # What several want to know of the rows, so counted once.
    tokens: int = field(init=False)  # flat
    drawing: int = field(init=False)  # rows that are `last`
    drafts: int = field(init=False)  # guesses of all
    masked: list[Row] = field(init=False)  # those of them with a grammar
    reading: bool = field(init=False)  # some row computes more than a newest token and a draft

    def __post_init__(self) -> None:
        tokens = drawing = drafts = 0
        masked: list[Row] = []
        for row in self.rows:
            tokens += row.count
            drafts += len(row.draft)
            if row.last:
                drawing += 1
                if row.seq.grammar is not None:
                    masked.append(row)
        self.tokens, self.drawing, self.drafts, self.masked = tokens, drawing, drafts, masked
        self.reading = tokens > len(self.rows) + drafts or drawing < len(self.rows)
