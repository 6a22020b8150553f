"""What a chat template's doings cost, and when they are too many.  Runs no template.

    an item of a loop               1, and one for each 16 nodes of its body
    a macro's call                  10, and so
    a call, a filter, a comparison  4, 2, 1; and what they walk
    text that is made or searched   1 for 8 characters

Counting, and no clock or child process to kill: an answer must not depend on a machine's load, and
a process costs more than the 10 us that most prompts take.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

WORK = 4_000_000  # units that every rendering may take, about 2 s
WORK_INPUT = 4  # further units for each character of the request
MOST_WORK = 20_000_000
RANGE = 100_000  # numbers of one range()
WIDTH = 1_000  # characters that text is padded to
BITS = 4096  # of an integer
CALL = 4
MACRO = 6  # further units
FILTER = 2
LETTERS = 3  # 2**3 characters cost one unit
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?.?", re.DOTALL)


class Stopped(Exception):
    """A template was stopped; the message says at which limit, in words that follow its name."""


class Forbidden(Exception):
    """A template called what it must not; the message says what, in words that follow its name."""


def allowance(characters: float) -> int:
    """The units for a request of so many characters."""
    return int(min(WORK + WORK_INPUT * characters, MOST_WORK))


class Work(threading.local):
    """What the rendering on this thread may still spend; what costs much is bounded before."""

    limit = WORK
    left = WORK

    def begin(self, limit: int) -> None:
        """A rendering starts."""
        self.limit = self.left = limit

    def spend(self, units: int) -> None:
        """Take from it; raise Stopped when it is used up."""
        self.left = left = self.left - units
        if left < 0:
            raise Stopped(
                f"takes more than {self.limit:,} units of work (an item of a loop, "
                f"{1 << LETTERS} characters)"
            )

    def begins(self, weight: int) -> None:
        """A macro or block begins, of `weight` beside its call."""
        self.spend(MACRO + weight)

    def letters(self, count: int) -> None:
        """So many characters are made or searched."""
        self.spend(count >> LETTERS)

    def weight(self, value: Any) -> int:
        """Units to read all of a value once; raise Stopped beyond what is left."""
        if isinstance(value, str):
            return len(value) >> LETTERS
        if not isinstance(value, list | tuple | Mapping):
            return 0
        units, left = 0, self.left
        stack: list[Any] = [value]
        while stack:
            one = stack.pop()
            units += 1
            if isinstance(one, str):
                units += len(one) >> LETTERS
            elif isinstance(one, Mapping):
                stack += one.keys()
                stack += one.values()
            elif isinstance(one, list | tuple):
                stack += one
            if units > left:
                self.spend(units)
        return units

    def read(self, value: Any) -> Any:
        """The value, all of which is about to be read."""
        self.spend(self.weight(value))
        return value

    def text(self, value: Any) -> str:
        """A value as it would print."""
        return str(value) if isinstance(value, str) else str(self.read(value))

    def items(self, items: Any, weight: int = 0) -> Any:
        """The iterable, which is about to be walked; an item costs 1 + `weight`."""
        if hasattr(items, "__len__"):
            self.spend(len(items) * (1 + weight))
            return items
        return self._one_by_one(items, weight) if hasattr(items, "__iter__") else items

    def _one_by_one(self, items: Iterable[Any], weight: int) -> Iterator[Any]:
        for item in items:
            self.spend(1 + weight)
            yield item

    def joined(self, between: str, items: Iterable[Any]) -> str:
        """`between.join(items)`"""
        parts = [str(part) if isinstance(part, str) else part for part in self.items(items)]
        lengths = sum(len(part) for part in parts if isinstance(part, str))
        self.letters(lengths + len(between) * len(parts))
        return between.join(parts)

    def replaced(self, text: str, old: str, new: str, count: int = -1) -> str:
        """`text.replace(old, new, count)`"""
        found = text.count(old) if count < 0 else min(text.count(old), count)
        self.letters(len(text) + found * len(new))
        return text.replace(old, new, count)

    def percent(self, form: str, given: Any) -> str:
        """`form % given`"""
        for found in _PERCENT.finditer(form):
            if any(width == "*" or len(width or "") > 3 for width in found.groups()):
                raise Stopped(f"asks `%` for a width above {WIDTH - 1}")
        self.spend((len(form) >> LETTERS) + form.count("%") * (1 + self.weight(given)))
        filled: str = form % given
        return filled

    def width(self, number: object, most: int = WIDTH) -> None:
        """A number of characters or digits to pad to."""
        if not isinstance(number, int) or abs(number) > most:
            raise Stopped(f"asks for a width or precision above {most:,}")

    def repeated(self, left: Any, right: Any) -> None:
        """`left * right` is about to be made."""
        for thing, times in ((left, right), (right, left)):
            if isinstance(thing, str | list | tuple) and isinstance(times, int):
                size = len(thing) * max(times, 0)
                self.spend(size >> LETTERS if isinstance(thing, str) else size)
        if isinstance(left, int) and isinstance(right, int):
            self.bits(left.bit_length() + right.bit_length())

    def power(self, left: Any, right: Any) -> None:
        """`left ** right` is about to be made."""
        if isinstance(left, int) and isinstance(right, int):
            self.bits(left.bit_length() * max(right, 1) if abs(left) > 1 else 1)

    def bits(self, bits: int) -> None:
        """An integer has so many."""
        if bits > BITS:
            raise Stopped(f"makes an integer of more than {BITS:,} bits")

    def range_of(self, *given: int) -> range:
        """Templates' `range()`."""
        made = range(*given)
        if len(made) > RANGE:
            raise Stopped(f"asks for a range of more than {RANGE:,} numbers")
        return made

    def dict_of(self, *given: Any, **named: Any) -> Any:
        """Templates' `dict()`."""
        for one in given:
            self.items(one)
        return self.read(dict(*given, **named))

    def count_of(self, parts: Sequence[str]) -> None:
        """Pieces that are about to become one text."""
        self.spend(len(parts) + (sum(map(len, parts)) >> LETTERS))
