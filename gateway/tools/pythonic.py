"""The pythonic layout (Llama 4, Llama 3.2): calls as a Python list.  Evaluates nothing.

    [add(a=1, b=2), lamp_on()]

Llama 4 may write `<|python_start|>` before the list and `<|python_end|>` behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.grammar.schema import Dropped, embed
from gateway.tools import Choice, Tool
from gateway.tools.chatml import chatml
from gateway.tools.layout import Layout
from gateway.tools.literals import Literals, literal
from gateway.tools.pythonic_scanner import NO_KEY, PythonicScanner
from gateway.tools.values import Schema, members

START, END = "<|python_start|>", "<|python_end|>"
FORBIDDEN = NO_KEY | set(" \t\r\n")  # in a parameter's name

_WRITTEN = (
    "{{- '[' -}}{%- for call in calls -%}{{- '' if loop.first else ', ' -}}{{- call.name -}}"
    "{{- '(' -}}{%- for one in call.arguments | pairs -%}{{- '' if loop.first else ', ' -}}"
    "{{- one.key -}}{{- '=' -}}{{- one.literal -}}{%- endfor -%}{{- ')' -}}{%- endfor -%}"
    "{{- ']' -}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pythonic(Layout):
    """The format."""

    begin = ""  # a list's name of a tool ends free text: no single literal does
    template = chatml(_WRITTEN, "a Python list of calls")

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them."""
        written = [
            f"{name}({', '.join(f'{k}={literal(json.loads(v))}' for k, v in members(arguments))})"
            for name, arguments in calls
        ]
        return f"[{', '.join(written)}]" if written else ""

    def unenforced(self, tool: Tool) -> list[Dropped]:
        """What of a tool's parameters the grammar cannot promise in this layout."""
        return list(Schema(tool.parameters, FORBIDDEN).unwritable())

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """Lark text; see Format.grammar.

        In free text a list begins with the name of a tool: `[1]` and `[x](y)` are text.
        """
        more = '(", " call)*' if parallel and choice != "named" else ""
        lists = '"[" call more "]"'
        ways = [lists]
        if START in self.control.ids:
            ways.append(f"{self.control.lark(START)} {lists} {self.control.lark(END)}".rstrip())
        lines: list[str] = []
        if choice == "auto" and answer is None:
            heads = [f'head_{i} args_{i} ")" more "]"' for i in range(len(tools))]
            marked = [f"TEXT {way}" for way in ways[1:]]
            lines += [f"start: {' | '.join(['TEXT', *heads, *marked])}", "TEXT: /(.|\\n)*/"]
            for i, tool in enumerate(tools):
                lines.append(f'head_{i}[lazy]: /(.|\\n)*/ "[{tool.name}("')
        elif choice == "auto":
            lines += [f"start: {' | '.join(ways)} | answer", f"answer: %json {embed(answer or {})}"]
        else:
            lines.append(f"start: {' | '.join(ways)}")
        lines.append(f"more: {more or chr(34) * 2}")
        calls = (f'"{tool.name}(" args_{i} ")"' for i, tool in enumerate(tools))
        lines.append(f"call: {' | '.join(calls)}")
        for i, tool in enumerate(tools):
            schema = Schema(tool.parameters, FORBIDDEN)
            literals = Literals(f"p{i}", schema)
            lines += literals.chain(f"args_{i}", schema.params(), lambda name: f"{name}=")
            lines += literals.lines()
        return "\n".join(lines) + "\n"

    def scanner(self, tools: Sequence[Tool] = ()) -> PythonicScanner:
        """A fresh scanner for one choice; literals show their types themselves."""
        return PythonicScanner(frozenset(tool.name for tool in tools))


FORMAT = Pythonic(
    name="pythonic", signature=("[func_name1(params_name1=",), markers=(START, END)
)
