"""Reading and checking tool calls in tests: events, splits, grammars over bytes.  Tests nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from engine.grammar.matcher import Compiler
from engine.messages import Grammar
from gateway.events import CallArgs, CallEnd, CallStart, Event, Text
from gateway.tools import Format, load
from tests.scripted import EOS, byte_tokenizer_json

HERMES = load("hermes")


@cache
def byte_compiler() -> Compiler:
    return Compiler(byte_tokenizer_json(), 259, [EOS])


def scan(fmt: Format, pieces: Iterable[str]) -> list[Event]:
    scanner = fmt.scanner()
    return [event for piece in pieces for event in scanner.push(piece)] + scanner.close()


def joined(events: Sequence[Event]) -> list[Any]:
    """Events with neighbouring pieces joined and call ids left out; checks the order rules."""
    out: list[Any] = []
    ids, open_call = set(), None
    for event in events:
        match event:
            case Text(text=text):
                assert text and open_call is None
                if out and isinstance(out[-1], str):
                    out[-1] += text
                else:
                    out.append(text)
            case CallStart(index=index, id=call_id, name=name):
                assert open_call is None and index == len(ids) and call_id not in ids
                ids.add(call_id)
                open_call = [name, "", "open"]
                out.append(open_call)
            case CallArgs(index=index, text=text):
                assert text and open_call is not None and index == len(ids) - 1
                open_call[1] += text
            case CallEnd(index=index):
                assert open_call is not None and index == len(ids) - 1
                open_call[2] = "closed"
                open_call = None
            case _:
                raise TypeError(event)
    return out


def splits(text: str, rng: random.Random) -> Iterable[list[str]]:
    yield [text]
    yield list(text)
    yield from ([text[:cut], text[cut:]] for cut in range(1, len(text)))
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 9)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def takes(compiler: Compiler, lark: str, text: str) -> bool:
    """Whether the text is a whole output of the grammar."""
    state = compiler.compile(Grammar(lark)).start()
    raw = list(text.encode())
    return state.accept_all(raw) == len(raw) and state.accepting
