"""How much work a schema would be for llguidance, counted beforehand.  Compiles nothing.

llguidance 1.9.1 bounds most of its work by itself, but not all: the counts here stand for what it
does not bound.  A unit is 0.1 ms of checking and compiling, about what five plain subschemas take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from engine.grammar.verdict import Document, Node

DIVISOR_LIMIT = 100_000  # a `multipleOf`: llguidance needs 0.7 s there, with its square
LEAST_LIMIT = 10_000  # characters that a pattern asks for: 10 ms and 3 MB; 2 s and 480 MB at 10^6
AT_ONCE = 10  # rules for one text: 5 ms; each one more doubles it, and nothing stops it
WAYS_LIMIT = 5_000  # that alternatives of several keywords combine to: 0.2 s

_FORMATS = {"uri": 6, "date-time": 6, "date": 3, "ipv6": 3, "email": 2, "time": 1, "duration": 1,
            "uuid": 1, "ipv4": 1}  # fmt: skip
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_PATTERN_UNIT = 50  # characters


def units(key: str, value: str | float) -> int:
    """What a keyword's value costs beside its subschema."""
    if isinstance(value, str):
        cost = len(value) // _PATTERN_UNIT if key == "pattern" else 0
        return _FORMATS.get(value, 0) if key == "format" else cost
    if isinstance(value, bool):
        return 0
    if key == "multipleOf":
        found = coefficient(value)
        return found * found // 2_000_000 if found <= DIVISOR_LIMIT else 0
    if key in _BOUNDS:
        digits = len(Decimal(repr(value)).as_tuple().digits)
        return digits * digits // 72 if isinstance(value, int) else digits // 9
    return 0


def coefficient(number: float) -> int:
    """The digits of a decimal number as a whole number; 1 for powers of ten."""
    exact = Decimal(repr(number)) if isinstance(number, float) else Decimal(number)
    digits = exact.as_tuple().digits
    found = int("".join(map(str, digits[:20])))
    return 1 if str(found).rstrip("0") == "1" else found


def least(pattern: str) -> int:
    """How many characters a pattern asks for at least; of alternatives, all together.

    Read once from the left; what is no pattern gives some number.
    """
    sums, last, at = [0], 0, 0  # of the groups that are open; of the piece before
    while at < len(pattern):
        sign = pattern[at]
        if sign == "{" and (count := _count(pattern, at)) is not None:
            last, at = last * count, pattern.index("}", at) + 1
            continue
        if sign in "*?":
            last = 0
        elif sign == ")" and len(sums) > 1:
            last += sums.pop()
        elif sign != "+":
            sums[-1] += last
            last = 0 if sign in "(|^$" else 1
            if sign == "(":
                sums.append(0)
        at = _behind(pattern, at)
    return sums[-1] + last if len(sums) == 1 else sum(sums) + last


def _count(pattern: str, at: int) -> int | None:
    """The smaller number of `{2,5}` at this place; None when there is no such thing."""
    number, comma, more = pattern[at + 1 : at + 24].partition("}")[0].partition(",")
    if not number.isdecimal() or (comma and more and not more.isdecimal()):
        return None
    return int(number[:9]) if "}" in pattern[at : at + 24] else None


def _behind(pattern: str, at: int) -> int:
    """The place behind the sign, escape or class that begins here."""
    if pattern[at] == "\\":
        braced = pattern[at + 1 : at + 3] in ("p{", "P{", "x{", "u{")
        end = pattern.find("}", at) if braced else -1
        return end + 1 if end >= 0 else at + 2
    if pattern[at] != "[":
        return at + 1
    at += 2 if pattern[at + 1 : at + 2] == "^" else 1
    at += pattern[at : at + 1] == "]"  # one that comes first stands for itself
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


@dataclass(frozen=True, slots=True)
class _Rules:
    """How many rules hold at once: for a text that stands here, and at most for one below."""

    own: int = 0
    names: Mapping[str, int] = field(default_factory=dict)  # property -> at most below it
    other: int = 0  # at most below anything else
    ways: int = 1  # alternatives, each combined with each

    @property
    def crowded(self) -> bool:
        return self.most > AT_ONCE or self.ways > WAYS_LIMIT

    @property
    def most(self) -> int:
        return max(self.own, self.other, max(self.names.values(), default=0))

    def below(self, name: str) -> int:
        return self.names.get(name, self.other)


_NONE = _Rules()


def crowds(document: Document) -> Iterator[tuple[str, str]]:
    """(pointer, keyword) of what would keep llguidance busy for ever.

    The keyword counts as gone from there on.  An estimate that is never too low: `$ref`s back to
    where they stand add nothing, since rules that are there already hold only once.
    """
    known: dict[str, _Rules] = {}
    stack = [("", False)]
    while stack:
        pointer, ready = stack.pop()
        if not ready:
            if pointer not in known:
                known[pointer] = _NONE  # while those below are counted
                stack.append((pointer, True))
                stack += ((at, False) for at in _parts(document, pointer))
            continue
        node = document.nodes[pointer]
        adding = [key for key in ("allOf", "$ref", "anyOf", "oneOf") if key in node]
        rules = _rules(document, pointer, adding, known)
        while rules.crowded and adding:
            yield pointer, adding.pop(0)
            rules = _rules(document, pointer, adding, known)
        known[pointer] = rules


def _parts(document: Document, pointer: str) -> list[str]:
    parts = list(document.children.get(pointer, ()))
    return [*parts, document.refs[pointer]] if pointer in document.refs else parts


def _rules(
    document: Document, pointer: str, adding: Sequence[str], known: Mapping[str, _Rules]
) -> _Rules:
    """The rules of one subschema, of its applicators only those in `adding`."""
    node = document.nodes[pointer]
    names: dict[str, int] = {}
    other = 0
    groups: dict[str, list[_Rules]] = {}
    for at in document.children.get(pointer, ()):
        key, _, name = at[len(pointer) + 1 :].partition("/")
        if key in ("allOf", "anyOf", "oneOf"):
            groups.setdefault(key, []).append(known[at])
        elif key == "properties":
            names[name] = known[at].most
        elif key not in ("$defs", "definitions"):
            other = max(other, known[at].most)
    if pointer in document.refs:
        groups["$ref"] = [known[document.refs[pointer]]]
    rules = _Rules(_own(node), names, other)
    for key in adding:
        found = groups.get(key, [])
        if key == "allOf":
            for one in found:
                rules = _merged(rules, one, int.__add__)
            continue
        either = _NONE
        for one in found:
            either = _merged(either, one, max)
        ways = min(max(sum(one.ways for one in found), 1), WAYS_LIMIT)
        rules = _merged(rules, replace(either, ways=ways), int.__add__)
    return rules


def _own(node: Node) -> int:
    """Rules for a text that the subschema states itself; a format is a pattern or two."""
    lengths = "minLength" in node or "maxLength" in node
    return int("pattern" in node) + int("format" in node) + int(lengths)


def _merged(one: _Rules, two: _Rules, how: Callable[[int, int], int]) -> _Rules:
    ways = one.ways * two.ways
    if not two.most:
        return replace(one, ways=ways)
    if not one.most:
        return replace(two, ways=ways)
    names = {
        name: how(one.below(name), two.below(name)) for name in {**one.names, **two.names}
    }
    return _Rules(how(one.own, two.own), names, how(one.other, two.other), ways)
