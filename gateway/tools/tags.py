"""Calls with each parameter between tags: how they are written, and their grammar.  Reads none.

text  BEGIN HEAD name NAMED  KEY k KEYED value STOP GAP ...  END  JOINT HEAD name ...  CLOSE

A string is raw text, any other value JSON; the tool's schema says which.  A layout of this kind is
data: one `Tags` in one file.  Undeclared parameters are never written.  See tags_scanner.py for the
way back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.grammar.schema import Dropped, embed
from gateway.tools import Choice, Tool
from gateway.tools.chatml import chatml
from gateway.tools.layout import Layout
from gateway.tools.tags_scanner import Seen, TagsScanner
from gateway.tools.texts import Texts
from gateway.tools.values import Param, Schema, members, pointer, raw


@dataclass(frozen=True, slots=True)
class Tags:
    """The literals around calls and values; `begin` to `end` may hold control tokens.

    A text's closing literal begins with a letter that is nowhere else in it, or is a control token.
    """

    begin: str  # the trigger
    head: str  # -> the name
    named: str  # after the name
    key: str  # -> a parameter's name
    keyed: str  # -> its value
    stop: str  # ends a value
    gap: str  # after it
    end: str  # ends the call
    joint: str  # between the end of a call and the next one's head
    close: str = ""  # after the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(Layout):
    """A format of this kind."""

    tags: Tags

    @property
    def begin(self) -> str:
        """The trigger: a text, or the name of a control token."""
        return self.tags.begin

    @property
    def template(self) -> str:
        """The shared one."""
        return chatml(_jinja(self.tags), "tags")

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them."""
        tags = self.tags
        bodies: list[str] = []
        for name, arguments in calls:
            pairs = "".join(
                f"{tags.key}{key}{tags.keyed}{raw(value)}{tags.stop}{tags.gap}"
                for key, value in members(arguments)
            )
            bodies.append(f"{tags.head}{name}{tags.named}{pairs}{tags.end}")
        return tags.begin + tags.joint.join(bodies) + tags.close if bodies else ""

    def unenforced(self, tool: Tool) -> list[Dropped]:
        """What of a tool's parameters the grammar cannot promise in this layout."""
        schema = Schema(tool.parameters)
        dropped = list(schema.unwritable())
        texts = self._texts()
        for param in schema.params():
            if param.kind != "json":
                texts.expression(schema, param.schema, pointer(param.name), dropped)
        return dropped

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """Lark text; see Format.grammar."""
        tags, lark = self.tags, self.control.lark
        more = f"({lark(tags.joint)} tool)*" if parallel and choice != "named" else ""
        lines = [
            *self._starts(choice, answer),
            f"calls: tool {more} {lark(tags.close)}",
            "tool: " + " | ".join(f"tool_{i}" for i in range(len(tools))),
        ]
        for i, tool in enumerate(tools):
            lines += self._tool(f"tool_{i}", tool)
        return "\n".join(lines) + "\n"

    def _starts(self, choice: Choice, answer: Mapping[str, object] | None) -> list[str]:
        begin = self.control.lark(self.tags.begin)
        if choice != "auto":
            return [f"start: {begin} calls"]
        if answer is not None:
            return [f"start: {begin} calls | answer", f"answer: %json {embed(answer)}"]
        return self._free(self.tags.begin, "calls")

    def _tool(self, rule: str, tool: Tool) -> Iterator[str]:
        tags, lark = self.tags, self.control.lark
        schema = Schema(tool.parameters)
        terms = [lark(f"{tags.head}{tool.name}{tags.named}")]
        for at, param in enumerate(schema.params()):
            value = f"{rule}_{at}"
            opening, gap = lark(f"{tags.key}{param.name}{tags.keyed}"), lark(tags.gap)
            terms.append(f"({opening} {value} {gap}){'' if param.required else '?'}")
            yield self._value(value, schema, param)
        yield " ".join([f"{rule}:", *terms, lark(tags.end)])

    def _value(self, rule: str, schema: Schema, param: Param) -> str:
        """The rule for a value and its closing literal."""
        stop = self.control.lark(self.tags.stop)
        if param.kind == "json":
            return f"{rule}: %json {schema.embedded(param.schema)} {stop}"
        texts = self._texts()
        expression = texts.expression(schema, param.schema, "", [])
        if param.kind == "text or null":
            expression = f'({expression}) | "null"'
        return texts.rule(rule, expression, stop)

    def _texts(self) -> Texts:
        controlled = self.control.seen(self.tags.stop) != self.tags.stop
        return Texts("" if controlled else self.tags.stop)

    def scanner(self, tools: Sequence[Tool] = ()) -> TagsScanner:
        """A fresh scanner for one choice."""
        tags, seen = self.tags, self.control.seen
        literals = Seen(
            begin=seen(tags.begin),
            head=seen(tags.head),
            named=seen(tags.named),
            key=seen(tags.key),
            keyed=seen(tags.keyed),
            stop=seen(tags.stop),
            end=seen(tags.end),
            close=seen(tags.close),
        )
        return TagsScanner(literals, {tool.name: tool.parameters for tool in tools})


def _jinja(tags: Tags) -> str:
    """The body of a macro that prints `calls` as write() does."""

    def shown(literal: str) -> str:
        return "{{- " + json.dumps(literal) + " -}}" if literal else ""

    pairs = (
        f"{{%- for one in call.arguments | pairs -%}}{shown(tags.key)}{{{{- one.key -}}}}"
        f"{shown(tags.keyed)}{{{{- one.raw -}}}}{shown(tags.stop + tags.gap)}{{%- endfor -%}}"
    )
    first = f"{{%- if loop.first -%}}{shown(tags.begin)}"
    return (
        f"{{%- for call in calls -%}}{first}{{%- else -%}}{shown(tags.joint)}{{%- endif -%}}"
        f"{shown(tags.head)}{{{{- call.name -}}}}{shown(tags.named)}{pairs}{shown(tags.end)}"
        f"{{%- endfor -%}}{shown(tags.close)}"
    )
