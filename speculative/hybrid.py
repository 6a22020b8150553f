"""One draft a sequence and step, of all host sources, no longer than it pays.  Sees no logits.

What the grammar dictates goes first; behind it goes what the texts of the sequence and its session
suggest, or what the device guessed, whichever is likelier to last.  How many tokens of each chain
are verified is decided over the whole batch (length.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.proposer import Draft, Key, Turn
from speculative.ahead import Ahead
from speculative.calibration import Calibration
from speculative.forced import ForcedDrafts
from speculative.length import StepTimes, choose
from speculative.suffix import SuffixDrafts

DEVICE_SOURCE = "eagle3"
DEVICE = [0.6, 0.55, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]  # chances by place, before any was seen


class Offer(NamedTuple):
    """A chain before it is cut, by source: the grammar's tokens, then either of the others'."""

    tokens: list[int]
    survival: list[float]
    forced: int
    predicted: int = 0  # behind those: out of the caller's prediction
    device: int = 0  # or: the device's


class Hybrid:
    """Forced and suffix drafts, spliced."""

    source = "hybrid"

    def __init__(self, row: float, sources: Sequence[str] = ("forced", "suffix")) -> None:
        """`row`: what a row more costs before it is measured, as a share of a step with one."""
        self.sources = tuple(sources)
        self._times = StepTimes(row)
        self._ahead = Ahead(self._times)
        self._forced = ForcedDrafts() if "forced" in sources else None
        self._suffix = SuffixDrafts() if "suffix" in sources else None
        self._device = Calibration(DEVICE)  # a cell a place in the device's chain
        self._made: dict[Key, tuple[int, int]] = {}  # of each newest draft: forced, device's

    def propose(self, turns: Sequence[Turn], beside: int = 0) -> list[Draft]:
        """The best chain of each, cut where a further row costs more than it brings."""
        offers = [self._offer(turn) for turn in turns]
        if not any(offer.tokens for offer in offers):
            return [Draft([])] * len(turns)
        lengths = choose(self._times, [offer.survival for offer in offers], beside)
        return [
            self._cut(turn.key, offer, length)
            for turn, offer, length in zip(turns, offers, lengths, strict=True)
        ]

    def observe(self, key: Key, verified: int, matched: int) -> None:
        """Let each source learn from its part."""
        forced, device = self._made.get(key, (0, 0))
        if self._forced is not None and forced:
            self._forced.observe(min(verified, forced), min(matched, forced))
        if not verified > forced <= matched:
            return
        if device:
            for place in range(forced, verified):
                self._device.learn(min(place, len(DEVICE) - 1), place < matched)
        elif self._suffix is not None:
            self._suffix.observe(key, verified - forced, matched - forced)

    def timed(self, rows: int, seconds: float, guesses: int = 0) -> None:
        """Learn what a step costs."""
        self._ahead.observe(rows, seconds, guesses)

    def ahead(self, count: int, beside: int, most: int) -> int:
        """See HostDrafts: as many as pay, by what chains of the device were worth so far."""
        return self._ahead.choose(list(self._device.chances), count, beside, most)

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
        reached = survival[-1] if survival else 1.0
        best = Offer(tokens, survival, forced)
        if self._suffix is not None and room and turn.mode in ("auto", "suffix"):
            guess = self._suffix.guess(turn, tokens, room)
            longer = survival + [reached * chance for chance in guess.survival]
            best = Offer([*tokens, *guess.tokens], longer, forced, guess.predicted)
        rest = turn.guessed[forced : turn.limit]
        if rest and list(turn.guessed[:forced]) == tokens:  # else it goes on behind another text
            alive, longer = reached, list(survival)
            for place in range(forced, forced + len(rest)):
                alive *= self._device.chances[min(place, len(DEVICE) - 1)]
                longer.append(alive)
            if sum(longer) > sum(best.survival):
                best = Offer([*tokens, *rest], longer, forced, 0, len(rest))
        return best

    def _cut(self, key: Key, offer: Offer, length: int) -> Draft:
        forced = min(offer.forced, length)
        predicted = min(offer.predicted, length - forced)
        device = min(offer.device, length - forced)
        self._made[key] = forced, device
        sources = ("forced",) * forced + ("prediction",) * predicted + (DEVICE_SOURCE,) * device
        return Draft(offer.tokens[:length], sources + ("suffix",) * (length - len(sources)))


def suffix(row: float) -> Hybrid:
    """Only what the texts suggest."""
    return Hybrid(row, ("suffix",))


def forced(row: float) -> Hybrid:
    """Only what grammars dictate."""
    return Hybrid(row, ("forced",))


def device(row: float) -> Hybrid:
    """Only what the device guesses."""
    return Hybrid(row, ())
