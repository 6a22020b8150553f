"""Short ways to finish the string or number that a probe stands in.  Looks no further than its end.

Tried in this order: ends of known texts (formats, literal pieces of patterns), one character over
and over (minLength), and a breadth-first search over bytes that keeps few texts of each length
whose next bytes are the same.  Text that is no JSON, which a literal ends, is only guessed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.grammar.hints import Texts, sample
from engine.grammar.lexical import INSIDE, OUTSIDE, after
from engine.grammar.probe import CONTROL, Broken, Letters, Probe, Stuck

NUMBER = b"0123456789-+.eE"
_KNOWN = (
    *(b"00000000-0000-0000-0000-000000000000", b"0001-01-01T00:00:00Z", b"00:00:00Z"),
    b"0001-01-01",
    *(b"a@a.aa", b"P1D", b"P1DT1S", b"0.0.0.0", b"::", b"a:", b"u0000", b"f"),
    *(b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80"),
)
_SHORT, _LONG = 8, 8_192  # times of one letter over and over
_FIRST = b"0a1A.:/@-_ nTZPb"  # of many legal bytes those tried first: one of most classes
_ALIKE = 3  # bytes of a class with the same outlook: the rest of the class is taken to be like that
_SAME = 6  # values with the same outlook before no other one is looked for
_MANY = 8  # legal bytes; of fewer, each may begin something of its own, such as an enum's value
_KEPT = 8  # texts of one length with the same few next bytes
_UNITS = (  # the rest of a character or of an escape
    *(b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80"),
    *(b"0000", b"000", b"00", b"0", b"f"),
)
_PADS = (0, 1, 2, 4, 8, 16, 32, 64)
FREE = 64  # legal bytes; with more of them a string may hold nearly anything
_ANYTHING = b"q7~"  # hardly ever legal but in free text
_QUOTE = (b'"',)
_NODES = 300  # texts looked behind
_TAIL = 256  # bytes, of a key and of its value so far
_PATTERNS = 4  # of properties of the same name
_DIGITS = (b"1", b"9", b"0", b"2", b"5")  # of numbers written with one digit
_FEW, _MOST = 3, 24  # digits
_ENDS = (b",", b"}", b"]", b")")  # of a number

_Node = tuple[int, int, bytes, bool, bool]  # length, order, text, may end, must end


class Speller:
    """Finds what a string or number may still hold; `texts` are those of the grammar."""

    def __init__(self, texts: Texts, letters: Letters) -> None:
        self._hints = [text for text in texts.hints if letters.spell(text) is not None]
        known = [text for text in _KNOWN if letters.spell(text) is not None]
        self.known = [*known, *self._hints]
        ends = {text[at:] for text in self.known for at in range(len(text))}
        self._ends: dict[int, list[bytes]] = {}
        for end in sorted(ends, key=lambda end: (len(end), end)):
            self._ends.setdefault(end[0], []).append(end)
        self._named = texts.named
        self._samples: dict[str, bytes] = {}
        self._fillers = letters.fillers
        self._stops = [stop for stop in texts.stops if letters.spell(stop) is not None]
        self.followers = [text for text in texts.followers if letters.spell(text) is not None]
        self._number_ends = [*_ENDS, *self.followers]

    def quick(self, probe: Probe, row: bytes) -> bytes | None:
        """A way on from inside a string to behind its quote that needs no search; `row`: legal now.

        None for a key that is not free as well: it decides the type of what follows.
        """
        if 0x22 in row and len(row) > FREE:
            return b'"'
        if self._named and (own := self._own(probe)):
            return own
        found = self._guess(probe, row, _QUOTE)
        partial = b"\x80" <= row[:1] < b"\xff"  # within a character
        is_key = found and len(row) <= FREE and not partial and probe.legal(found + b":")
        return None if is_key else found

    def _own(self, probe: Probe) -> bytes | None:
        """The rest of a text for the pattern of the property whose value the probe stands in.

        Among many patterns, which all other guesses would have to try.
        """
        before, quote, begun = probe.tail(_TAIL).rpartition(b'": "')
        patterns = self._named.get(before.rpartition(b'"')[2], ()) if quote else ()
        for pattern in patterns[:_PATTERNS]:
            if (text := self._samples.get(pattern)) is None:
                text = self._samples[pattern] = sample(pattern)
            if text.startswith(begun) and (found := _stopped(probe, text[len(begun) :], _QUOTE)):
                return found
        return None

    def text(self, probe: Probe, row: bytes) -> bytes | None:
        """A way on from text that is no JSON to behind the literal that ends it; no search.

        None where only digits may come: number() knows as much of them.
        """
        found = None
        if self._stops and row.strip(NUMBER):
            with _within(probe, probe.steps // 4):
                found = self._guess(probe, row, self._stops)
        return found

    def _guess(self, probe: Probe, row: bytes, stops: Sequence[bytes]) -> bytes | None:
        if stops is not _QUOTE and (found := _stopped(probe, b"", stops)):
            return found
        for text in sorted((e for b in row for e in self._ends.get(b, ())), key=len):
            if found := _stopped(probe, text, stops):
                return found
        for lead in (b"", *_UNITS):
            if lead[:1] in row and probe.legal(lead):
                found = (
                    self._repeated(probe, lead, stops)
                    or self._padded(probe, lead, stops)
                    or self._filled(probe, lead, stops)
                )
                if found:
                    return found
        return None

    def string(self, probe: Probe, row: bytes, most: int) -> list[bytes]:
        """Ways on from inside a string to behind its quote, short ones first; `row`: legal now.

        Of a value those whose quote is followed by different bytes; of a key, as anything may
        follow its value, up to `most`.
        """
        found: dict[bytes, bytes] = {}
        with _within(probe, probe.steps // 4):  # a long minimum would take all of them
            self._look(probe, most, found)
        if not found and (guess := self._guess(probe, row, _QUOTE)) is not None:
            return [guess]
        return list(found.values())

    def _look(self, probe: Probe, most: int, found: dict[bytes, bytes]) -> None:
        """Fill `found`: what may follow a text and its quote -> these."""
        alike = 0
        for text in _search(probe, INSIDE):
            key = probe.legal(text + b'":')
            outlook = text if key else _outlook(probe, text + b'"')
            if outlook is None:
                continue
            alike = alike + 1 if outlook in found else 0
            found.setdefault(outlook, text + b'"')
            if len(found) >= most or alike >= _SAME or (key and _is_free(probe, text)):
                return

    def number(self, probe: Probe) -> bytes | None:
        """The shortest way found to the end of a number."""
        runs = [run for digit in _DIGITS if (run := self._run(probe, digit))]
        run = min(runs, key=len, default=None)
        if run and len(run) <= _FEW:
            return run
        found = None
        with _within(probe, probe.steps * 3 // 4):
            found = next(_search(probe, OUTSIDE, digits=True), None)
        return min((text for text in (run, found) if text), key=len, default=None)

    def _run(self, probe: Probe, digit: bytes) -> bytes | None:
        """One digit, as often as a number needs to end behind it."""
        for count in range(1, probe.reach(digit * _MOST) + 1):
            if self.ended(probe, digit * count):
                return digit * count
        return None

    def ended(self, probe: Probe, digits: bytes) -> bool:
        """Whether a number may end behind these."""
        return any(probe.legal(digits + end) for end in self._number_ends) or probe.ends(digits)

    def _repeated(self, probe: Probe, lead: bytes, stops: Sequence[bytes]) -> bytes | None:
        """One letter, as often as is needed."""
        filler = next((f for f in (b"a", *self._fillers) if probe.legal(lead + f)), b"")
        return _times(probe, lead, filler, _SHORT, stops)

    def _filled(self, probe: Probe, lead: bytes, stops: Sequence[bytes]) -> bytes | None:
        """One letter many times: of those that may come, the cheapest in tokens."""
        filler = next((f for f in self._fillers if probe.legal(lead + f)), b"")
        return _times(probe, lead, filler, _LONG, stops)

    def _padded(self, probe: Probe, lead: bytes, stops: Sequence[bytes]) -> bytes | None:
        """A text of the grammar's patterns, and before it as many letters as a minimum needs."""
        pad = next((f for f in self._fillers if probe.legal(lead + f)), b"")
        for text in self._hints:
            for count in _PADS:
                if found := _stopped(probe, lead + pad * count + text, stops):
                    return found
        return None


