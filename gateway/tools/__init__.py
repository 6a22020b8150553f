"""Tool-call formats: how a model family writes a call.  Runs no tool, knows no wire.

    __init__  the Format protocol and its registry
    choice    tools, tool_choice and response_format -> what constrains the output
    marked    JSON arguments between fixed literals: their grammar and their scanner
    hermes    one such format, as data

A new format is one file and one line in FORMATS; tests/gateway/test_tools.py then runs on it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.events import Event

FORMATS = {"hermes": "gateway.tools.hermes:FORMAT"}

Choice = Literal["auto", "required", "named"]  # "none" never reaches a format


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool whose `parameters` went through engine.grammar.schema.check: they can be enforced."""

    name: str
    description: str
    parameters: Mapping[str, object]
    strict: bool


class Scanner(Protocol):
    """Turns one choice's text into events; any cutting of the text gives the same joined events."""

    @property
    def watched(self) -> bytes | None:
        """The JSON of the letter that a text must not hold to be one event as it is, which push()
        need not hear of; None = push every text."""

    @property
    def call(self) -> int:
        """The call that such a text is arguments of; -1 = it is text."""

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text; return what is certain now."""

    def close(self) -> list[Event]:
        """No more text comes: return what was held back."""


class Format(Protocol):
    """One way to write tool calls."""

    @property
    def name(self) -> str:
        """Its key in FORMATS."""

    @property
    def begin(self) -> str:
        """The trigger: free text ends here.  A model whose template holds it speaks this format."""

    @property
    def example(self) -> str:
        """One call as the model writes it, to a tool `add` with integers `a` and `b`."""

    @property
    def template(self) -> str:
        """Jinja chat template for models whose own takes no tools.

        Variables: messages (dicts of role, content, tool_calls [{name, arguments: str}]), tools
        (dicts as on the wire), add_generation_prompt.  No message's text depends on later ones.
        """

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """(name, arguments text) pairs exactly as the model writes and the template prints them."""

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """Lark text for llguidance.

        auto: text, or text and then calls to the end; with an `answer` schema, its JSON or calls.
        required: calls from the first token on.  named: exactly one.  Not `parallel`: at most one.
        """

    def scanner(self) -> Scanner:
        """A fresh scanner for one choice."""


class UnknownFormat(ValueError):
    """No format of that name; the message lists the known ones."""


def load(name: str) -> Format:
    """The format registered as `name`; raise UnknownFormat with the nearest spelling."""
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UnknownFormat(
            f"There is no tool format {name!r}. {hint}Known formats: {', '.join(sorted(FORMATS))}."
        )
    module, _, attribute = FORMATS[name].partition(":")
    found: Format = getattr(importlib.import_module(module), attribute)
    return found


def pick(template: str | None, override: str | None) -> Format:
    """The format for a model: the one named by `override`, else the first that its own template
    speaks, else hermes (and then the format's own template is the one to render with)."""
    if override:
        return load(override)
    for name in FORMATS:
        found = load(name)
        if template and found.begin in template:
            return found
    return load("hermes")
