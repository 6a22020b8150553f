"""The shortest ending that a search finds for a constrained output.  Keeps no sequence's promise.

The plan is searched byte by byte on a copy of the matcher and cut into tokens at the end.  From a
state it takes what is forced, else closes what is open, else chooses: the value, key or text whose
ending is the shortest.  Choices are remembered by what may come next (`lexical`, legal bytes),
which is a hint and no identity: a plan counts only once the matcher has accepted it whole.

A plan is a function of the grammar and the state alone.  So what a search learns is dropped with
it; only what was learnt from the grammar's start is kept, and that before any other search.  What
was found is kept by all tokens that led there (Plans): there the same search finds the same.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from engine.grammar.broad import shortest
from engine.grammar.hints import Texts
from engine.grammar.lexical import ESCAPED, INSIDE, OUTSIDE, after
from engine.grammar.probe import CONTROL, MASK_STEPS, TEXT_LIMIT, Broken, Probe, Stuck
from engine.grammar.spelling import FREE, NUMBER, Speller

if TYPE_CHECKING:
    from engine.grammar.state import State
    from engine.grammar.vocabulary import Vocabulary

START_STEPS = 60_000  # calls that look at one token, mostly below 1 us each
STEPS = 10_000
# The first search from the start goes straight ahead: a hundred long texts take it 120,000 steps
# and 0.06 s, a hundred patterns 350,000 and 0.2 s.  Masks, which a hostile pattern makes a hundred
# times as dear, count for more there.
AHEAD_STEPS, START_MASK = 400_000, 40
START_ENDLESS, ENDLESS = 6, 3  # ways without an end, each 40 ms
_WIDTHS = (32, 12, 6, 4, 3, 3, 2)  # ways tried at a choice, by how many choices it lies within
_DEPTH = 30  # choices within choices; deeper the first way is taken
_INSTANT = (b'""', b"{}", b"[]")  # values that nothing can be shorter than, but for a digit
# What closes or goes on, and what no JSON holds but other text does.  The comma comes before
# digits: a number would never end.
_SIGNS = ((b"}", b"}{"), (b"]", b"]["), (b")", b"))"), (b",", b",,"))
_DIGITS = frozenset(b"0123456789")
_STARTS = b'"[{ntf'  # of values
_ANYTHING = b"q7~"  # hardly ever legal but in free text
_SPACE = b" \n\r\t"
_LONG = 24  # bytes of a text that may have been long for its place only
PLANS = 4096  # endings that are kept, of all grammars: 10 MB, were all as long as one may be
LONGEST = 64  # tokens of one that is
_DEAR = 500  # steps of a search that are worth remembering what it found

Choice = tuple[int, bytes]  # lexical state, legal bytes
Memory = dict[Choice, bytes]


class Plans:
    """Endings that were found, by grammar and tokens: calls of a tool mostly begin like others."""

    def __init__(self, most: int = PLANS) -> None:
        """`most`: of all grammars together."""
        self._most = most
        self._found: OrderedDict[tuple[int, bytes], list[int]] = OrderedDict()
        self._grammars = count()

    def grammar(self) -> int:
        """A number that no other grammar has."""
        return next(self._grammars)

    def find(
        self, grammar: int, said: Sequence[int], search: Callable[[], list[int] | None]
    ) -> list[int] | None:
        """What `search` finds behind the tokens `said`, by itself or as it did before."""
        found, key = self._found, (grammar, xxh3_128_digest(array("i", said).tobytes()))
        if key in found:
            found.move_to_end(key)
            return found[key]
        plan = search()
        # What was not found may have been only because a lexer, which all copies share, was full.
        if plan is not None and len(plan) <= LONGEST:
            found[key] = plan
            if len(found) > self._most:
                found.popitem(last=False)
        return plan


class Planner:
    """Finds endings for one compiled grammar; shared by all its sequences."""

    def __init__(
        self, start: State, vocabulary: Vocabulary, texts: Texts, plans: Plans | None = None
    ) -> None:
        """`texts`: those of the grammar; `plans`: where to keep what was found."""
        self._plans = plans or Plans()
        self._number = self._plans.grammar()
        self._letters = vocabulary.letters
        self._ends = _ends_of(texts.stops), _ends_of(texts.literals)
        self._speller = Speller(texts, self._letters)
        self._start = start
        self._learnt: Memory = {}
        self._plan: list[int] | None = None
        self._planned = False

    @property
    def start_plan(self) -> tuple[int, ...] | None:
        """The shortest ending found from the grammar's start; None: none within the limits."""
        self._prepare()
        return None if self._plan is None else tuple(self._plan)

    def full(self, state: State, cap: int, said: Sequence[int] | None = None) -> list[int] | None:
        """Tokens, at most `cap`, that lead `state` to where the output may end; moves nothing.

        `said`: all tokens that led there from the grammar's start, where the caller knows them.
        """
        if state.accepting:
            return []
        self._prepare()

        def search() -> list[int] | None:
            return self._find(state, STEPS, ENDLESS, dict(self._learnt))

        plan = search() if said is None else self._plans.find(self._number, said, search)
        return plan if plan is not None and len(plan) <= cap else None

    def rest(self, plan: list[int], token: int) -> list[int] | None:
        """The plan behind a token that is its beginning cut otherwise, or None: it is not.

        A grammar judges bytes: what led to an end through the token's bytes does so behind them,
        and need not be tried.  So it is with all that a grammar leaves no choice about.
        """
        piece = self._letters.vocabulary.piece(token)
        if not piece or CONTROL in piece:
            return None
        return self._letters.without(plan, piece)

    def adapted(self, plan: list[int], token: int) -> Iterator[list[int]]:
        """The plan as it may go on behind a token that is not its first; likely ones first.

        (Behind 1,350 such tokens of SmolLM2's calls it was the plan in 530, without its first token
        in 580, without two in 70; nowhere did it need a closer.)
        """
        yield plan  # a letter more in a string
        rest = self._letters.without(plan, self._letters.vocabulary.piece(token))
        if rest is not None:  # the token was a piece of the plan, cut otherwise
            yield rest
        parts = [plan[skipped:] for skipped in range(min(len(plan), 2) + 1)]
        yield from parts[1:]
        for part in parts:
            for closer in self._letters.closers:
                yield [*closer, *part]

    def _prepare(self) -> None:
        if not self._planned:
            self._planned = True
            start = self._start
            ends = start.accepting
            self._plan = [] if ends else self._find(start, START_STEPS, START_ENDLESS, self._learnt)

    def _find(self, state: State, steps: int, endless: int, memory: Memory) -> list[int] | None:
        if not self._letters.whole:
            return None
        here = state.lexical
        other = OUTSIDE if here else INSIDE  # free text before may have held an odd quote
        for lexical, guesses in ((here, True), (here, False), (other, True)):
            first = guesses and lexical == here
            most = steps if first else steps // 2
            if first and state is self._start:
                most = AHEAD_STEPS
            mask = START_MASK if state is self._start else MASK_STEPS
            probe = Probe(state.matcher, self._letters, most, endless, mask)
            search = _Search(probe, self._speller, self._ends, memory if first else {}, guesses)
            text = search.run(lexical)
            if (plan := self._cut(state, text)) is not None or not search.chose:
                return plan  # or nothing can be done otherwise
            endless = max(probe.endless, 0)
        probe = Probe(state.matcher, self._letters, steps, endless)
        return self._cut(state, shortest(probe, self._speller.known))

    def _cut(self, state: State, text: bytes | None) -> list[int] | None:
        """The text as tokens, if the matcher agrees that they are an ending."""
        plan = None if text is None else self._letters.cut(text)
        return plan if plan is not None and state.closes(plan) else None


