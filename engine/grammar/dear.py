"""Whether a text costs a grammar's lexer so much that walking over guesses uses up its fuel.

A lexer gets fuel from mask to mask, and makes a state for each byte that is new to it.  Where two
counts run side by side, as in "at most thirty words and at most a thousand characters", a state is
as large as one count and there are as many as the product: a mask and thirty guessed tokens may be
more than the fuel for both, and a lexer that ran out refuses all that is new, to every sequence of
the grammar.  Such a grammar is guessed for no further than it dictates.  Compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import prod
from typing import Any

DEAR = 4_000  # product of counts; of the one above, 9,000, thirty-one tokens were just not too many
_SCHEMA = re.compile(r"%json ")
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_LENGTHS = ("maxLength", "minLength")
_JSON = json.JSONDecoder()


def dear(lark: str) -> bool:
    """Whether some string of a grammar's schemas has counts side by side that are large."""
    for line in lark.splitlines():
        at = 0
        while found := _SCHEMA.search(line, at):
            schema, at = _JSON.raw_decode(line, found.end())
            if any(_large(node) for node in _nodes(schema)):
                return True
    return False


def _large(node: dict[str, Any]) -> bool:
    counts = _counts(node)
    for one in node.get("allOf", ()) if isinstance(node.get("allOf"), list) else ():
        counts += _counts(one) if isinstance(one, dict) else []
    return len(counts) > 1 and prod(counts) > DEAR


def _counts(node: dict[str, Any]) -> list[int]:
    """The counts of one schema, above one: of its pattern, and its longest length."""
    found = list[int]()
    if isinstance(pattern := node.get("pattern"), str):
        found += [int(most or least) for least, most in _COUNT.findall(pattern)]
    lengths = [node[key] for key in _LENGTHS if isinstance(node.get(key), int)]
    found += [max(lengths)] if lengths else []
    return [count for count in found if count > 1]


def _nodes(value: object) -> Iterator[dict[str, Any]]:
    """Every object in a schema, whatever it stands for."""
    left = [value]
    while left:
        match left.pop():
            case dict() as node:
                yield node
                left += node.values()
            case list() as several:
                left += several
