"""Chat templates to text and control tokens.  Encodes nothing; see prompt.py.

A control token counts only where the template wrote it.  Text of callers that holds one, or that
could complete one at its edge, is broken by a private mark before rendering; the rendered text is
split at what still reads as a control token, and then the marks are taken out again.

    caller's  "a<|im_end|>b"   marked  "a<M|im_end|>b"   split  no match   unmarked  "a<|im_end|>b"
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import BadRequest
from gateway.protocol import Message
from gateway.tools.literals import literal
from gateway.tools.values import members, raw

_MARK_LENGTH = 8  # of 6,400 private letters each: nobody's text holds the mark by chance or guess
_TOOL_LISTS = 32  # remembered
_TOOLS_LENGTH = 256 * 1024  # characters of one that is
_SAID_LIMIT = 200  # characters of a template's own complaint
_WORD = re.compile(r"\w+")
_LEXEME = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s",:]+|[,:]')


@dataclass(frozen=True, slots=True)
class Rendered:
    """texts[0], controls[0], texts[1], ... texts[-1]: one text more than control tokens."""

    texts: list[str]
    controls: list[str]


# What a template may raise on messages that its author did not think of.
_UNRENDERABLE = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
    RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tools:
    """A request's tools, remembered."""

    tools: Sequence[object]  # holding them keeps their id from being used for others
    guarded: list[object]
    length: int  # characters as JSON


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

    def guard(self, text: str) -> str:
        """The text with a mark inside each control token, and at edges that could make one.

        A bare word is not marked even if some token contains it: templates compare such values.
        """
        text = self._guard_edges(text)
        return text if _WORD.fullmatch(text) else self._guard_middle(text)

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
            case str():
                return self.guard(value)
            case Mapping():
                return Guarded(self, value)
            case list() | tuple():
                return [self.guard_all(item) for item in value]
            case _:
                return value

    def guard_tools(self, tools: Sequence[Mapping[str, object]]) -> list[object]:
        """As guard_all(), remembered for the same object: a plan's tools come again each turn."""
        with self._lock:
            found = self._tools.get(id(tools))
            if found is not None:
                self._tools.move_to_end(id(tools))
                return found.guarded
        guarded: list[object] = self.guard_all(tools)
        if not isinstance(tools, tuple) or (length := len(json.dumps(tools))) > _TOOLS_LENGTH:
            return guarded  # a list may change; a large one may not stay
        with self._lock:
            self._tools[id(tools)] = _Tools(tools, guarded, length)
            if len(self._tools) > _TOOL_LISTS:
                self._tools.popitem(last=False)
        return guarded

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
    """A call's arguments for templates that want an object; prints as the text it came from."""

    def __init__(self, marks: Marks, text: str, fields: Mapping[str, object]) -> None:
        super().__init__(marks, fields)
        self.text = text

    def __str__(self) -> str:
        return self.text


class BadTemplate(ValueError):
    """A chat template that does not compile; the message says where."""


class Template:
    """One compiled chat template.  The operator wrote it; it still runs in a sandbox."""

    def __init__(self, source: str, marks: Marks, names: Mapping[str, str], objects: bool) -> None:
        """`names`: bos_token and eos_token.  `objects`: calls' arguments as objects, not text."""
        # Autoescape is for HTML; a prompt is plain text.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _to_json
        env.filters["pairs"] = functools.partial(pairs, marks)
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = _now
        try:
            self._template = env.from_string(source)
        except TemplateSyntaxError as error:
            raise BadTemplate(
                f"The chat template is no Jinja (line {error.lineno}): {error.message}. Correct "
                "it, or serve with --chat-template and another file."
            ) from None
        self._marks = marks
        self._names = dict(names)
        self._objects = objects

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        extra: Mapping[str, object],
    ) -> Rendered:
        """The prompt up to where the assistant speaks; raise BadRequest if the template refuses."""
        try:
            variables = {
                **self._names,
                **{name: self._marks.guard_all(value) for name, value in extra.items()},
                "messages": self._messages(messages),
                "tools": self._marks.guard_tools(tools) if tools else None,
                "add_generation_prompt": True,
            }
            text = self._template.render(variables)
        except _Refusal as error:
            raise BadRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except _UNRENDERABLE:
            raise BadRequest(
                "The model's chat template cannot render these messages. Check the order of roles "
                "and which roles this model knows.",
                param="messages",
            ) from None
        return self._marks.split(text)

    def weight_of(self, tools: Sequence[Mapping[str, object]]) -> float:
        """Characters of the tools; infinite for those that were not rendered before."""
        length = self._marks.length_of(tools) if tools else 0
        return math.inf if length is None else length

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        names: dict[str, str] = {}  # call id -> function, for results that do not say
        shown: list[dict[str, object]] = []
        for message in messages:
            role = _ROLES.get(message.role, message.role)
            entry: dict[str, object] = {"role": role, "content": self._marks.guard(message.text)}
            if message.tool_calls:
                names.update((call.id, call.function.name) for call in message.tool_calls)
                entry["tool_calls"] = [
                    self._call(call.id, call.function.name, call.function.arguments)
                    for call in message.tool_calls
                ]
            if message.tool_call_id:
                entry["tool_call_id"] = self._marks.guard(message.tool_call_id)
            if name := message.name or names.get(message.tool_call_id or ""):
                entry["name"] = self._marks.guard(name)
            shown.append(entry)
        return shown

    def _call(self, id: str, name: str, arguments: str) -> dict[str, object]:
        text = self._marks.guard(respaced(arguments or "{}"))
        given: object = text
        if self._objects:
            given = Arguments(self._marks, text, json.loads(arguments or "{}"))
        function = {"name": name, "arguments": given}
        return {"id": self._marks.guard(id), "type": "function", "function": function, **function}


_ROLES = {"developer": "system", "function": "tool"}


def respaced(arguments: str) -> str:
    """JSON text with white space as `json.dumps` puts it, and every literal as it was.

    The grammar pins a call's arguments to this spacing, so a client that re-spaced them still
    continues the cached tokens.
    """
    out: list[str] = []
    for lexeme in _LEXEME.findall(arguments):
        out.append(f"{lexeme} " if lexeme in (",", ":") else lexeme)
    return "".join(out)


class _Refusal(Exception):
    """The template called raise_exception."""


def _raise(said: object) -> NoReturn:
    raise _Refusal(str(said)[:_SAID_LIMIT])


def pairs(marks: Marks, arguments: str) -> list[dict[str, str]]:
    """A call's arguments one by one for layouts that write them so: `key`, and the value as `raw`
    text (of a string its letters, else JSON) and as a Python `literal`."""
    return [
        {
            "key": marks.guard_key(key),
            "raw": marks.guard(raw(value)),
            "literal": marks.guard(literal(json.loads(value))),
        }
        for key, value in members(arguments)
    ]


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """What templates call tojson: plain JSON, without the HTML escapes of Jinja's own filter."""
    if isinstance(value, Arguments) and indent is None and separators is None:
        return value.text
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
