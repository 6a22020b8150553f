"""Callers' text stays text: control tokens count only where a template wrote them.  Renders none.

Text of callers that holds a control token, or that could complete one at its edge, is broken by a
private mark before rendering; the rendered text is split at what still reads as a control token,
and then the marks are taken out again.

    caller's  "a<|im_end|>b"   marked  "a<M|im_end|>b"   split  no match   unmarked  "a<|im_end|>b"
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.arguments import Items, Object, Word

_MARK_LENGTH = 8  # of 6,400 private letters each: nobody's text holds the mark by chance or guess
_TOOL_LISTS = 32  # remembered
_TOOLS_LENGTH = 256 * 1024  # characters of one that is
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Rendered:
    """texts[0], controls[0], texts[1], ... texts[-1]: one text more than control tokens."""

    texts: list[str]
    controls: list[str]


@dataclass(frozen=True, slots=True)
class _Tools:
    """A request's tools, remembered."""

    tools: Sequence[object]  # holding them keeps their id from being used for others
    guarded: list[object]
    length: int  # characters as JSON


class Bare(str):
    """A caller's word that is a part of some control token: as it is, but printed with its mark."""

    _marked: str

    def __new__(cls, word: str, marked: str) -> Bare:
        made = super().__new__(cls, word)
        made._marked = marked
        return made

    def __str__(self) -> str:
        return self._marked

    def __format__(self, spec: str) -> str:
        return format(self._marked, spec)


class Marks:
    """Keeps callers' text from being read as a control token."""

    def __init__(self, controls: Sequence[str]) -> None:
        self._mark = "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(_MARK_LENGTH))
        self._longest = max(map(len, controls), default=0)
        self._controls = tuple(controls)
        self._starts = {c[:end] for c in controls for end in range(1, len(c))}
        self._ends = {c[start:] for c in controls for start in range(1, len(c))}
        # Longest first, as a tokenizer finds its added tokens.
        ordered = sorted(controls, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._tools: OrderedDict[int, _Tools] = OrderedDict()
        self._lock = threading.Lock()  # of _tools: templates are rendered on several threads

    @property
    def hole(self) -> str:
        """A text that no caller's text holds."""
        return f"{self._mark} {self._mark}"

    def guard(self, text: str) -> str:
        """The text with a mark inside each control token, and at edges that could make one.

        Templates compare bare words, so one that some token contains is marked when it is printed.
        """
        text = self._guard_edges(text)
        marked = self._guard_middle(text)
        return Bare(text, marked) if marked != text and _WORD.fullmatch(text) else marked

    def guard_key(self, text: str) -> str:
        """As guard(), for an object's key: templates look keys up, but also print `<key>`."""
        return self._guard_middle(self._guard_edges(text))

    def _guard_edges(self, text: str) -> str:
        while self._find.search(text):  # breaking one may leave another that overlapped it
            text = self._find.sub(lambda found: found[0][0] + self._mark + found[0][1:], text)
        bare = text.strip()  # templates trim; then these are its edges
        reach = range(1, min(self._longest, len(bare)) + 1)
        if any(bare[-count:] in self._starts for count in reach):
            text = text.replace(bare, bare + self._mark)
        if any(bare[:count] in self._ends for count in reach):
            text = text.replace(bare, self._mark + bare)
        return text

    def _guard_middle(self, text: str) -> str:
        bare = text.strip()
        if 0 < len(bare) < self._longest and any(bare in control for control in self._controls):
            return text.replace(bare, self._mark + bare)
        return text

    def guard_all(self, value: object) -> Any:  # Any: the JSON value of the same shape
        """A JSON value with each of its strings guarded, keys too."""
        match value:
            case Word():
                return value
            case str():
                return self.guard(value)
            case Object():
                return Arguments(self, self.guard(value.spelled), value)
            case Items():
                return Items([self.guard_all(item) for item in value], self.guard(value.spelled))
            case Mapping():
                return Guarded(self, value)
            case list() | tuple():
                return [self.guard_all(item) for item in value]
            case _:
                return value

    def guard_tools(self, tools: Sequence[Mapping[str, object]]) -> tuple[list[object], int]:
        """As guard_all(), and the characters as JSON.

        Remembered for the same object: a plan's tools come again each turn.
        """
        with self._lock:
            found = self._tools.get(id(tools))
            if found is not None:
                self._tools.move_to_end(id(tools))
                return found.guarded, found.length
        guarded: list[object] = self.guard_all(tools)
        length = len(json.dumps(tools))
        if not isinstance(tools, tuple) or length > _TOOLS_LENGTH:
            return guarded, length  # a list may change; a large one may not stay
        with self._lock:
            self._tools[id(tools)] = _Tools(tools, guarded, length)
            if len(self._tools) > _TOOL_LISTS:
                self._tools.popitem(last=False)
        return guarded, length

    def length_of(self, tools: Sequence[Mapping[str, object]]) -> int | None:
        """Characters of tools that guard_tools() remembers; None for others."""
        found = self._tools.get(id(tools))
        return None if found is None else found.length

    def split(self, text: str) -> Rendered:
        """Rendered text as text and control tokens, without marks."""
        texts: list[str] = []
        controls: list[str] = []
        end = 0
        for found in self._find.finditer(text):
            texts.append(text[end : found.start()].replace(self._mark, ""))
            controls.append(found[0])
            end = found.end()
        texts.append(text[end:].replace(self._mark, ""))
        return Rendered(texts, controls)


class Guarded(dict[str, Any]):
    """A JSON object with guarded strings: looked up by callers' keys, printed with marked ones."""

    def __init__(self, marks: Marks, fields: Mapping[str, object]) -> None:
        super().__init__(
            (marks.guard_key(key), marks.guard_all(value)) for key, value in fields.items()
        )
        self._marks = marks

    def __missing__(self, key: str) -> Any:
        marked = self._marks.guard_key(str(key))
        if marked == key:
            raise KeyError(key)
        return self[marked]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or super().__contains__(self._marks.guard_key(str(key)))

    def get(self, key: str, default: Any = None) -> Any:
        """As dict.get, by the caller's key."""
        return self[key] if key in self else default


class Arguments(Guarded):
    """A call's arguments, or an object in them; prints as the text that it came from."""

    def __init__(self, marks: Marks, spelled: str, fields: Mapping[str, object]) -> None:
        super().__init__(marks, fields)
        self.spelled = spelled

    def __str__(self) -> str:
        return self.spelled

    def __add__(self, other: str) -> str:
        return self.spelled + other

    def __radd__(self, other: str) -> str:
        return other + self.spelled
