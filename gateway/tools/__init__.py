"""Tool-call formats: how a model family writes a call.  Runs no tool, knows no wire.

    __init__  the Format protocol and its registry
    choice    tools, tool_choice and response_format -> what constrains the output
    control   markers that a vocabulary has as single control tokens
    chatml    our own chat template, for any layout
    layout    what every layout is besides its literals; held  ... and every scanner
    marked    layouts of JSON arguments between literals: writing, grammar
    marked_scanner  ... and reading
    hermes, llama3, mistral, mistral11, mistral13, deepseek, deepseek31, kimi   such ones, as data
    tags      layouts of parameters between tags: writing, grammar; tags_scanner  ... and reading
    values, texts   which values are raw text, and their schemas as expressions
    qwen3_coder, glm45, glm47, minimax_m2   such ones, as data
    pythonic, literals, pythonic_scanner    calls as a Python list
    harmony, harmony_scanner                messages with channels
    thinking  a leading section of reasoning, around any of them

A new format is one file and one line in FORMATS; tests/gateway/test_tools.py then runs on it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.grammar.schema import Dropped
from gateway.events import Event

#: In the order in which pick() looks for their signatures: what says more goes first.
FORMATS = {
    "harmony": "gateway.tools.harmony:FORMAT",
    "minimax_m2": "gateway.tools.minimax_m2:FORMAT",
    "qwen3_coder": "gateway.tools.qwen3_coder:FORMAT",
    "glm47": "gateway.tools.glm47:FORMAT",
    "glm45": "gateway.tools.glm45:FORMAT",
    "pythonic": "gateway.tools.pythonic:FORMAT",
    "kimi": "gateway.tools.kimi:FORMAT",
    "deepseek": "gateway.tools.deepseek:FORMAT",
    "deepseek31": "gateway.tools.deepseek31:FORMAT",
    "mistral11": "gateway.tools.mistral11:FORMAT",
    "mistral13": "gateway.tools.mistral13:FORMAT",
    "mistral": "gateway.tools.mistral:FORMAT",
    "hermes": "gateway.tools.hermes:FORMAT",
    "llama3": "gateway.tools.llama3:FORMAT",
}

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
    def signature(self) -> Sequence[str]:
        """A model whose own template holds all of these speaks this format."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that vocabularies may have as single control tokens."""

    @property
    def stand_ins(self) -> Mapping[int, str]:
        """Control token -> what the scanner sees of it; empty while the format is not bound."""

    @property
    def begin(self) -> str:
        """The trigger: free text ends here.  Empty: nothing in the middle of a text ends it."""

    @property
    def opening(self) -> str:
        """Free text cannot start with this: such a message is calls.  Mostly empty: nothing is."""

    @property
    def example(self) -> str:
        """One call as the model writes it, to a tool `add` with integers `a` and `b`."""

    @property
    def template(self) -> str:
        """Jinja chat template for models whose own takes no tools.

        Variables: messages (dicts of role, content, tool_calls [{name, arguments: str}]), tools
        (dicts as on the wire), add_generation_prompt.  No message's text depends on later ones.
        """

    def bound(self, special: Mapping[str, int]) -> Format:
        """The same format for a vocabulary with these control tokens, text -> id; itself when none
        of them is a marker."""

    @property
    def framed(self) -> bool:
        """Whether the model frames all that it says, so that every output needs the scanner."""

    def unenforced(self, tool: Tool) -> Sequence[Dropped]:
        """What of a tool's parameters the grammar cannot promise in this layout; mostly nothing."""

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

    def scanner(self, tools: Sequence[Tool] = ()) -> Scanner:
        """A fresh scanner for one choice; its state is plain values, so that copy() copies it.

        `tools`: what the request may call, for layouts whose values have types only in schemas.
        """


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
    speaks, else hermes (and then the format's own template is the one to render with).  Around it
    a section of reasoning, if the template tells of one."""
    from gateway.tools.thinking import thinking  # it imports this room

    name = override or next((name for name in FORMATS if _speaks(template, load(name))), "hermes")
    return thinking(load(name), template)


def _speaks(template: str | None, layout: Format) -> bool:
    return bool(template) and all(part in (template or "") for part in layout.signature)
