"""Whether steps wait for drafts, and how long a device's chains are, by measured time.  No guess.

A step that waits (for a host's look at all tokens, or for a device's chain) leaves the device idle
between two steps; one that does not is launched while the one before it runs.  Which gives more
tokens a second is decided for the whole batch: of one sequence for each step, by what the guesses
at hand are worth and by times between results, which hold all that a step costs; of more by what
either way gave (rates.py).  The way that is not taken is tried now and then, a few steps long.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.proposer import ASLEEP, FREE, HOST, LENGTHS, Load, Ran
from speculative.length import MARGIN, PROMPT, StepTimes
from speculative.rates import GAIN, RAN, SLEPT, WAITED, Rates

TOKEN = 0.07  # what a token of a chain costs until it is measured, of a step with one row
WAIT = 0.6  # what waiting costs until it is measured, of a step with one row
FOLLOW = 0.1  # how fast measured costs follow what is seen
BLIND = 64  # steps that all waited, after which none is believed to run ahead
FIRST = 8  # steps at the start that draft nothing: they tell what a step costs by itself
LOOK = 64  # where nothing runs ahead: one step in so many drafts nothing
TRY = 16  # of those looks one in so many is a short chain, where none seems to be worth it
KEEP = 4  # steps that a decision for one sequence holds, if nothing changes
# Steps that the other way is tried for: of one sequence, of several, and of several that waited
# until then, of which running ahead costs little.  The first tell nothing: the very first are of
# either way, and then nobody has been guessed for.
TRIAL, WIDER, LONG = 6, 12, 16
SETTLE = 3  # steps of a way, of several sequences, that are not counted
# Steps from one trial to the next, each time LATER times as many.  Many sequences that nobody has
# guessed for cost several steps' time to begin with.
SOON, LATER, SELDOM = 64, 4, 4096
REST = 16  # steps of several sequences that a decision to sleep holds: thinking costs as well
DREAM = 24  # steps without a chain, or nearly one, after which a device's draft sleeps
# The same where steps wait for the host all the same: it sleeps for little there, and a text in
# which it slept is guessed worse from then on.
DOZE = 256
# Steps that it then reads before it is tried: of what it slept through it knows nothing.  Beside
# few it has read their prompts, and lacks only what they said.
WAKE, NAP = 256, 96
MANY = 16  # sequences from which trials are planned apart from those of fewer
ROWS = 8  # sequences up to which SELDOM is how seldom a hopeless way is tried; each more costs
HOPELESS = 0.75  # of the other way's rate: one of several sequences that gives less is tried seldom
FAR = 0.97  # of the best rate: below this a chain is not nearly wanted


class Ahead:
    """Chooses for one kind of load, and learns what it costs."""

    def __init__(self, row: float, piped: bool) -> None:
        """`row`: what a row more costs until measured; `piped`: a step may run ahead at all."""
        self.alone = StepTimes(row)  # seconds of steps that waited
        self._free = StepTimes(row)  # of those that did not
        self._rates = Rates()
        self._piped = piped
        self._met = [0, 0]  # steps of either kind, free ones first
        self._way, self._settling = False, 0  # of the newest step; see SETTLE
        self._token = 0.0  # seconds a token of a chain; 0 = not measured
        self._turn = 0
        self._trial, self._rest = FREE, 0  # what is tried, for so many more steps
        self._sleeps = self._waits = False  # that was the newest choice
        self._plans: dict[int, tuple[int, int]] = {}  # by size of load: next trial, then every
        self._kept: tuple[object, int, int, bool] = (None, 0, FREE, False)  # what for, until, what
        self._since = 0  # steps since a chain was wanted, or nearly
        self._bare = 0.0  # see choose
        self.holds = 1  # steps that the newest choice is for

    # ---- learning --------------------------------------------------------------------------------

    def observe(self, ran: Ran) -> None:
        """A step took so long."""
        if ran.alone != self._way:
            self._way, self._settling = ran.alone, SETTLE
        elif self._settling and ran.sequences > 1:
            self._settling -= 1
        elif self._piped and ran.sequences:
            way = WAITED if ran.alone else SLEPT if ran.asleep else RAN
            self._rates.observe(ran.sequences, way, ran.tokens, ran.seconds)
        if self._piped and not ran.alone:
            self._met[0] += 1
            self._free.observe(ran.rows, ran.seconds)
        elif ran.guesses:
            self._observe_chain(ran)
        else:
            self._met[1] += 1
            self.alone.observe(ran.rows, ran.seconds)

    def _observe_chain(self, ran: Ran) -> None:
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

    def choose(
        self, chances: Sequence[float], worth: float, load: Load, most: int, bare: float = 0.0
    ) -> int:
        """FREE, ASLEEP, HOST or a length for the sequences of `load`, see HostDrafts.ahead.

        `chances` of each place of a device's chain, all before it being right; `worth`: tokens that
        a host's guess is right for, in the mean; `bare`: the share of sequences for which it has
        none, or hardly any.
        """
        self._bare = bare
        self._turn += 1
        self.holds = 1
        if not self._piped:
            return self._unpiped(chances, load, most)
        if self._rest:
            self._rest -= 1
            return min(self._trial, most)
        if self._turn <= FIRST or not self._met[0]:
            # A draft that only the host can feed keeps steps from running ahead, whatever is said.
            self._piped = self._met[1] < BLIND
            return FREE
        found, near = (self._of_one if load.rows == 1 else self._of_several)(
            chances, worth, load, most)
        if self._due(load.rows, most > 0 and found == FREE and self._since > DREAM):
            many = LONG if found != FREE else WIDER
            self._rest = (many if load.rows > 1 else TRIAL) - 1
            if found == FREE:
                self._trial = max(self._best(chances, worth, load, most)[0], min(1, most))
            else:
                self._trial = ASLEEP if most > 0 and self._dozes(load.rows) else FREE
            self._tries(load.rows, self._trial)
            return self._trial
        self._waits = found != FREE
        self._since = 0 if found > 0 or near else self._since + 1
        if found == FREE and self._since > DREAM:
            self.holds = REST if load.rows > 1 else 1
            if not self._sleeps:
                self._tries(load.rows, ASLEEP)
            self._sleeps = True
            return ASLEEP
        self._sleeps = False
        return HOST if found != FREE and most and self._since > DOZE else found

    def _tries(self, rows: int, way: int) -> None:
        self._rates.tried(rows, SLEPT if way == ASLEEP else RAN if way == FREE else WAITED)

    def _dozes(self, rows: int) -> bool:
        """Whether what is tried out of a wait is to run ahead without the draft.

        That leaves a gap in what it knows, so it is done where it sleeps all the same, where that
        was never seen, or was long ago.
        """
        if self._since > DOZE or (rows > 1 and not self._rates.seen(rows, SLEPT)):
            return True
        return rows > 1 and self._plans[_size(rows)][1] >= SELDOM

    def rested(self, steps: int) -> None:
        """So many steps were slept through without a choice."""
        self._turn += steps
        self._since += steps

    def _of_several(
        self, chances: Sequence[float], worth: float, load: Load, most: int
    ) -> tuple[int, bool]:
        """What gave most, and whether a chain nearly does."""
        times = self._rates.waiting(load.rows)
        if times is None or times <= (1.0 if self._waits else GAIN):
            return FREE, times is None  # to be ready for one costs more than it would bring
        found, near = self._best(chances, worth, load, most)
        return max(found, 0), near

    def _of_one(
        self, chances: Sequence[float], worth: float, load: Load, most: int
    ) -> tuple[int, bool]:
        """What gives most, and whether a chain nearly does."""
        what = load.rows, load.beside > 0, most, round(worth)
        if what != self._kept[0] or self._turn >= self._kept[1]:
            self._kept = what, self._turn + KEEP, *self._best(chances, worth, load, most)
        return self._kept[2], self._kept[3]

    def _due(self, rows: int, slept: bool) -> bool:
        """Time to try what is not done, with about so many sequences; a draft that slept wakes."""
        size = _size(rows)
        at, every = self._plans.get(size, (self._turn, SOON))
        if self._turn < at:
            return False
        if slept:
            wake = WAKE if rows >= MANY else NAP
            self._since, self._plans[size] = DREAM - wake, (self._turn + wake, every)
            return False
        times = self._rates.waiting(rows) if rows > 1 else None
        if times is not None and not HOPELESS < times < 1 / HOPELESS:
            every = SELDOM * max(1, rows // ROWS)  # however often it was until now
        self._plans[size] = self._turn + every, max(every, min(LATER * every, SELDOM))
        return True

    def _unpiped(self, chances: Sequence[float], load: Load, most: int) -> int:
        if self._turn <= FIRST or self._turn % LOOK == 0:
            return 0
        found, _ = self._best(chances, 0.0, load, most)
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
    ) -> tuple[int, bool]:
        """What gives most tokens a second by what it should take, and whether a chain nearly does.
        """
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
            # Of several some have a guess of the host's, and the others take the chain.  Steps of
            # more rows took longer mostly since more came of them, which is the host's work.
            mixed = worth + self._bare * gained if count > 1 else worth
            rate = base + max(gained, mixed) * count
            rows = int(count * (1 + max(length, worth)))
            rate /= self._waited(rows + beside) + token * length
            chain = max(chain, rate)
            if rate > best:
                best, found = rate, length
        return found, chain > FAR * best


def _size(rows: int) -> int:
    """The class of a load: a trial at one size tells of those that are near."""
    return (rows > 1) + (rows >= MANY)
