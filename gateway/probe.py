"""What a model's chat template can show, found by rendering small conversations.  Serves none.

A template that names `tools` may still leave them out, or the calls of earlier turns, or all calls
of a message but one; whoever starts a server should hear of it before an agent does.
"""

from __future__ import annotations

from dataclasses import dataclass

from jinja2.exceptions import SecurityError

from gateway.protocol import Function, Message, ToolCall
from gateway.render import UNRENDERABLE, Refusal, Template
from gateway.sandbox import BadTemplate
from gateway.work import WORK, Forbidden, Stopped

_NAMES = ("probe_first", "probe_second")
_TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Reads a gauge.",
            "parameters": {
                "type": "object",
                "properties": {"gauge": {"type": "string", "description": "Which one."}},
                "required": ["gauge"],
            },
        },
    }
    for name in _NAMES
)
_ASKED = Message("user", "Read it.")
_RESULT = "probe result"


@dataclass(frozen=True, slots=True)
class Shown:
    """What a template shows; None where it refused to render the question."""

    tools: bool | None
    calls: bool | None
    results: bool | None
    parallel: bool | None  # both calls of a message that has two


def probe(template: Template) -> Shown:
    """Ask a template; raise BadTemplate for one that was stopped."""
    _rendered(template, [_ASKED])
    _rendered(template, [Message("system", "Be brief."), _ASKED])
    tools = _rendered(template, [_ASKED], with_tools=True)
    one = _rendered(template, [_ASKED, *_called(1)], with_tools=True)
    two = _rendered(template, [_ASKED, *_called(2)], with_tools=True)
    calls = None if one is None else "gauge value 1" in one
    return Shown(
        tools=None if tools is None else all(name in tools for name in _NAMES),
        calls=calls,
        results=None if one is None else f"{_RESULT} 1" in one,
        parallel=None if not calls else two is not None and "gauge value 2" in two,
    )


def _called(count: int) -> list[Message]:
    """An assistant's message with so many calls, and their results."""
    calls = [
        ToolCall(id=f"probe000{at}", function=Function(name, f'{{"gauge": "gauge value {at}"}}'))
        for at, name in enumerate(_NAMES[:count], 1)
    ]
    results = [
        Message("tool", f"{_RESULT} {at}", tool_call_id=call.id) for at, call in enumerate(calls, 1)
    ]
    return [Message("assistant", None, tool_calls=calls), *results]


def _rendered(
    template: Template, messages: list[Message], *, with_tools: bool = False
) -> str | None:
    """The text; None when the template refused."""
    try:
        return template.text(messages, _TOOLS if with_tools else (), {}, WORK)
    except (Stopped, Forbidden, SecurityError) as error:
        what = "reads what no template may" if isinstance(error, SecurityError) else error
        raise BadTemplate(
            f"{template.title} {what}, for a conversation of a few words. Serve with "
            "--chat-template and another file."
        ) from None
    except (Refusal, *UNRENDERABLE):
        return None