@contextmanager
def _within(probe: Probe, steps: int) -> Iterator[None]:
    """A search that may take so many of the probe's steps, then ends with what it has."""
    outset, rest = probe.depth, probe.steps - steps
    probe.steps -= rest
    try:
        yield
    except Stuck:
        probe.back(outset)
    finally:
        probe.steps += rest


def _stopped(probe: Probe, text: bytes, stops: Sequence[bytes]) -> bytes | None:
    """The text and what ends it there; None when nothing does, or the text just goes on."""
    for stop in stops:
        whole = text + stop
        if probe.legal(whole):
            # Elsewhere the literal that ends another text is text as any other.
            if stops is _QUOTE or stop[0] == CONTROL or not probe.legal(whole + _ANYTHING):
                return whole
    return None


def _times(
    probe: Probe, lead: bytes, filler: bytes, most: int, stops: Sequence[bytes]
) -> bytes | None:
    """The lead, the filler as often as the end asks for, and that; None: not within `most`."""
    if not filler:
        return None
    count, reach = 1, probe.reach(lead + filler * min(most, 64)) - len(lead)
    if reach == 64:
        reach = probe.reach(lead + filler * most) - len(lead)
    found, low = None, 0  # so many are too few
    while count <= reach and not (found := _stopped(probe, lead + filler * count, stops)):
        low, count = count, max(min(2 * count, reach), count + 1)
    while found and count - low > 1:
        middle = (low + count) // 2
        fits = _stopped(probe, lead + filler * middle, stops)
        low, count = (low, middle) if fits else (middle, count)
        found = fits or found
    return found


