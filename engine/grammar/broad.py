"""The shortest ending of a small grammar that is no JSON, shorter texts of it first.

For what the planner's search, which knows how JSON is written, finds no ending: runs of letters or
digits that only another letter ends.  Finds nothing where endings are long or ways are many.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from engine.grammar.probe import Broken, Probe, Stuck

_NODES = 2_000  # texts looked behind
_ALIKE = 2  # letters of a class that are tried: a run may hold any of them
_FEW = 8  # legal bytes; of so few each may begin something of its own
_SAME = 64  # texts with the same next bytes: a run may have to be long


def shortest(probe: Probe, known: Sequence[bytes]) -> bytes | None:
    """An ending from where the probe stands, to which it returns; None: none was found.

    `known`: texts that no search finds, such as an address.
    """
    waiting = [(0, 0, b"")]  # bytes, order, text
    order = 0
    seen: dict[bytes, int] = {}
    outset = probe.depth
    try:
        for _ in range(_NODES):
            if not waiting:
                return None
            _, _, text = heapq.heappop(waiting)
            try:
                probe.push(text)
                forced = probe.forced()
                ways = [forced] if forced else _ways(probe, known, seen)
                for way in ways:  # before it is taken: a matcher that has stopped tells nothing
                    if probe.ends(way):
                        return text + way
                probe.pop(text)
            except Broken:
                probe.back(outset)
                continue
            for way in ways:
                order += 1
                heapq.heappush(waiting, (len(text) + len(way), order, text + way))
    except Stuck:
        pass
    finally:
        probe.back(outset)
    return None


def _ways(probe: Probe, known: Sequence[bytes], seen: dict[bytes, int]) -> list[bytes]:
    """The bytes to try from here: all signs, a few of the letters and digits alike."""
    row = probe.row()
    seen[row] = seen.get(row, 0) + 1
    if seen[row] > _SAME:
        return []
    counts = [0] * 4
    ways: list[bytes] = []
    for letter in row.rstrip(b"\xff"):
        kind = _kind(letter)
        counts[kind] += 1
        if kind == 0 or counts[kind] <= _ALIKE or len(row) <= _FEW:
            ways.append(bytes([letter]))
    if len(row) > _FEW:
        ways += [text for text in known if probe.legal(text)]
    return ways + (probe.controls() if row.endswith(b"\xff") else [])


def _kind(letter: int) -> int:
    """Signs, digits, ASCII letters, the rest."""
    if letter >= 0x80:
        return 3
    sign = chr(letter)
    return 1 if sign.isdigit() else 2 if sign.isalpha() else 0
