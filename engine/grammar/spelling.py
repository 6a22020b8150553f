"""Short ways to finish the string or number that a probe stands in.  Looks no further than its end.

Tried in this order: one character over and over (minLength), ends of known texts (formats, literal
pieces of patterns), and a breadth-first search over bytes that keeps few texts of each length whose
next bytes are the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from engine.grammar.lexical import INSIDE, OUTSIDE, after
from engine.grammar.probe import Broken, Letters, Probe

NUMBER = b"0123456789-+.eE"
_KNOWN = (
    *(b"00000000-0000-0000-0000-000000000000", b"0001-01-01T00:00:00Z", b"00:00:00Z"),
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
_NODES = 300  # texts looked behind
_DIGITS = (b"1", b"9", b"0", b"2", b"5")  # of numbers written with one digit
_FEW, _MOST = 3, 24  # digits
_ENDS = frozenset(b",}]")

_Node = tuple[int, int, bytes, bool, bool]  # length, order, text, may end, must end


class Speller:
    """Finds what a string or number may still hold; `hints` are texts that it may have to hold."""

    def __init__(self, hints: Sequence[bytes], letters: Letters) -> None:
        self._hints = [text for text in hints if letters.spell(text) is not None]
        known = [text for text in _KNOWN if letters.spell(text) is not None]
        self.known = [*known, *self._hints]
        ends = {text[at:] for text in self.known for at in range(len(text))}
        self._ends: dict[int, list[bytes]] = {}
        for end in sorted(ends, key=lambda end: (len(end), end)):
            self._ends.setdefault(end[0], []).append(end)
        self._fillers = letters.fillers

    def quick(self, probe: Probe, row: bytes) -> bytes | None:
        """A way on from inside a string to behind its quote that needs no search; `row`: legal now.

        None for a key that is not free as well: it decides the type of what follows.
        """
        if 0x22 in row and len(row) > FREE:
            return b'"'
        text = self._guess(probe, row)
        partial = b"\x80" <= row[:1] < b"\xff"  # within a character
        if text is None or (len(row) <= FREE and not partial and probe.legal(text + b'":')):
            return None
        return text + b'"'

    def _guess(self, probe: Probe, row: bytes) -> bytes | None:
        for text in sorted((e for b in row for e in self._ends.get(b, ())), key=len):
            if probe.legal(text + b'"'):
                return text
        for lead in (b"", *_UNITS):
            if lead[:1] in row and probe.legal(lead):
                found = self._repeated(probe, lead) or self._padded(probe, lead)
                if found := found or self._filled(probe, lead):
                    return found
        return None

    def string(self, probe: Probe, row: bytes, most: int) -> list[bytes]:
        """Ways on from inside a string to behind its quote, short ones first; `row`: legal now.

        Of a value those whose quote is followed by different bytes; of a key, as anything may
        follow its value, up to `most`.
        """
        found: dict[bytes, bytes] = {}
        alike = 0
        for text in _search(probe, INSIDE):
            key = probe.legal(text + b'":')
            outlook = text if key else _outlook(probe, text + b'"')
            if outlook is None:
                continue
            alike = alike + 1 if outlook in found else 0
            found.setdefault(outlook, text + b'"')
            if len(found) >= most or alike >= _SAME or (key and _is_free(probe, text)):
                break
        if not found and (guess := self._guess(probe, row)) is not None:
            return [guess + b'"']
        return list(found.values())

    def number(self, probe: Probe) -> bytes | None:
        """The shortest way found to the end of a number."""
        runs = [run for digit in _DIGITS if (run := _run(probe, digit))]
        run = min(runs, key=len, default=None)
        if run and len(run) <= _FEW:
            return run
        found = next(_search(probe, OUTSIDE, digits=True), None)
        return min((text for text in (run, found) if text), key=len, default=None)

    def _repeated(self, probe: Probe, lead: bytes) -> bytes | None:
        """One letter, as often as is needed."""
        filler = next((f for f in (b"a", *self._fillers) if probe.legal(lead + f)), b"")
        return lead + filler * count if (count := _times(probe, lead, filler, _SHORT)) else None

    def _filled(self, probe: Probe, lead: bytes) -> bytes | None:
        """One letter many times: of those that may come, the cheapest in tokens."""
        filler = next((f for f in self._fillers if probe.legal(lead + f)), b"")
        return lead + filler * count if (count := _times(probe, lead, filler, _LONG)) else None

    def _padded(self, probe: Probe, lead: bytes) -> bytes | None:
        """A text of the grammar's patterns, and before it as many letters as a minimum needs."""
        pad = next((f for f in self._fillers if probe.legal(lead + f)), b"")
        for text in self._hints:
            for count in _PADS:
                if probe.legal(lead + pad * count + text + b'"'):
                    return lead + pad * count + text
        return None


def _run(probe: Probe, digit: bytes) -> bytes | None:
    """One digit, as often as a number needs to end behind it."""
    for count in range(1, probe.reach(digit * _MOST) + 1):
        text = digit * count
        if any(probe.legal(text + end) for end in (b",", b"}", b"]")) or probe.ends(text):
            return text
    return None


def _times(probe: Probe, lead: bytes, filler: bytes, most: int) -> int:
    """How often the filler must come for a quote to be legal behind it; 0: not within `most`."""
    if not filler:
        return 0
    count, reach = 1, probe.reach(lead + filler * min(most, 64)) - len(lead)
    if reach == 64:
        reach = probe.reach(lead + filler * most) - len(lead)
    while count <= reach and not probe.legal(lead + filler * count + b'"'):
        count *= 2
    if count > reach:
        return 0
    low = count // 2  # too few
    while count - low > 1:
        middle = (low + count) // 2
        fits = probe.legal(lead + filler * middle + b'"')
        low, count = (low, middle) if fits else (middle, count)
    return count


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
                child, row, cut = look.behind(text + bytes([letter]))
            except Broken:
                probe.back(outset)
                continue
            same = seen.get((len(child), row), 0)
            if row and same >= (1 if len(row) > _MANY and not digits else _KEPT):
                alike[_class(letter)] += 1
                continue
            seen[len(child), row] = same + 1
            count += 1
            is_end = cut or look.is_end(child, row)
            heapq.heappush(heap, (len(child), count, child, is_end, cut))
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
        """Whether the string or number may end behind `text`, which `row` may follow."""
        if self._digits:
            return bool(_ENDS.intersection(row)) or self._probe.ends(b"")
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

    def behind(self, text: bytes) -> tuple[bytes, bytes, bool]:
        """`text` with what it forces, the bytes that may follow, whether its end is behind it.

        The probe stands before the last byte of `text`, and does so again afterwards.
        """
        probe = self._probe
        probe.push(text[-1:])
        forced = probe.forced()
        inner = self._inner(text, forced)
        row, cut = b"", len(inner) < len(forced)
        if not cut:
            probe.push(inner)
            row = probe.row()
            probe.pop(inner)
        probe.pop(text[-1:])
        return text + inner, row, cut

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
