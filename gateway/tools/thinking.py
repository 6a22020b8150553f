"""A leading `<think>` section around any layout (Qwen3, GLM, DeepSeek R1).  Knows no layout.

    <think>reasoning</think>text and calls

Where the chat template already wrote `<think>`, the output begins inside of the section; GLM-4.5
writes a line break before it.  What looks like a call in there is reasoning: the layout's grammar
and scanner begin behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

from engine.grammar.schema import Dropped, embed
from engine.messages import Grammar
from gateway.events import Event, Reasoning, Text
from gateway.tools import Choice, Format, Scanner, Tool
from gateway.tools.control import without
from gateway.tools.held import overlap

OPEN, CLOSE = "<think>", "</think>"
_STAND_INS = {OPEN: "\udffe", CLOSE: "\udfff"}  # far from those of the layouts' own markers
_ANY = "/(.|\\n)*/"
_EITHER = "start: thought | inner"
_BEHIND = "start: thought_rest"


@dataclass(frozen=True, slots=True)
class Thinking:
    """A layout whose model thinks first; see gateway.tools.Format for what each member means."""

    layout: Format
    ids: tuple[tuple[str, int], ...] = ()  # of the section's marks that are control tokens

    framed = True

    @property
    def name(self) -> str:
        """The layout's."""
        return self.layout.name

    @property
    def signature(self) -> Sequence[str]:
        """The layout's and the end of a section."""
        return (*self.layout.signature, CLOSE)

    @property
    def markers(self) -> Sequence[str]:
        """The layout's and the section's."""
        return (*self.layout.markers, OPEN, CLOSE)

    @property
    def stand_ins(self) -> Mapping[int, str]:
        """For the Detokenizer."""
        return {**self.layout.stand_ins, **{id: _STAND_INS[mark] for mark, id in self.ids}}

    @property
    def begin(self) -> str:
        """The layout's trigger; none where the layout needs the start of the message itself."""
        return "" if self.layout.opening else self.layout.begin

    @property
    def opening(self) -> str:
        """A section is no free text before the trigger."""
        return OPEN if self.begin else ""

    @property
    def example(self) -> str:
        """The layout's."""
        return self.layout.example

    @property
    def template(self) -> str:
        """The layout's."""
        return self.layout.template

    def bound(self, special: Mapping[str, int]) -> Thinking:
        """The same format for a vocabulary."""
        ids = tuple((mark, special[mark]) for mark in (OPEN, CLOSE) if mark in special)
        return replace(self, layout=self.layout.bound(special), ids=ids)

    def unenforced(self, tool: Tool) -> Sequence[Dropped]:
        """The layout's."""
        return self.layout.unenforced(tool)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them."""
        return self.layout.write(calls)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """Lark text; see Format.grammar.  No `tools`: only an answer."""
        if tools:
            lark = self.layout.grammar(tools, choice, parallel, answer)
        else:
            lark = f"start: %json {embed(answer or {})}\n"
        first, _, rest = lark.partition("\n")
        assert first.startswith("start: "), "a layout's grammar begins with its start"
        free = choice == "auto" and answer is None
        if free and OPEN not in dict(self.ids):
            rest = "\n".join(map(_unopened, rest.split("\n")))
        inner = f"inner: {first.removeprefix('start: ')}"
        return "\n".join([_EITHER, inner, *self._thoughts(free=free), rest])

    def _thoughts(self, *, free: bool) -> Sequence[str]:
        """The rules of a section; `free`: the output may also end within it."""
        ids = dict(self.ids)
        # As text it is one lexeme: the longest is taken, and free text may begin with a line break.
        opening = f'<[{ids[OPEN]}]> | "\\n" <[{ids[OPEN]}]>' if OPEN in ids else f"/\\n?{OPEN}/"
        if CLOSE in ids:
            rules = [f"closed: THOUGHT <[{ids[CLOSE]}]>", f"THOUGHT: {_ANY}"]
        else:
            without_end = f"{_ANY} & ~/(.|\\n)*{CLOSE.replace('/', chr(92) + '/')}(.|\\n)*/"
            rules = [f'closed[lazy]: {_ANY} "{CLOSE}"', f"THOUGHT: {without_end}"]
        ways = "closed inner | THOUGHT" if free else "closed /[ \\n]{0,4}/ inner"
        return [f"thought: ({opening}) thought_rest", f"thought_rest: {ways}", *rules]

    def scanner(self, tools: Sequence[Tool] = ()) -> ThinkingScanner:
        """A fresh scanner for one choice; without tools nothing is a call."""
        return self.scanner_from(tools, inside=False)

    def scanner_from(self, tools: Sequence[Tool], *, inside: bool) -> ThinkingScanner:
        """The same, `inside` of a section from the start or not."""
        marks = [_STAND_INS[mark] if mark in dict(self.ids) else mark for mark in (OPEN, CLOSE)]
        layout = self.layout.scanner(tools) if tools else None
        return ThinkingScanner(layout, marks[0], marks[1], inside=inside)


def _unopened(rule: str) -> str:
    """A rule of free text, which cannot start with a section."""
    if rule.startswith(("TEXT:", "head")):
        return rule.replace(_ANY, f"({_ANY} & ~/\\n?{OPEN}(.|\\n)*/)", 1)
    return rule


def thinking(layout: Format, template: str | None) -> Format:
    """The layout, for a model whose chat template tells of sections or not."""
    return Thinking(layout) if template and CLOSE in template and not layout.framed else layout


def behind(grammar: Grammar | None) -> Grammar | None:
    """The grammar for an output that begins inside of a section, which then must end first."""
    if grammar is None or not grammar.lark.startswith(_EITHER):
        return grammar
    lark = grammar.lark.replace(_EITHER, _BEHIND, 1)
    return Grammar(lark, grammar.param, CLOSE)


def scanner_of(layout: Format, tools: Sequence[Tool], *, inside: bool) -> Scanner:
    """A fresh scanner; `inside`: the prompt ends within a section."""
    if isinstance(layout, Thinking):
        return layout.scanner_from(tools, inside=inside)
    return layout.scanner(tools)


class ThinkingScanner:
    """See gateway.tools.Scanner: the section is reasoning, what follows is the layout's."""

    def __init__(self, layout: Scanner | None, opening: str, closing: str, *, inside: bool) -> None:
        """`layout`: reads what follows; None when that is only text."""
        self._layout = layout
        self._opening = opening
        self._closing = closing
        self._step: Literal["start", "inside", "gap", "out"] = "inside" if inside else "start"
        self._held = ""
        self._begun = False  # some reasoning was sent: line breaks before it mean nothing

    def __copy__(self) -> ThinkingScanner:
        other = ThinkingScanner(copy(self._layout), self._opening, self._closing, inside=False)
        other._step, other._held, other._begun = self._step, self._held, self._begun
        return other

    @property
    def watched(self) -> bytes | None:
        """The layout's, behind the section."""
        if self._step != "out":
            return None
        return b"\n" if self._layout is None else self._layout.watched  # in no JSON text

    @property
    def call(self) -> int:
        """The layout's."""
        return -1 if self._layout is None else self._layout.call

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text; return what is certain now."""
        if self._step == "out":
            return self._outside(text)
        self._held += text
        events: list[Event] = []
        if self._step == "start":
            self._start()
        if self._step == "inside":
            self._think(events)
        if self._step == "gap":
            self._held = self._held.lstrip("\n")
            self._step = "out" if self._held else "gap"
        if self._step == "out":
            rest, self._held = self._held, ""
            events += self._outside(rest)
        return events

    def close(self) -> list[Event]:
        """No more text comes: what was held back is what the section says."""
        rest, self._held = self._held, ""
        if self._step == "inside":
            thought = without(rest)
            return [Reasoning(thought)] if thought else []
        events = self._outside(rest) if rest else []
        return events + (self._layout.close() if self._layout is not None else [])

    def _start(self) -> None:
        held = self._held.removeprefix("\n")
        if held.startswith(self._opening):
            self._held = held[len(self._opening) :]
            self._step = "inside"
        elif not self._opening.startswith(held):
            self._step = "out"

    def _think(self, events: list[Event]) -> None:
        at = self._held.find(self._closing)
        keep = at if at >= 0 else len(self._held) - overlap(self._held, self._closing)
        thought = without(self._held[:keep])
        if not self._begun:
            thought = thought.lstrip("\n")
        if thought:
            self._begun = True
            events.append(Reasoning(thought))
        self._held = self._held[keep:]
        if at >= 0:
            self._held = self._held[len(self._closing) :]
            self._step = "gap"

    def _outside(self, text: str) -> list[Event]:
        if self._layout is not None:
            return self._layout.push(text)
        shown = without(text)
        return [Text(shown)] if shown else []
