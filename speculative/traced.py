"""A proposer that notes who guessed each token of an output, for `slipstream draft`.  Guesses none.

For one request after another, in this process.  Another proposer guesses, as in a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.proposer import Draft, HostDrafts, Key, Load, Ran, Turn
from speculative import served

if TYPE_CHECKING:
    from engine.config import ResolvedConfig

TARGET = "target"
told: list[str] = []  # who each output token of the newest request came from, in order


class Traced:
    """Another proposer, watched."""

    source = "traced"

    def __init__(self, inner: HostDrafts) -> None:
        self._inner = inner
        self.sources = inner.sources

    def propose(self, turns: Sequence[Turn], beside: int = 0) -> list[Draft]:
        """What the other one proposes."""
        for turn in turns:
            output = len(turn.tokens) - turn.prompt_len
            told.extend([TARGET] * (output - len(told)))
        return self._inner.propose(turns, beside)

    def begin(self, turn: Turn, waits: bool) -> Draft:
        """What the other one begins with."""
        return self._inner.begin(turn, waits)

    def observe(self, key: Key, sources: Sequence[str], verified: int, matched: int) -> None:
        """The first `matched` tokens of the step are the draft's."""
        told.extend(sources[:matched])
        self._inner.observe(key, sources, verified, matched)

    def prepare(self, turns: Sequence[Turn]) -> None:
        """The other one does."""
        self._inner.prepare(turns)

    def look(self, turn: Turn, masked: bool) -> float:
        """What the other one sees."""
        return self._inner.look(turn, masked)

    def timed(self, ran: Ran) -> None:
        """The other one learns."""
        self._inner.timed(ran)

    def ahead(self, load: Load, most: int) -> int:
        """See HostDrafts."""
        return self._inner.ahead(load, most)

    @property
    def holds(self) -> int:
        """See HostDrafts."""
        return self._inner.holds

    def forget(self, key: Key) -> None:
        """The request is over; what was noted stays."""
        self._inner.forget(key)

    def ended(self, session: bytes) -> None:
        """The other one forgets, too."""
        self._inner.ended(session)


def make(config: ResolvedConfig, kind: str) -> Traced | None:
    """As served.make, watched."""
    inner = served.make(config, kind)
    return None if inner is None else Traced(inner)
