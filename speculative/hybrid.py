"""One draft a sequence and step, of all host sources, no longer than it pays.  Sees no logits.

What the grammar dictates goes first, what the texts of the sequence and its session suggest goes
behind it.  How many tokens of each chain are verified is decided over the whole batch (length.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.proposer import Draft, Key, Turn
from speculative.forced import ForcedDrafts
from speculative.length import StepTimes, choose
from speculative.suffix import SuffixDrafts


class Offer(NamedTuple):
    """A chain before it is cut: `forced` tokens of the grammar, then the suffix source's."""

    tokens: list[int]
    survival: list[float]
    forced: int
    predicted: int  # of the suffix source's, the first ones out of the caller's prediction


class Hybrid:
    """Forced and suffix drafts, spliced."""

    source = "hybrid"

    def __init__(self, row: float, sources: Sequence[str] = ("forced", "suffix")) -> None:
        """`row`: what a row more costs before it is measured, as a share of a step with one."""
        self.sources = tuple(sources)
        self._times = StepTimes(row)
        self._forced = ForcedDrafts() if "forced" in sources else None
        self._suffix = SuffixDrafts() if "suffix" in sources else None
        self._made: dict[Key, int] = {}  # forced tokens of each newest draft

    def propose(self, turns: Sequence[Turn]) -> list[Draft]:
        """The best chain of each, cut where a further row costs more than it brings."""
        offers = [self._offer(turn) for turn in turns]
        if not any(offer.tokens for offer in offers):
            return [Draft([])] * len(turns)
        lengths = choose(self._times, [offer.survival for offer in offers])
        return [
            self._cut(turn.key, offer, length)
            for turn, offer, length in zip(turns, offers, lengths, strict=True)
        ]

    def observe(self, key: Key, verified: int, matched: int) -> None:
        """Let each source learn from its part."""
        forced = self._made.get(key, 0)
        if self._forced is not None and forced:
            self._forced.observe(min(verified, forced), min(matched, forced))
        if self._suffix is not None and verified > forced <= matched:
            self._suffix.observe(key, verified - forced, matched - forced)

    def timed(self, rows: int, seconds: float) -> None:
        """Learn what a step costs."""
        self._times.observe(rows, seconds)

    def forget(self, key: Key) -> None:
        """The sequence ended."""
        self._made.pop(key, None)
        if self._suffix is not None:
            self._suffix.forget(key)

    def ended(self, session: bytes) -> None:
        """A session is over."""
        if self._suffix is not None:
            self._suffix.ended(session)

    def _offer(self, turn: Turn) -> Offer:
        tokens: list[int] = []
        survival: list[float] = []
        if self._forced is not None and turn.mode in ("auto", "forced"):
            tokens, survival = self._forced.guess(turn, turn.limit)
        forced, room = len(tokens), turn.limit - len(tokens)
        if self._suffix is None or not room or turn.mode not in ("auto", "suffix"):
            return Offer(tokens, survival, forced, 0)
        guess = self._suffix.guess(turn, tokens, room)
        reached = survival[-1] if survival else 1.0
        survival = survival + [reached * chance for chance in guess.survival]
        return Offer([*tokens, *guess.tokens], survival, forced, guess.predicted)

    def _cut(self, key: Key, offer: Offer, length: int) -> Draft:
        forced = min(offer.forced, length)
        predicted = min(offer.predicted, length - forced)
        self._made[key] = forced
        sources = ("forced",) * forced + ("prediction",) * predicted
        return Draft(offer.tokens[:length], sources + ("suffix",) * (length - len(sources)))


def suffix(row: float) -> Hybrid:
    """Only what the texts suggest."""
    return Hybrid(row, ("suffix",))


def forced(row: float) -> Hybrid:
    """Only what grammars dictate."""
    return Hybrid(row, ("forced",))
