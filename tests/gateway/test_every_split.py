"""What a layout writes is read back at every two-way split, by bytes and by tokens.  No engine.

    EVERY_SPLIT=5000 python -m pytest tests/gateway/test_every_split.py

reads more and longer outputs.
"""

from __future__ import annotations

import json
import os
import random
from copy import copy
from typing import Any

import pytest

from gateway.choices import joined
from gateway.events import CallStart, Event
from gateway.tools import FORMATS
from tests import calls
from tests.calls import Dialect, dialect, scan
from tests.outputs import TOOLS, Saying, decoder, merged, saying, says

COUNT = int(os.environ.get("EVERY_SPLIT", "500"))
LONGEST = 3 if COUNT <= 500 else 24  # words of a string
WAYS = [(name, bound) for name in FORMATS for bound in (False, True)]
IDS = [f"{name}-{'bound' if bound else 'text'}" for name, bound in WAYS]


def halves(said: Dialect, tokens: list[int]) -> set[tuple[str, str]]:
    """The texts of both sides of every cut; a token is a byte or a control token."""
    found = set[tuple[str, str]]()
    whole, so_far, reader = said.text(tokens), "", decoder(said)
    for cut in range(len(tokens) + 1):
        if reader.pending:  # amid a letter
            first, second = decoder(said), decoder(said)
            found.add((first.push(tokens[:cut]), whole[len(so_far) :]))
            text = second.push(tokens[:cut]) + second.push(tokens[cut:])
            assert text + second.close() == whole
        else:
            found.add((so_far, whole[len(so_far) :]))
        so_far += reader.push(tokens[cut : cut + 1])
    return found


def check(one: Saying, seen: str, wanted: list[Any], rng: random.Random) -> int:
    """Read one output at every split; return at how many."""
    tokens, fresh = one.said.tokens(seen), one.said.fmt.scanner(TOOLS)
    right: set[Any] = set()

    def judge(events: list[Event], *pieces: str) -> None:
        found = merged(events)
        if found not in right:
            assert says(found, one.verbatim) == wanted, pieces
            right.add(found)

    pairs = halves(one.said, tokens)
    for first, second in pairs:
        scanner = copy(fresh)
        judge([*scanner.push(first), *scanner.push(second), *scanner.close()], first, second)
    # Tokens of one to five bytes: those before the cut come one by one, the rest at once.
    reader, scanner, pieces, at = decoder(one.said), copy(fresh), list[str](), 0
    while at < len(tokens):
        size = rng.randint(1, 5)
        pieces.append(reader.push(tokens[at : at + size]))
        at += size
    events: list[Event] = []
    for count, piece in enumerate(pieces, 1):
        events = joined(events + scanner.push(piece))
        rest = copy(scanner)
        judge([*events, *rest.push("".join(pieces[count:])), *rest.close()], *pieces[:count])
    judge(events + scanner.close(), *pieces)
    return len(pairs) + len(pieces)


@pytest.mark.timeout(60 if COUNT <= 500 else 3600)
@pytest.mark.parametrize(("name", "bound"), WAYS, ids=IDS)
def test_what_was_written_is_read_back_at_every_split(name: str, bound: bool) -> None:
    rng, splits, kinds = random.Random(name), 0, set[str]()
    ways = [saying(name, bound, thinks) for thinks in (False, True)[: 1 + (name != "harmony")]]
    for one in ways:
        for seen, wanted in one.outputs("splits", COUNT // len(ways), LONGEST):
            if not one.verbatim:  # arguments are made by the scanner: their values count
                wanted = [[part[0], json.loads(part[1])] if isinstance(part, list) else part
                          for part in wanted]  # fmt: skip
            splits += check(one, seen, wanted, rng)
            kinds |= {type(part).__name__ for part in wanted}
    assert splits > 30 * COUNT
    assert kinds == {"Reasoning", "str", "list"}


def head_of(said: Dialect) -> tuple[str, int, int]:
    """A call as the scanner sees it, where its name begins, and where it is known to be one."""
    seen = said.written([("add", '{"a": 1, "b": 2}')])
    scanner = said.fmt.scanner(TOOLS)
    for at, letter in enumerate(seen):
        if any(isinstance(event, CallStart) for event in scanner.push(letter)):
            name = seen.index("add")
            # Behind a channel's name a header may say what it wants.
            return seen, name, seen.index("commentary") + 9 if said.fmt.name == "harmony" else at
    raise AssertionError("no call")


@pytest.mark.parametrize(("name", "bound"), WAYS, ids=IDS)
def test_what_only_begins_like_a_call_is_text(name: str, bound: bool) -> None:
    said = dialect(name, bound)
    call, _, known = head_of(said)
    closed = ["add", '{"a": 1, "b": 2}', "closed"]
    for size in range(1, known + 1):
        part = call[:size]
        shown = "".join(letter for letter in part if letter not in said.fmt.stand_ins.values())
        if not (name == "harmony" and bound):  # a header that was cut says nothing
            assert calls.joined(scan(said.fmt, list(part), TOOLS)) == [shown] * bool(shown), part
        for other in ("#", " #", "\n#"):
            if call[size : size + 1] == other[0]:
                continue
            text = part + other
            whole = text + said.written([("add", closed[1])], "x")[1:] if said.fmt.begin else text
            want = [shown + other] + [closed] * bool(said.fmt.begin)
            for cut in range(len(text) + 3):
                found = calls.joined(scan(said.fmt, [whole[:cut], whole[cut:]], TOOLS))
                assert found == want, (whole, cut)


@pytest.mark.parametrize(("name", "bound"), WAYS, ids=IDS)
def test_a_call_with_one_wrong_letter_in_its_head_is_text(name: str, bound: bool) -> None:
    said = dialect(name, bound)
    call, begin, known = head_of(said)
    for at in range(known):
        changed = [call[:at] + "#" + call[at + 1 :]]
        if not begin <= at < begin + 3 and call[at] != call[at + 1]:
            changed.append(call[:at] + call[at + 1 :])
        for text in changed:
            shown = "".join(one for one in text if one not in said.fmt.stand_ins.values())
            for pieces in ([text], list(text), [text[: at + 1], text[at + 1 :]]):
                assert calls.joined(scan(said.fmt, pieces, TOOLS)) == [shown], text


def test_what_only_python_spells_so_is_read_alike_at_every_split() -> None:
    said = dialect("pythonic", False)
    text = (
        r"""[note(text='a\x41\101\7.\u00e9\U0001F30A\'"\n\q', more="it's \"x\" \xZ \u12"),"""
        r""" a-b_C9(flag=True, list=[1_0, 0x1F, None, (1, 2,), {'k': -1.5}])]"""
    )
    want = [
        ["note", {"text": "aAA\x07.é🌊'\"\n\\q", "more": "it's \"x\" \\xZ \\u12"}],
        ["a-b_C9", {"flag": True, "list": [10, 31, None, [1, 2], {"k": -1.5}]}],
    ]
    for cut in range(len(text) + 1):
        for pieces in ([text[:cut], text[cut:]], [*text[:cut], text[cut:]]):
            assert says(merged(scan(said.fmt, pieces, TOOLS)), False) == want, pieces