def _is_free(probe: Probe, text: bytes) -> bool:
    """Whether the string could go on with nearly anything."""
    probe.push(text)
    row = probe.row()
    probe.pop(text)
    return len(row) > FREE


def _outlook(probe: Probe, text: bytes) -> bytes | None:
    """What may follow the text, as bytes to compare; None when the matcher breaks there."""
    outset = probe.depth
    try:
        probe.push(text)
        forced = probe.forced()
        row = forced or probe.row()
        probe.pop(text)
    except Broken:
        probe.back(outset)
        return None
    return b"f" + row if forced else b"r" + row


def _search(probe: Probe, lexical: int, digits: bool = False) -> Iterator[bytes]:
    """Texts to the end of the string (its quote left out) or number, the shortest first.

    The probe stands at the start again whenever a text is handed out.
    """
    heap: list[_Node] = []
    seen: dict[tuple[int, bytes], int] = {}
    look = _Look(probe, lexical, digits)
    heapq.heappush(heap, (0, 0, b"", look.is_end(b"", probe.row()), False))
    count = 0
    for _ in range(_NODES):
        if not heap:
            return
        _, _, text, is_end, is_last = heapq.heappop(heap)
        if is_end:
            yield text
        if is_last:
            continue
        probe.push(text)
        alike = [0] * 5  # of each class
        for letter in look.children(text):
            if alike[_class(letter)] >= _ALIKE:
                continue
            outset = probe.depth
            try:
                child, row, is_end, is_last = look.behind(text + bytes([letter]))
            except Broken:
                probe.back(outset)
                continue
            same = seen.get((len(child), row), 0)
            if row and same >= (1 if len(row) > _MANY and not digits else _KEPT):
                alike[_class(letter)] += 1
                continue
            seen[len(child), row] = same + 1
            count += 1
            heapq.heappush(heap, (len(child), count, child, is_end, is_last))
        probe.pop(text)


def _class(letter: int) -> int:
    """Digits, capitals, small letters, other ASCII, the rest."""
    if letter >= 0x80:
        return 4
    sign = chr(letter)
    return 0 if sign.isdigit() else 1 if sign.isupper() else 2 if sign.islower() else 3


class _Look:
    """What a search sees of the bytes ahead."""

    def __init__(self, probe: Probe, lexical: int, digits: bool) -> None:
        self._probe = probe
        self._lexical = lexical
        self._digits = digits

    def is_end(self, text: bytes, row: bytes) -> bool:
        """Whether the string or number may end here, behind `text`; `row` may follow."""
        if self._digits:
            return bool(text) and (bool(row.strip(NUMBER)) or self._probe.ends(b""))
        return 0x22 in row and after(self._lexical, text) == INSIDE

    def children(self, text: bytes) -> bytes:
        """The bytes that may come behind `text`, where the probe stands; likely ones first."""
        row = self._probe.row().rstrip(b"\xff")  # no control token stands in a string or number
        if self._digits:
            row = bytes(letter for letter in row if letter in NUMBER)
        elif after(self._lexical, text) == INSIDE:
            row = row.replace(b'"', b"")
        first = bytes(letter for letter in _FIRST if letter in row)
        return first + bytes(letter for letter in row if letter not in first)

    def behind(self, text: bytes) -> tuple[bytes, bytes, bool, bool]:
        """`text` with what it forces, the bytes that may follow, whether it may end and must.

        The probe stands before the last byte of `text`, and does so again afterwards.
        """
        probe = self._probe
        probe.push(text[-1:])
        forced = probe.forced()
        inner = self._inner(text, forced)
        if len(inner) < len(forced):
            row, is_end, must = b"", True, True
        else:
            probe.push(inner)
            row, must = probe.row(), False
            is_end = self.is_end(text + inner, row)
            probe.pop(inner)
        probe.pop(text[-1:])
        return text + inner, row, is_end, must

    def _inner(self, text: bytes, forced: bytes) -> bytes:
        """What of the forced bytes still belongs to the string or number."""
        if self._digits:
            size = next((i for i, b in enumerate(forced) if b not in NUMBER), len(forced))
            return forced[:size]
        lexical = after(self._lexical, text)
        for size in range(len(forced)):
            if lexical == INSIDE and forced[size] == 0x22:
                return forced[:size]
            lexical = after(lexical, forced[size : size + 1])
        return forced
