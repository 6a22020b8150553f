"""How many draft tokens a step verifies: as many as give the most tokens a second.  Guesses none.

A step verifies n draft tokens of all its sequences together.  It gives a token for each sequence
and, in the mean, the summed survival of the n; it takes T(n + sequences), which is measured.  The n
most likely tokens are chosen for the n with the best ratio; survival never grows along a chain, so
they are prefixes of the chains.  n = 0 is an answer like any other.  Prompt tokens that the step
computes as well count as much as output: where rows cost what they compute, no guess is worth one.

(Goodput as the aim of speculation: Liu et al., TurboSpec, arXiv 2406.14066.)
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate, chain, count

import numpy as np

MARKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
QUICK = 0.25  # how fast the whole curve follows a step: a machine has slow and quick minutes
SLOW = 0.03  # how fast one mark of it does
WILD = 2.0  # a step is not believed to differ by more than this factor
MARGIN = 0.03  # a gain below this is within the error of the curve
FEW = 12  # numbers of rows up to which a loop is quicker than numpy
MANY = 48  # tokens from which on numpy is quicker at choosing among them
PROMPT = 2.0  # what a prompt token counts as; a drafted one, with logits of its own, is as dear


class StepTimes:
    """T(rows): seconds of a step that only decodes, learned while serving.

    A scale times a curve through the marks that were met, so that a slow minute of the machine,
    which is seen at one size, is believed of all.
    """

    def __init__(self, row: float) -> None:
        """`row`: what a row more costs, as a share of a step with one; believed until measured."""
        self._row = row
        self._scale = 1.0  # of no unit until the first step
        self._met: list[int] = []  # marks, rising
        self._curve: list[float] = []  # their times, by the scale

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`."""
        if not self._met:
            self._scale = seconds / (1.0 + self._row * (rows - 1))
        mark = _nearest(rows)
        at = bisect.bisect_left(self._met, mark)
        if at == len(self._met) or self._met[at] != mark:
            self._met.insert(at, mark)
            self._curve.insert(at, seconds / self._scale)
            return
        ratio = min(max(seconds / self(rows), 1 / WILD), WILD)
        self._scale *= ratio**QUICK
        self._curve[at] *= ratio**SLOW

    def __call__(self, rows: int) -> float:
        """Seconds that a step of `rows` rows takes; more rows never take less."""
        met, curve = self._met, self._curve
        if len(met) < 2:
            first, start = (met[0], curve[0]) if met else (1, 1.0)
            return self._scale * max(start + self._row * (rows - first), start / WILD)
        above = min(max(bisect.bisect_left(met, rows), 1), len(met) - 1)
        low, high = curve[above - 1], max(curve[above - 1], curve[above])
        part = (rows - met[above - 1]) / (met[above] - met[above - 1])
        return self._scale * max(low + part * (high - low), low / WILD)

    def each(self, first: int, count: int) -> list[float]:
        """The same for so many numbers of rows, from `first` on."""
        met, curve = self._met, self._curve
        if len(met) < 2 or count < FEW:
            return [self(rows) for rows in range(first, first + count)]
        rows = np.arange(first, first + count)
        above = np.searchsorted(met, rows).clip(1, len(met) - 1)
        marks, times = np.array(met), np.array(curve)
        start, low = marks[above - 1], times[above - 1]
        rise = np.maximum(times[above] - low, 0.0)
        part = (rows - start) / (marks[above] - start)
        found: list[float] = (self._scale * np.maximum(low + part * rise, low / WILD)).tolist()
        return found


def _nearest(rows: int) -> int:
    """The mark that a step of so many rows tells most about."""
    above = bisect.bisect_left(MARKS, rows)
    if above == len(MARKS) or (above and rows - MARKS[above - 1] < MARKS[above] - rows):
        return MARKS[above - 1]
    return MARKS[above]


def choose(
    times: StepTimes, survival: Sequence[Sequence[float]], beside: int = 0, prompt: float = PROMPT
) -> list[int]:
    """How many tokens of each chain to verify, given each token's chance to be reached and right.

    One entry a sequence that decodes in the step, empty for those without a draft; `beside` prompt
    tokens are computed in it, each of which counts as much as `prompt` drawn ones.
    """
    falling = [_falling(one) for one in survival]
    base, gained = len(survival) + beside, len(survival) + prompt * beside
    least = gained / times(base) * (1 + MARGIN)
    if sum(map(len, falling)) >= MANY:
        return _choose_of_many(times, falling, base, gained, least)
    slots = sorted(
        ((chance, -place, i) for i, one in enumerate(falling)
         for place, chance in enumerate(one)), reverse=True,
    )  # fmt: skip
    best, taken = least, 0
    for n, (chance, _, _), seconds in zip(count(1), slots, times.each(base + 1, len(slots))):
        gained += chance
        rate = gained / seconds
        if rate > best:
            best, taken = rate, n
    lengths = [0] * len(survival)
    for _, _, i in slots[:taken]:
        lengths[i] += 1
    return lengths


def _choose_of_many(
    times: StepTimes, falling: Sequence[Sequence[float]], base: int, gained: float, least: float
) -> list[int]:
    """The same where numpy is quicker than loops."""
    sizes = [len(one) for one in falling]
    owner = np.repeat(np.arange(len(falling)), sizes)
    chances = np.array([*chain.from_iterable(falling)])
    places = np.concatenate([np.arange(size) for size in sizes])
    order = np.lexsort((-owner, places, -chances))
    sums = np.cumsum(np.concatenate(([gained], chances[order])))[1:]
    rates = sums / np.array(times.each(base + 1, len(order)))
    best = int(rates.argmax())
    taken = best + 1 if rates[best] > least else 0
    lengths: list[int] = np.bincount(owner[order[:taken]], minlength=len(falling)).tolist()
    return lengths


def _falling(chain: Sequence[float]) -> Sequence[float]:
    """The chain with no value above one before it."""
    return list(accumulate(chain, min))
