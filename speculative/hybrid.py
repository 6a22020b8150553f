"""One draft a sequence and step, of all host sources, no longer than it pays.  Sees no logits.

What the grammar dictates goes first; behind it goes what the texts of the sequence and its session
suggest, or what the device guessed, whichever is likelier to last.  How many tokens of each chain
are verified is decided over the whole batch (length.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.proposer import Draft, Key, Load, Ran, Turn
from speculative.ahead import Ahead
from speculative.calibration import Calibration
from speculative.forced import ForcedDrafts
from speculative.gate import Gate
from speculative.length import PROMPT, choose
from speculative.suffix import SuffixDrafts

DEVICE_SOURCE = "eagle3"
DEVICE = [0.6, 0.55, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]  # chances by place, before any was seen


LIKELY = 0.4  # of a token behind a prompt and what is forced there: it costs a row
BARE = 0.5  # tokens: a guess of a host's that is worth less leaves the sequence to the device's
RECENT = 32  # guesses that tell what the next are worth, of many sequences; of few, one of each
# What a prompt token counts as beside drafts where a GPU computes: it is cheap there, and who waits
# for it is served the sooner, the sooner the others end.
CHEAP = 0.25


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

    def __init__(
        self, row: float, sources: Sequence[str] = ("forced", "suffix"), piped: bool = False
    ) -> None:
        """`row`: what a row more costs before it is measured, as a share of a step with one.

        `piped`: the device may run a step ahead of the host, when nothing is to be proposed.
        """
        self.sources = tuple(sources)
        # Of steps in which most have no grammar, and of those in which most have one: where a step
        # is timed from result to result, masks are most of its time.
        one = Ahead(row, piped)
        self._ahead = one, Ahead(row, piped) if piped else one
        self._worth = [0.0, 0.0]  # tokens that a guess of the host's was right for, in the mean
        self._bare = [0.0, 0.0]  # of how many it was worth next to nothing, as a share
        self._masked = False  # the step that is coming
        self._count = 1  # sequences of it that decode
        self._prompt = CHEAP if piped else PROMPT
        self._forced = ForcedDrafts() if "forced" in sources else None
        self._suffix = SuffixDrafts() if "suffix" in sources else None
        self._gate = Gate()
        self._device = Calibration(DEVICE)  # a cell a place in the device's chain
        # The host's own, made while a device still drafts; by who, and how long the text was.
        self._ready: dict[tuple[Key, int], Offer] = {}

    def propose(self, turns: Sequence[Turn], beside: int = 0) -> list[Draft]:
        """The best chain of each, cut where a further row costs more than it brings."""
        ready, self._ready = self._ready, {}
        own = [ready.get((turn.key, len(turn.tokens))) or self._own(turn) for turn in turns]
        self._learn_worth([sum(offer.survival) for offer in own], self._masked)
        offers = [self._offer(turn, offer) for turn, offer in zip(turns, own, strict=True)]
        if not any(offer.tokens for offer in offers):
            return [Draft([])] * len(turns)
        lengths = choose(
            self._ahead[self._masked].alone, [offer.survival for offer in offers], beside,
            self._prompt)
        return [
            _cut(offer, length) for offer, length in zip(offers, lengths, strict=True)
        ]

    def begin(self, turn: Turn, waits: bool) -> Draft:
        """See HostDrafts: what the grammar dictates, and what texts make likely behind it."""
        forced = self._forced is not None and turn.mode in ("auto", "forced") and turn.forced()
        if not forced:
            return Draft([])
        offer = self._own(turn if waits else replace(turn, mode="forced"))
        if not (length := offer.forced):
            return Draft([])
        least = LIKELY * offer.survival[length - 1]  # what is forced is taken as right
        while length < len(offer.tokens) and offer.survival[length] >= least:
            length += 1
        return _cut(offer, length)

    def prepare(self, turns: Sequence[Turn]) -> None:
        """See HostDrafts."""
        self._ready = {(turn.key, len(turn.tokens)): self._own(turn) for turn in turns}

    def look(self, turn: Turn, masked: bool) -> float:
        """See HostDrafts."""
        worth = sum(self._own(turn).survival)
        self._learn_worth([worth], masked)
        return worth

    def _learn_worth(self, worths: Sequence[float], masked: bool) -> None:
        """A guess of each of these sequences was worth so much."""
        count, of = len(worths), max(self._count, 1)
        part = min(count / (of if of == 1 else RECENT), 1.0)
        self._worth[masked] += part * (sum(worths) / count - self._worth[masked])
        bare = sum(worth < BARE for worth in worths) / count
        self._bare[masked] += part * (bare - self._bare[masked])

    def observe(self, key: Key, sources: Sequence[str], verified: int, matched: int) -> None:
        """Let each source learn from its part."""
        forced = sources.count("forced")  # they come first
        if self._forced is not None and forced:
            self._forced.observe(min(verified, forced), min(matched, forced))
        if not verified > forced <= matched:
            return
        if DEVICE_SOURCE in sources:
            for place in range(forced, verified):
                self._device.learn(min(place, len(DEVICE) - 1), place < matched)
        elif self._suffix is not None:
            self._suffix.observe(key, verified - forced, matched - forced)

    def timed(self, ran: Ran) -> None:
        """Learn what a step costs."""
        self._ahead[ran.masked].observe(ran)

    def ahead(self, load: Load, most: int) -> int:
        """See HostDrafts: what pays, by what guesses were worth so far and steps took."""
        self._ahead[self._masked].rested(load.steps - 1)  # at its answer
        self._count, self._masked = load.rows, load.masked
        return self._ahead[load.masked].choose(
            self._device.chances, self._worth[load.masked], load, most,
            self._bare[True] if load.masked else 0.0)

    @property
    def holds(self) -> int:
        """See HostDrafts."""
        return self._ahead[self._masked].holds

    def forget(self, key: Key) -> None:
        """The sequence ended."""
        if self._suffix is not None:
            self._suffix.forget(key)

    def ended(self, session: bytes) -> None:
        """A session is over."""
        if self._suffix is not None:
            self._suffix.ended(session)

    def _own(self, turn: Turn) -> Offer:
        """The host's own chain: forced, then what texts suggest, as far as it is legal."""
        tokens: list[int] = []
        survival: list[float] = []
        if self._forced is not None and turn.mode in ("auto", "forced"):
            tokens, survival = self._forced.guess(turn, turn.limit)
        offer = Offer(tokens, survival, len(tokens))
        if self._suffix is None or turn.mode not in ("auto", "suffix"):
            return offer
        if len(tokens) == turn.limit:
            return offer
        if not tokens or turn.legal is None or turn.predicted:
            return self._spliced(self._suffix, turn, offer)[0]
        behind = turn.namespace, tokens[-2] if len(tokens) > 1 else -1, tokens[-1]
        if not self._gate.opens(behind):
            return offer
        longer, suggested = self._spliced(self._suffix, turn, offer)
        if suggested:
            self._gate.learn(behind, len(longer.tokens) > len(tokens))
        return longer

    def _spliced(self, suffix: SuffixDrafts, turn: Turn, offer: Offer) -> tuple[Offer, bool]:
        """The offer and behind it what texts suggest, as far as it is legal; whether they do."""
        tokens, survival, forced = offer.tokens, offer.survival, offer.forced
        reached = survival[-1] if survival else 1.0
        guess = suffix.guess(turn, tokens, turn.limit - forced)
        longer = survival + [reached * chance for chance in guess.survival]
        whole = Offer([*tokens, *guess.tokens], longer, forced, guess.predicted)
        return _legal(turn, whole), bool(guess.tokens)

    def _offer(self, turn: Turn, own: Offer) -> Offer:
        """That, or the device's chain behind what is forced: whichever is likelier to last."""
        forced = own.forced
        rest = turn.guessed[forced : turn.limit]
        # Else it goes on behind another text.
        if not rest or list(turn.guessed[:forced]) != own.tokens[:forced]:
            return own
        longer = own.survival[:forced]
        alive = longer[-1] if longer else 1.0
        for place in range(forced, forced + len(rest)):
            alive *= self._device.chances[min(place, len(DEVICE) - 1)]
            longer.append(alive)
        if sum(longer) <= sum(own.survival):
            return own
        return _legal(turn, Offer([*own.tokens[:forced], *rest], longer, forced, 0, len(rest)))


