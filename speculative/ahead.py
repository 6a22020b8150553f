"""Whether steps wait for drafts, and how long a device's chains are, by measured time.  No guess.

A step that waits (for a host's look at all tokens, or for a device's chain) leaves the device idle
between two steps; one that does not is launched while the one before it runs.  Which gives more
tokens a second is decided for the whole batch and each step: times of both kinds are those between
results, so they hold all that a step costs, on the device or not.  What is not used is tried now
and then, a few steps long.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.proposer import ASLEEP, FREE, LENGTHS, Load, Ran
from speculative.length import MARGIN, PROMPT, StepTimes

TOKEN = 0.07  # what a token of a chain costs until it is measured, of a step with one row
WAIT = 0.6  # what waiting costs until it is measured, of a step with one row
FOLLOW = 0.1  # how fast measured costs follow what is seen
FIRST = 8  # steps at the start that draft nothing: they tell what a step costs by itself
LOOK = 64  # where nothing is measured apart: one step in so many drafts nothing
TRY = 16  # of those looks one in so many is a short chain, where none seems to be worth it
TRIAL = 5  # steps that the other kind is tried for; the first tells nothing
SELDOM = 1024  # steps from one trial to the next, at most; at the start they follow sooner
DREAM = 96  # steps without a chain after which a device's draft sleeps, prompts apart
FAR = 0.9  # a rate below this, of the best one, is not worth to stay ready for


class Ahead:
    """Chooses for one kind of load, and learns what it costs."""

    def __init__(self, row: float, piped: bool) -> None:
        """`row`: what a row more costs until measured; `piped`: a step may run ahead at all."""
        self.alone = StepTimes(row)  # seconds of steps that waited
        self._free = StepTimes(row)  # of those that did not
        self._piped = piped
        self._met = [0, 0]  # steps of either kind, free ones first
        self._token = 0.0  # seconds a token of a chain; 0 = not measured
        self._turn = 0
        self._trial, self._rest = FREE, 0  # what is tried, for so many more steps
        self._next, self._every = FIRST, LOOK // 2  # when the next trial begins, and the ones after
        self._since = 0  # steps since a chain was wanted, or nearly

    # ---- learning --------------------------------------------------------------------------------

    def observe(self, ran: Ran) -> None:
        """A step took so long."""
        if self._piped and not ran.alone:
            self._met[0] += 1
            self._free.observe(ran.rows, ran.seconds)
            return
        if not ran.guesses:
            self._met[1] += 1
            self.alone.observe(ran.rows, ran.seconds)
            return
        known = self._token or TOKEN * self._waited(1)
        if self._piped:
            chain_s = ran.chain_s or known * ran.guesses
            self._met[1] += 1
            self.alone.observe(ran.rows, max(ran.seconds - chain_s, 0.2 * ran.seconds))
            seen = chain_s / ran.guesses
        else:
            seen = max(ran.seconds - self.alone(ran.rows), 0.0) / ran.guesses
            seen = min(seen, self.alone(1))
        self._token = known + FOLLOW * (seen - known)

    # ---- choosing --------------------------------------------------------------------------------

    def choose(self, chances: Sequence[float], worth: float, load: Load, most: int) -> int:
        """FREE, ASLEEP or a length for the sequences of `load`, see HostDrafts.ahead.

        `chances` of each place of a device's chain, all before it being right; `worth`: tokens that
        a host's guess is right for, in the mean.
        """
        self._turn += 1
        if not self._piped:
            return self._unpiped(chances, load, most)
        if self._rest:
            self._rest -= 1
            return min(self._trial, most)
        if self._turn <= FIRST or not self._met[0]:
            return FREE
        best, found, second = self._best(chances, worth, load, most)
        if self._turn >= self._next:
            self._next = self._turn + self._every
            self._every = min(2 * self._every, SELDOM)
            self._rest = TRIAL - 1
            self._trial = min(2, most) if found == FREE else FREE
            return self._trial
        return self._drowsy(found, second > FAR * best, load) if most else found

    def _drowsy(self, found: int, near: bool, load: Load) -> int:
        """A device's draft that is far from being wanted sleeps, but for prompts."""
        self._since = 0 if found > 0 or near else self._since + 1
        return ASLEEP if found == FREE and self._since > DREAM and not load.beside else found

    def _unpiped(self, chances: Sequence[float], load: Load, most: int) -> int:
        if self._turn <= FIRST or self._turn % LOOK == 0:
            return 0
        _, found, _ = self._best(chances, 0.0, load, most)
        if not found and self._turn % (LOOK * TRY) == 1:
            return min(1, most)
        return found

    def _waited(self, rows: int) -> float:
        """Seconds of a step that waits; guessed from the other kind while there was none."""
        if self._met[1] or not self._piped:
            return self.alone(rows)
        return self._free(rows) + WAIT * self._free(1)

    def _best(
        self, chances: Sequence[float], worth: float, load: Load, most: int
    ) -> tuple[float, int, float]:
        """The best rate in tokens a second, what gives it, and the best rate of a chain."""
        count, beside = load.rows, load.beside
        token = self._token or TOKEN * self._waited(1)
        base = count + PROMPT * beside
        piped = self._piped
        plain = (self._free if piped else self.alone)(count + beside)
        best, found, chain = base / plain * (1 + MARGIN), FREE if piped else 0, 0.0
        if piped and worth:
            rate = (base + worth * count) / self._waited(int(count * (1 + worth)) + beside)
            if rate > best:
                best, found = rate, 0
        alive, gained = 1.0, 0.0
        for place in range(most):
            alive *= chances[min(place, len(chances) - 1)]
            gained += alive
            if (length := place + 1) not in LENGTHS:
                continue
            rate = base + max(gained, worth) * count
            rate /= self._waited(count * (1 + length) + beside) + token * length
            chain = max(chain, rate)
            if rate > best:
                best, found = rate, length
        return best, found, chain
