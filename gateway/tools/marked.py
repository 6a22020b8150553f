"""Calls as JSON arguments between literals: how they are written, and their grammar.  Reads none.

text  BEGIN OPENING name BETWEEN {arguments} END  AGAIN name BETWEEN {arguments} END  CLOSE

A layout of this kind is data: one `Marks` in one file.  See marked_scanner.py for the way back.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.grammar.schema import embed
from gateway.tools import Choice, Tool
from gateway.tools.chatml import chatml
from gateway.tools.layout import Layout
from gateway.tools.marked_scanner import ID, MarkedScanner, Part, Path

_LETTERS = string.ascii_letters + string.digits


def openai_id() -> str:
    """A call id: unique, not guessable."""
    return "call_" + _letters(24)


def mistral_id() -> str:
    """A call id as Mistral's templates demand it: nine letters and digits."""
    return _letters(9)


def _letters(count: int) -> str:
    """So many letters and digits out of one draw: a system call for each would cost 40 us."""
    drawn, found = secrets.randbelow(len(_LETTERS) ** count), ""
    for _ in range(count):
        drawn, at = divmod(drawn, len(_LETTERS))
        found += _LETTERS[at]
    return found


@dataclass(frozen=True, slots=True)
class Marks:
    """The literals around calls; each may hold control tokens."""

    begin: str  # the trigger, "" = calls open the message
    opening: str  # begin -> the first name
    again: str  # end -> the next name
    between: tuple[Part, ...]  # name -> the `{` of the arguments, with at most one id
    end: str  # the `}` of the arguments -> after the call
    close: str = ""  # after the last call
    other_opening: str = ""  # what may stand in place of `opening`
    other_end: tuple[Part, ...] = ()  # what may stand in place of `end`
    before: str = ""  # a control token that calls may open with elsewhere than `begin` says
    id_shape: str = ID  # of a call's id, by the name and the id that the model wrote
    id_written: str = ""  # Jinja: how the `id` of `call` in history is written, in place of a Span
    mint: Callable[[], str] = openai_id  # for calls whose id the model does not write


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked(Layout):
    """A format of this kind."""

    marks: Marks
    template: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "template", chatml(_jinja(self.marks)))

    @property
    def begin(self) -> str:
        """The trigger: a text, or a control token's name."""
        return self.marks.begin or (self.marks.before if self._before() else "")

    @property
    def opening(self) -> str:
        """What free text cannot start with."""
        return "" if self.marks.begin else self.marks.opening

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them."""
        marks = self.marks
        texts: list[str] = []
        for at, (name, arguments) in enumerate(calls):
            texts.append(marks.again if at else marks.begin + marks.opening)
            texts.append(name)
            texts += (p if isinstance(p, str) else f"{at:0{p.low}d}" for p in marks.between)
            texts += arguments, marks.end
        return "".join(texts) + marks.close if texts else ""

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """Lark text; see Format.grammar.

        The tool's name comes before its `%json`, so that alternatives differ early and each `%json`
        keeps its own `$defs`.  After a call only a joined call or the end may follow: the next
        turn's prompt could not re-print text there in its place.
        """
        marks, lark = self.marks, self.control.lark
        opening, again, inside = marks.opening, marks.again, ""
        if not marks.begin and answer is not None:  # one lexer reads both: in the answer's words
            opening, again, inside = "", again.removesuffix(opening), opening
        first = lark(opening)
        if marks.other_opening:
            first = f"({first} | {lark(marks.other_opening)})"
        more = f"({lark(again)} tool)*" if parallel and choice != "named" else ""
        end = lark(marks.end)
        if marks.other_end:
            end = f"({end} | {self._lark(marks.other_end)})"
        lines = [
            *self._starts(choice, answer),
            f"calls: {first} tool {more} {lark(marks.close)}",
            "tool: " + " | ".join(f"tool_{i}" for i in range(len(tools))),
        ]
        for i, tool in enumerate(tools):
            head = self._lark([tool.name, *marks.between])
            if inside:
                head = _lexemes(inside + tool.name + "".join(map(str, marks.between)))
            lines.append(f"tool_{i}: {head} %json {embed(tool.parameters)} {end}")
        return "\n".join(lines) + "\n"

    def _starts(self, choice: Choice, answer: Mapping[str, object] | None) -> list[str]:
        begin = self.control.lark(self.marks.begin)
        before = self._before()
        calls = f"{begin} calls" + (f" | {before} calls" if before else "")
        if choice != "auto":
            return [f"start: {calls}"]
        if answer is not None:
            return [f"start: {calls} | answer", f"answer: %json {embed(answer)}"]
        if not begin:  # the opening cannot be text; elsewhere it is
            later = f" | TEXT {before} calls" if before else ""
            text = f"/(.|\\n)*/ & ~/{_regex(self.marks.opening)}(.|\\n)*/"
            return [f"start: TEXT | calls{later}", f"TEXT: {text}"]
        return self._free(self.marks.begin, "calls")

    def _before(self) -> str:
        """The control token that may open calls, as Lark; empty when the vocabulary has none."""
        return self.control.lark(self.marks.before) if self.marks.before in self.control.ids else ""

    def _lark(self, parts: Iterable[Part]) -> str:
        """Parts as Lark, neighbouring literals as one."""
        terms: list[str] = []
        literal = ""
        for part in parts:
            if isinstance(part, str):
                literal += part
            else:
                terms += self.control.lark(literal), f"/[{part.letters}]{{{part.low},{part.high}}}/"
                literal = ""
        return " ".join([*terms, self.control.lark(literal)])

    def scanner(self, tools: Sequence[Tool] = ()) -> MarkedScanner:
        """A fresh scanner for one choice."""
        marks, seen = self.marks, self.control.seen
        between = tuple(seen(p) if isinstance(p, str) else p for p in marks.between)
        openings = [seen(marks.opening)] + ([marks.other_opening] if marks.other_opening else [])
        ends = [(seen(marks.end),)] + ([marks.other_end] if marks.other_end else [])
        return MarkedScanner(
            Path(
                begin=seen(self.begin),
                openings=tuple(openings),
                first="" if marks.begin else marks.opening,
                again=seen(marks.again),
                close=seen(marks.close),
                between=(*between, "{"),
                ends=tuple(ends),
                id_shape=marks.id_shape,
            ),
            marks.mint,
        )


def _regex(literal: str) -> str:
    """A literal as a regex of Lark's."""
    return "".join(letter if letter.isalnum() else f"\\x{ord(letter):02x}" for letter in literal)


def _lexemes(literal: str) -> str:
    """A start of JSON text as Lark, cut as llguidance cuts JSON: its lexer never goes back."""
    pieces, at = list[str](), 0
    while at < len(literal):
        stop = at + 1
        if literal[at] == '"':
            stop = literal.index('"', stop) + 1
        elif literal.startswith((", ", ": "), at):
            stop += 1
        pieces.append(literal[at:stop])
        at = stop
    return " ".join(map(json.dumps, pieces))


def _jinja(marks: Marks) -> str:
    """The body of a macro that prints `calls` as write() does."""

    def shown(literal: str) -> str:
        return "{{- " + json.dumps(literal, ensure_ascii=False) + " -}}"

    between = "".join(
        shown(part) if isinstance(part, str) else "{{- " + marks.id_written + " -}}"
        for part in marks.between
    )
    first = f"{{%- if loop.first -%}}{shown(marks.begin + marks.opening)}"
    return (
        f"{{%- for call in calls -%}}{first}{{%- else -%}}{shown(marks.again)}{{%- endif -%}}"
        f"{{{{- call.name -}}}}{between}{{{{- call.arguments -}}}}{shown(marks.end)}"
        f"{{%- endfor -%}}{shown(marks.close)}"
    )