def _legal(turn: Turn, offer: Offer) -> Offer:
    """As much of it as the grammar takes; what it would refuse is worth no row."""
    if turn.legal is None or not offer.tokens:
        return offer
    count = turn.legal(offer.tokens)
    if count == len(offer.tokens):
        return offer
    return offer._replace(tokens=offer.tokens[:count], survival=offer.survival[:count],
                          forced=min(offer.forced, count))


def _cut(offer: Offer, length: int) -> Draft:
    forced = min(offer.forced, length)
    predicted = min(offer.predicted, length - forced)
    device = min(offer.device, length - forced)
    sources = ("forced",) * forced + ("prediction",) * predicted + (DEVICE_SOURCE,) * device
    return Draft(offer.tokens[:length], sources + ("suffix",) * (length - len(sources)))


def suffix(row: float, piped: bool) -> Hybrid:
    """Only what the texts suggest."""
    return Hybrid(row, ("suffix",), piped)


def forced(row: float, piped: bool) -> Hybrid:
    """Only what grammars dictate."""
    return Hybrid(row, ("forced",), piped)


def device(row: float, piped: bool) -> Hybrid:
    """Only what the device guesses."""
    return Hybrid(row, (), piped)


def hybrid(row: float, piped: bool) -> Hybrid:
    """All of them."""
    return Hybrid(row, piped=piped)