class _Search:
    """One search for an ending."""

    def __init__(
        self,
        probe: Probe,
        speller: Speller,
        ends: tuple[Sequence[bytes], Sequence[bytes]],
        memory: Memory,
        guesses: bool,
    ) -> None:
        """`ends`: of what ends texts, and of all literals, which may do so.

        `guesses`: take the first text that a string may hold, though it may lead nowhere.
        """
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
        if known := self._known(lexical, row):
            return known, False
        for way in self._open.get((lexical, row), ()):
            if self._probe.legal(way):
                return way, False
        return self._choose((lexical, row), limit, depth)

    def _known(self, lexical: int, row: bytes) -> bytes:
        """What was best here before, where it is legal again; less of a text that was long."""
        known = self._memory.get((lexical, row), b"")
        if not known or not self._probe.legal(known):
            return b""
        if len(known) <= _LONG or not self._guesses:
            return known
        look = self._speller.quick if lexical == INSIDE else self._speller.text
        return min((text for text in (look(self._probe, row), known) if text), key=len)

    def _plain(self, lexical: int) -> bytes:
        """What is best wherever it is legal: to close, to go on, a value that cannot be shorter."""
        probe, legal = self._probe, self._probe.legal
        if lexical == INSIDE:
            return b'"' if legal(b'"') and not legal(b'":') else b""
        if lexical == ESCAPED:
            return b"n" if legal(b"n") else b""
        if legal(b"}") and legal(b"]"):
            return b""  # no JSON: free text
        for sign, doubled in _SIGNS:
            if legal(sign) and not legal(doubled):
                return sign + b" " if sign == b"," and legal(b", ") else sign
        for follower in self._speller.followers:
            if legal(follower):
                return follower
        for digit in (b"1", b"0"):
            if legal(digit) and not legal(digit + b",,") and self._speller.ended(probe, digit):
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
        stops, literals = self._text_ends
        if len(row) > FREE and (ends := controls + self._leaving(stops, row)):
            return ends[:most]
        text = self._speller.text(self._probe, row) if lexical == OUTSIDE else None
        if text and self._guesses:
            return [text]
        ways = [text] if text else []
        if len(row) > FREE and (ends := self._leaving(literals, row)):
            return (ways + ends)[:most]
        if lexical == OUTSIDE and _DIGITS.intersection(row):
            if number := self._speller.number(self._probe):
                ways.append(number)
                row = bytes(letter for letter in row if letter not in NUMBER)
        single = sorted(row.rstrip(b"\xff"), key=_place)
        if self._guesses and single and single[0] not in _SPACE:
            single = [letter for letter in single if not self._idle(letter, single[0])]
        return (ways + [bytes([letter]) for letter in single] + controls)[:most]

    def _idle(self, letter: int, other: int) -> bool:
        """Whether the letter is white space behind which `other` may come just as before it."""
        return letter in _SPACE and self._probe.legal(bytes([letter, other]))

    def _leaving(self, texts: Sequence[bytes], row: bytes) -> list[bytes]:
        """Those that end free text: not every letter that it may hold may follow."""
        legal, letters = self._probe.legal, bytes(byte for byte in _ANYTHING if byte in row)
        return [text for text in texts if legal(text) and not legal(text + letters)]


def _ends_of(texts: Sequence[bytes]) -> list[bytes]:
    """Each text from each of its places on, short ones first."""
    ends = {text[at:] for text in texts for at in range(len(text)) if text[0] != CONTROL}
    return sorted(ends, key=lambda end: (len(end), end))


def _place(letter: int) -> tuple[bool, bool, int]:
    """Where a byte comes among those to try: starts of values first, digits, white space last."""
    start = _STARTS.find(letter)
    return letter in _SPACE, letter in _DIGITS, start if start >= 0 else len(_STARTS)
