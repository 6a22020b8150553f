"""The shortest ending that a search finds for a constrained output.  Keeps no sequence's promise.

The plan is searched byte by byte on a copy of the matcher and cut into tokens at the end.  From a
state it takes what is forced, else closes what is open, else chooses: the value, key or text whose
ending is the shortest.  Choices are remembered by what may come next (`lexical`, legal bytes),
which is a hint and no identity: a plan counts only once the matcher has accepted it whole.

A plan is a function of the grammar and the state alone.  So what a search learns is dropped with
it; only what was learnt from the grammar's start is kept, and that before any other search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.grammar.broad import shortest
from engine.grammar.lexical import ESCAPED, INSIDE, OUTSIDE, after
from engine.grammar.probe import CONTROL, Broken, Probe, Stuck
from engine.grammar.spelling import FREE, NUMBER, Speller

if TYPE_CHECKING:
    from engine.grammar.matcher import State, Vocabulary

START_STEPS = 60_000  # calls that look at one token, mostly below 1 us each
STEPS = 10_000
TEXT_LIMIT = 32_768  # bytes of a plan
_WIDTHS = (32, 12, 6, 4, 3, 3, 2)  # ways tried at a choice, by how many choices it lies within
_DEPTH = 30  # choices within choices; deeper the first way is taken
_INSTANT = (b'""', b"{}", b"[]")  # values that nothing can be shorter than, but for a digit
_ENDS = (b",", b"}", b"]")  # of a number
_DIGITS = frozenset(b"0123456789")
_STARTS = b'"[{ntf'  # of values
_ANYTHING = b"q7~"  # hardly ever legal but in free text
_SPACE = b" \n\r\t"
_DEAR = 500  # steps of a search that are worth remembering what it found

Choice = tuple[int, bytes]  # lexical state, legal bytes
Memory = dict[Choice, bytes]


class Planner:
    """Finds endings for one compiled grammar; shared by all its sequences."""

    def __init__(
        self,
        start: State,
        vocabulary: Vocabulary,
        hints: Sequence[bytes] = (),
        literals: Sequence[bytes] = (),
    ) -> None:
        """`hints`: texts that strings may have to hold; `literals`: that may end other text."""
        self._letters = vocabulary.letters
        ends = {text[at:] for text in literals for at in range(len(text))}
        self._ends = sorted(ends, key=lambda end: (len(end), end))
        self._speller = Speller(hints, self._letters)
        self._start = start
        self._learnt: Memory = {}
        self._plan: list[int] | None = None
        self._planned = False

    @property
    def start_plan(self) -> tuple[int, ...] | None:
        """The shortest ending found from the grammar's start; None: none within the limits."""
        self._prepare()
        return None if self._plan is None else tuple(self._plan)

    def full(self, state: State, cap: int) -> list[int] | None:
        """Tokens, at most `cap`, that lead `state` to where the output may end; moves nothing."""
        if state.accepting:
            return []
        self._prepare()
        plan = self._find(state, STEPS, dict(self._learnt))
        return plan if plan is not None and len(plan) <= cap else None

    def adapted(self, plan: list[int], token: int) -> Iterator[list[int]]:
        """The plan as it may go on behind a token that is not its first; likely ones first."""
        yield plan  # a letter more in a string
        rest = self._letters.without(plan, self._letters.vocabulary.piece(token))
        if rest is not None:  # the token was a piece of the plan, cut otherwise
            yield rest
        for closer in self._letters.closers:
            yield [*closer, *plan]
        for skipped in (1, 2):
            if skipped <= len(plan):
                yield plan[skipped:]
                for closer in self._letters.closers:
                    yield [*closer, *plan[skipped:]]

    def _prepare(self) -> None:
        if not self._planned:
            self._planned = True
            accepting = self._start.accepting
            self._plan = [] if accepting else self._find(self._start, START_STEPS, self._learnt)

    def _find(self, state: State, steps: int, memory: Memory) -> list[int] | None:
        here = state.lexical
        other = OUTSIDE if here else INSIDE  # free text before may have held an odd quote
        for lexical, guesses in ((here, True), (here, False), (other, True)):
            first = guesses and lexical == here
            probe = Probe(state.matcher, self._letters, steps if first else steps // 2)
            search = _Search(probe, self._speller, self._ends, memory if first else {}, guesses)
            text = search.run(lexical) if self._letters.whole else None
            plan = None if text is None else self._letters.cut(text)
            if plan is not None and state.closes(plan):
                return plan
            if not search.chose:
                return None  # nothing can be done otherwise
        probe = Probe(state.matcher, self._letters, steps)
        text = shortest(probe, self._speller.known) if self._letters.whole else None
        plan = None if text is None else self._letters.cut(text)
        return plan if plan is not None and state.closes(plan) else None


class _Search:
    """One search for an ending."""

    def __init__(
        self,
        probe: Probe,
        speller: Speller,
        ends: Sequence[bytes],
        memory: Memory,
        guesses: bool,
    ) -> None:
        """`guesses`: take the first text that a string may hold, though it may lead nowhere."""
        self._probe = probe
        self._speller = speller
        self._text_ends = ends
        self._memory = memory
        self._guesses = guesses
        self._open: dict[Choice, list[bytes]] = {}  # choices being made: ways not tried, then that
        self._enough = probe.steps // 2  # below this the first way that ends is taken
        self.chose = False

    def run(self, lexical: int) -> bytes | None:
        """An ending, short if it can be; None: none within the steps."""
        try:
            return self.finish(lexical)
        except (Broken, Stuck):
            return None

    def finish(self, lexical: int, limit: int = TEXT_LIMIT, depth: int = 0) -> bytes | None:
        """At most `limit` bytes to where the output may end; the probe stays where it stands."""
        probe = self._probe
        if probe.ends(b""):
            return b""
        text, found = b"", None
        while True:
            way, whole = self._next(lexical, limit - len(text), depth)
            if not way or len(text) + len(way) > limit:
                break
            if whole or probe.ends(way):
                found = text + way
                break
            probe.push(way)
            text += way
            lexical = after(lexical, way)
        probe.pop(text)
        return found

    def _next(self, lexical: int, limit: int, depth: int) -> tuple[bytes, bool]:
        """The next bytes, empty when there are none, and whether they go all the way to an end."""
        if way := self._probe.forced() or self._plain(lexical):
            return way, False
        self.chose = True
        row = self._probe.row()
        if (known := self._memory.get((lexical, row))) and self._probe.legal(known):
            return known, False
        for way in self._open.get((lexical, row), ()):
            if self._probe.legal(way):
                return way, False
        return self._choose((lexical, row), limit, depth)

    def _plain(self, lexical: int) -> bytes:
        """What is best wherever it is legal: to close, to go on, a value that cannot be shorter."""
        legal, ends = self._probe.legal, self._probe.ends
        if lexical == INSIDE:
            return b'"' if legal(b'"') and not legal(b'":') else b""
        if lexical == ESCAPED:
            return b"n" if legal(b"n") else b""
        if legal(b"}") and legal(b"]"):
            return b""  # no JSON: free text
        for sign in (b"}", b"]", b")", b","):  # the comma before digits: a number would never end
            if legal(sign):
                return sign + b" " if sign == b"," and legal(b", ") else sign
        for digit in (b"1", b"0"):
            if legal(digit) and (any(legal(digit + end) for end in _ENDS) or ends(digit)):
                return digit
        return next((value for value in _INSTANT if legal(value)), b"")

    def _choose(self, choice: Choice, limit: int, depth: int) -> tuple[bytes, bool]:
        """Try ways and take the one whose ending is the shortest; remember it."""
        before = self._probe.steps
        ways = self._ways(choice, depth)
        if len(ways) <= 1 or depth == _DEPTH:
            if ways and before - self._probe.steps > _DEAR:
                self._memory[choice] = ways[0]
            return ways[0] if ways else b"", False
        outer = self._open.get(choice, [])  # the same choice, none of whose ways is legal here
        self._open[choice] = list(ways)
        try:
            best, rest = self._best(ways, choice, limit, depth)
        finally:
            self._open[choice] = outer
        if best:
            self._memory[choice] = best
        return best + rest, True

    def _best(
        self, ways: Sequence[bytes], choice: Choice, limit: int, depth: int
    ) -> tuple[bytes, bytes]:
        """The way whose ending is the shortest, and that ending; both empty when none ends."""
        best, rest, left = b"", b"", limit
        untried = self._open[choice]
        for way in ways:
            del untried[0]
            untried.append(best or way)  # for when the same choice comes up again on this way
            ending = self._behind(way, choice[0], left, depth)
            del untried[-1]
            if ending is not None:
                best, rest = way, ending
                left = len(way) + len(ending) - 1
            if best and self._probe.steps < self._enough:
                break
        return best, rest

    def _behind(self, way: bytes, lexical: int, limit: int, depth: int) -> bytes | None:
        """The shortest ending behind `way`, both together at most `limit` bytes."""
        if len(way) > limit:
            return None
        if self._probe.ends(way):
            return b""
        outset = self._probe.depth
        try:
            self._probe.push(way)
            ending = self.finish(after(lexical, way), limit - len(way), depth + 1)
            self._probe.pop(way)
        except Broken:
            self._probe.back(outset)
            return None
        return ending

    def _ways(self, choice: Choice, depth: int) -> list[bytes]:
        lexical, row = choice
        most = _WIDTHS[min(depth, len(_WIDTHS) - 1)]
        if lexical == INSIDE:
            quick = self._speller.quick(self._probe, row) if self._guesses else None
            return [quick] if quick else self._speller.string(self._probe, row, most)
        controls = self._probe.controls() if CONTROL in row else []
        if len(row) > FREE:
            ends = [end for end in self._text_ends if self._leaves(end)]
            if controls or ends:
                return (controls + ends)[:most]
        ways: list[bytes] = []
        if lexical == OUTSIDE and _DIGITS.intersection(row):
            if number := self._speller.number(self._probe):
                ways.append(number)
                row = bytes(letter for letter in row if letter not in NUMBER)
        letters = sorted(row.rstrip(b"\xff"), key=_place)
        if self._guesses:  # white space leads nowhere that it need not be in
            letters = [letter for letter in letters if letter not in _SPACE] or letters
        return (ways + [bytes([letter]) for letter in letters] + controls)[:most]

    def _leaves(self, text: bytes) -> bool:
        """Whether free text ends with this: not everything may follow."""
        return self._probe.legal(text) and not self._probe.legal(text + _ANYTHING)


def _place(letter: int) -> tuple[bool, int]:
    """Where a byte comes among those to try: the starts of values first, white space last."""
    start = _STARTS.find(letter)
    return letter in _SPACE, start if start >= 0 else len(_STARTS)
