"""Chat templates to text and control tokens.  Encodes nothing; see prompt.py, marks.py, sandbox.py.

Messages become what templates know: dicts with guarded text, calls with their arguments as text or
as objects that print as the text they came from.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from gateway.arguments import PLAIN, Items, Number, Style, Word, literal_of, parsed, respaced
from gateway.errors import BadRequest
from gateway.marks import Arguments, Marks, Rendered
from gateway.protocol import Message
from gateway.sandbox import Sandbox
from gateway.tools.values import members, raw
from gateway.work import FILTER, Forbidden, Stopped, Work, allowance

_SAID_LIMIT = 200  # characters of a template's own complaint
_INDENT = 16  # spaces, of JSON
_FORM = 100  # characters of a date's form
#: What a call gives a template: its arguments' text, or an object of this kind of values.
_Written = Arguments | Items | Number | Word

# What a template may raise on messages that its author did not think of.
UNRENDERABLE = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
    RecursionError,
)  # fmt: skip
_ROLES = {"developer": "system", "function": "tool"}
MODELS_OWN = "the model's chat template"
MESSAGE = 64  # characters that a message or a call weighs beside its text


class Template:
    """One compiled chat template.  The operator wrote it; it still runs in a sandbox."""

    def __init__(
        self,
        source: str,
        marks: Marks,
        names: Mapping[str, str],
        *,
        objects: bool,
        style: Style = PLAIN,
        name: str = MODELS_OWN,
    ) -> None:
        """`names`: bos_token and eos_token.  `objects`: calls' arguments as objects, not text;
        `style`: how the layout writes what is in them.  Raises BadTemplate."""
        self.name = name
        self._marks = marks
        self._names = dict(names)
        self._objects = objects
        self._style = style
        self._env = Sandbox(
            {"tojson": self._to_json, "pairs": self._pairs},
            {"raise_exception": self._raise, "strftime_now": _now},
        )
        self._work: Work = self._env.work
        self._template = self._env.compiled(source, self.title)

    @property
    def title(self) -> str:
        """The name, where a sentence begins."""
        return self.name[0].upper() + self.name[1:]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        extra: Mapping[str, object],
        work: int | None = None,
    ) -> Rendered:
        """The prompt up to where the assistant speaks; raise BadRequest if the template refuses.

        `work`: the most units it may take; None: by the request's size, and BadRequest beyond.
        With a number, beyond it, raise Stopped.
        """
        try:
            return self._marks.split(self.text(messages, tools, extra, work))
        except Refusal as error:
            raise BadRequest(
                f"{self.title} refuses these messages: {error}", param="messages"
            ) from None
        except Stopped as error:
            if work is not None:
                raise
            raise BadRequest(
                f"{self.title} {error}. Send fewer messages or tools, or serve with "
                "--chat-template and another file.",
                param="messages",
                code="chat_template_limit",
            ) from None
        except (Forbidden, SecurityError) as error:
            what = error if isinstance(error, Forbidden) else "reads what no template may"
            raise BadRequest(
                f"{self.title} {what}. Serve with --chat-template and another file.",
                param="messages",
                code="chat_template_forbidden",
            ) from None
        except UNRENDERABLE:
            raise BadRequest(
                f"{self.title} cannot render these messages. Check the order of roles and which "
                "roles this model knows.",
                param="messages",
            ) from None

    def weight_of(self, tools: Sequence[Mapping[str, object]]) -> float:
        """Characters of the tools; infinite for those that were not rendered before."""
        length = self._marks.length_of(tools) if tools else 0
        return math.inf if length is None else length

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        extra: Mapping[str, object],
        work: int | None = None,
    ) -> str:
        """As render(), the text with its marks; raise what the template raised: Refusal, Stopped,
        Forbidden, SecurityError or one of UNRENDERABLE."""
        guarded, length = self._marks.guard_tools(tools) if tools else (None, 0)
        limit = allowance(length + weight_of(messages, extra)) if work is None else work
        variables = {
            **self._names,
            **{name: self._marks.guard_all(value) for name, value in extra.items()},
            "tools": guarded,
            "add_generation_prompt": True,
        }

        self._work.begin(limit)
        try:
            shown = self._messages(messages, thoughts=True)
            return self._template.render({**variables, "messages": shown})
        except Refusal:
            # Some templates take no reasoning beside calls or text; it is a hint, no message.
            if not any(message.thoughts for message in messages):
                raise
            shown = self._messages(messages, thoughts=False)
            return self._template.render({**variables, "messages": shown})
        except RecursionError:
            raise Stopped("calls itself too deeply") from None

    def _messages(self, messages: Sequence[Message], *, thoughts: bool) -> list[dict[str, object]]:
        guard = self._marks.guard
        names: dict[str, str] = {}  # call id -> function, for results that do not say
        shown: list[dict[str, object]] = []
        for message in messages:
            role = _ROLES.get(message.role, message.role)
            entry: dict[str, object] = {"role": role, "content": guard(message.text)}
            if thoughts and message.thoughts:
                said = guard(message.thoughts)
                entry |= {"reasoning_content": said, "reasoning": said, "thinking": said}
            if message.tool_calls:
                names.update((call.id, call.function.name) for call in message.tool_calls)
                entry["tool_calls"] = [
                    self._call(call.id, call.function.name, call.function.arguments)
                    for call in message.tool_calls
                ]
            if message.tool_call_id:
                entry["tool_call_id"] = guard(message.tool_call_id)
            if name := message.name or names.get(message.tool_call_id or ""):
                entry["name"] = guard(name)
            shown.append(entry)
        return shown

    def _call(self, id: str, name: str, arguments: str) -> dict[str, object]:
        given: object
        if self._objects:
            given = self._marks.guard_all(parsed(arguments or "{}", self._style))
        else:
            given = self._marks.guard(respaced(arguments or "{}"))
        function = {"name": self._marks.guard(name), "arguments": given}
        return {"id": self._marks.guard(id), "type": "function", "function": function, **function}

    # --- what templates call -------------------------------------------------------------------

    def _raise(self, said: object) -> NoReturn:
        raise Refusal(self._work.text(said)[:_SAID_LIMIT])

    def _pairs(self, arguments: str) -> list[dict[str, str]]:
        self._work.spend(4 * self._work.weight(arguments))
        return pairs(self._marks, arguments)

    def _to_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """What templates call tojson: plain JSON, without the HTML escapes of Jinja's own filter,
        and arguments as the model wrote them."""
        self._work.spend(FILTER + self._work.weight(value))
        if separators is not None:
            self._work.width(sum(map(len, separators)), _INDENT)
        if indent is not None:
            self._work.width(indent, _INDENT)
        held: list[str] = []
        if indent is None and separators is None and not sort_keys:
            if isinstance(value, _Written):
                return value.spelled
            value = _emptied(value, self._marks.hole, held)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=None if separators is None else (separators[0], separators[1]),
            sort_keys=sort_keys,
        )
        if indent is None:
            text = encoder.encode(value)
        else:  # white space multiplies with the depth: count while it is written
            parts: list[str] = []
            for part in encoder.iterencode(value):
                self._work.spend(1 + (len(part) >> 3))
                parts.append(part)
            text = "".join(parts)
        if not held:
            return text
        first, *rest = text.split(encoder.encode(self._marks.hole))
        return first + "".join(one + part for one, part in zip(held, rest, strict=True))


class Refusal(Exception):
    """The template called raise_exception."""


def _emptied(value: object, hole: str, held: list[str]) -> object:
    """A value with a `hole` for each part that keeps its own text, which goes to `held`.

    Callers' objects are Guarded, and hold none: only our own dicts and lists are walked.
    """
    if isinstance(value, _Written):
        held.append(value.spelled)
        return hole
    if type(value) is dict:
        return {key: _emptied(one, hole, held) for key, one in value.items()}
    if type(value) in (list, tuple):
        return [_emptied(one, hole, held) for one in value]  # type: ignore[attr-defined]
    return value


def weight_of(messages: Sequence[Message], extra: Mapping[str, object]) -> int:
    """About how many characters there are to guard and render, the tools aside."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    return (
        MESSAGE * (len(messages) + len(calls))
        + sum(len(message.text) + len(message.thoughts) for message in messages)
        + sum(len(call.function.arguments) for call in calls)
        + sum(len(value) for value in extra.values() if isinstance(value, str))
    )


def pairs(marks: Marks, arguments: str) -> list[dict[str, str]]:
    """A call's arguments one by one for layouts that write them so: `key`, and the value as `raw`
    text (of a string its letters, else JSON) and as a Python `literal`."""
    values = parsed(arguments)
    return [
        {
            "key": marks.guard_key(key),
            "raw": marks.guard(raw(value)),
            "literal": marks.guard(literal_of(values[key])),
        }
        for key, value in members(arguments)
    ]


def _now(form: str) -> str:
    if len(form) > _FORM or any(letter.isdecimal() for letter in form):
        raise Stopped(f"asks for a date in a form of widths, or of more than {_FORM} characters")
    return datetime.datetime.now().astimezone().strftime(form)

