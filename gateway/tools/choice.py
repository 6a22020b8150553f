"""tools, tool_choice, response_format -> what constrains the output.  Renders no prompt.

Everything here is a pure function of the request's bytes, so checked tools are remembered by them
(by equality, not by a hash that somebody could collide): agents send the same ones every turn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from engine.grammar.schema import (
    BadSchema,
    Checked,
    Dropped,
    Judge,
    check_apart,
    embed,
    measure,
)  # fmt: skip
from engine.messages import Grammar
from gateway.tools import Choice, Format, Tool
from gateway.tools.finished import complaint

TOOLS_LIMIT = 128
SIZE_LIMIT = 8_000  # arrays and objects in the schemas of all tools, and what counts as some
JUDGED_S = 0.2  # for the finished calls of one choice
REMEMBERED = 256 * 1024  # bytes; larger tool lists are checked again every time
_NAMES = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _Function | None = None


class _JsonSchema(msgspec.Struct):
    schema: Any = None
    name: str | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request's output is constrained and read."""

    grammar: Grammar | None  # None: free text
    scan: bool  # the output may hold calls: run the format's scanner over it
    named: bool  # one tool was named: the turn ends with `stop`, as OpenAI's does
    tools: tuple[dict[str, Any], ...] = ()  # as on the wire, to show in the prompt
    checked: tuple[Tool, ...] = ()  # those that may be called, for the scanner
    dropped: tuple[tuple[str, Dropped], ...] = ()  # (request field, keyword that is not enforced)
    relaxed: tuple[tuple[str, Any], ...] = ()  # (tool name, "" = the answer; its full schema)
    owes_call: bool = False  # the answer must hold a call: required or named

    @property
    def relaxed_fields(self) -> frozenset[str]:
        """The request fields of which something is not enforced: tools, response_format."""
        return frozenset(param.partition("[")[0].partition(".")[0] for param, _ in self.dropped)

    @property
    def relaxes_answer(self) -> bool:
        """Whether the schema of a text answer is enforced in part only."""
        return any(name == "" for name, _ in self.relaxed)

    @property
    def schema_header(self) -> str | None:
        """The value of `x-slipstream-schema`: None when everything is enforced."""
        if not self.dropped:
            return None
        named = [
            f"pointer={quote(f'{gone.pointer}/{gone.keyword}', '/~$')}" for _, gone in self.dropped
        ]
        more = [f"more={len(named) - 8}"] if len(named) > 8 else []
        return "; ".join(["relaxed", *named[:8], *more])

    def complaint(self, name: str, text: str) -> str:
        """What the finished arguments of tool `name` ("" = the answer) break of a relaxed schema.

        Empty when they break nothing, or when the grammar enforced all of it.
        """
        for relaxed, schema in self.relaxed:
            if relaxed == name:
                return complaint(schema, text)
        return ""

    def judged(self, calls: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether each (tool name, arguments) satisfies its schema, as far as JUDGED_S shows it.

        For a thread: up to JUDGED_S and one complaint().
        """
        end = time.monotonic() + JUDGED_S
        return [time.monotonic() < end and not self.complaint(*call) for call in calls]


@dataclass(frozen=True, slots=True)
class _Checked:
    """A request's tools after their check."""

    tools: tuple[Tool, ...]
    wire: tuple[dict[str, Any], ...]
    dropped: tuple[tuple[str, Dropped], ...]
    relaxed: tuple[tuple[str, Any], ...]
    rewritten: tuple[tuple[tuple[str, str], ...], ...] = ()  # of each tool: (pointer, keyword)


_NO_TOOLS = _Checked((), (), (), ())


def plan(
    tools: bytes | msgspec.Raw | Sequence[object] | None,
    tool_choice: object,
    parallel: bool | None,
    response_format: bytes | msgspec.Raw | Mapping[str, object] | None,
    fmt: Format,
) -> ToolPlan:
    """Plan a request from its fields, each as raw JSON or as a parsed value.

    Raise BadSchema, with `param` set, for what the caller can get wrong.  Costs about 2 ms for each
    tool of a list that was not seen before: run it beside the event loop then.
    """
    checked = _tools(_raw(tools))
    answer = _answer(_raw(response_format))
    mode, allowed = _mode(tool_choice, checked.tools)
    dropped = answer.dropped if answer else ()
    noted = tuple(("response_format.json_schema.schema", gone) for gone in dropped)
    relaxed = (("", _answer_schema(_raw(response_format))),) if dropped else ()
    if mode == "none" or not allowed:
        grammar = None
        if answer:
            lark = f"start: %json {embed(answer.schema)}\n"
            if fmt.framed:
                lark = fmt.grammar((), "auto", False, answer.schema)
            grammar = Grammar(lark, "response_format")
        return ToolPlan(grammar, fmt.framed, False, dropped=noted, relaxed=relaxed)
    beyond = _beyond(fmt, allowed, checked)
    schema = answer.schema if answer else None
    lark = fmt.grammar(allowed, mode, parallel is not False, schema)
    free = mode == "auto" and schema is None
    return ToolPlan(
        Grammar(lark, "tools", *((fmt.begin, fmt.opening) if free else ())),
        scan=True,
        named=mode == "named",
        tools=checked.wire,
        checked=tuple(allowed),
        dropped=checked.dropped + beyond.dropped + noted,
        relaxed=checked.relaxed + beyond.relaxed + relaxed,
        owes_call=mode != "auto",
    )


def _beyond(fmt: Format, allowed: Sequence[Tool], checked: _Checked) -> _Checked:
    """What the layout cannot promise of the tools' schemas; raise BadSchema for a strict one."""
    dropped: list[tuple[str, Dropped]] = []
    relaxed: list[tuple[str, Any]] = []
    for i, tool in enumerate(checked.tools):
        if tool not in allowed:
            continue
        gone = [_as_written(one, checked.rewritten[i]) for one in fmt.unenforced(tool)]
        if not gone:
            continue
        param = f"tools[{i}].function.parameters"
        if tool.strict:
            first = gone[0]
            at = f"at {first.pointer or '/'}: keyword {first.keyword!r} cannot be enforced"
            raise _bad(
                param,
                f"Invalid schema for function {tool.name!r}: {at}: {first.why}. Remove it, or set "
                "strict to false to have it checked after the fact.",
                "unsupported_schema_keyword",
                first.pointer,
                first.keyword,
            )
        dropped += ((param, one) for one in gone)
        relaxed.append((tool.name, checked.wire[i]["function"].get("parameters")))
    return _Checked((), (), tuple(dropped), tuple(relaxed))


def _as_written(gone: Dropped, rewritten: Sequence[tuple[str, str]]) -> Dropped:
    """The same, naming the keyword that the caller wrote where it is said in others."""
    written = [key for at, key in rewritten if at == gone.pointer and gone.keyword == "allOf"]
    return replace(gone, keyword=written[0]) if written else gone


def _raw(field: object) -> bytes:
    """The field as JSON bytes; empty when absent."""
    if field is None:
        return b""
    if isinstance(field, bytes | msgspec.Raw):
        raw = bytes(field)
        return b"" if raw == b"null" else raw
    return msgspec.json.encode(field)


def _tools(raw: bytes) -> _Checked:
    if not raw:
        return _NO_TOOLS
    return _remembered(raw) if len(raw) <= REMEMBERED else _check_tools(raw)


@lru_cache(maxsize=128)
def _remembered(raw: bytes) -> _Checked:
    return _check_tools(raw)


def _check_tools(raw: bytes) -> _Checked:
    parsed = _decode(raw, list[_Tool], "tools")
    if len(parsed) > TOOLS_LIMIT:
        raise _bad("tools", f"{len(parsed)} tools; at most {TOOLS_LIMIT} are accepted. Send fewer.")
    tools: list[Tool] = []
    dropped: list[tuple[str, Dropped]] = []
    relaxed: list[tuple[str, Any]] = []
    seen: set[str] = set()
    rewritten: list[tuple[tuple[str, str], ...]] = []
    functions = [_function(i, tool, seen) for i, tool in enumerate(parsed)]
    _check_size(functions)
    judge = Judge()
    for i, function in enumerate(functions):
        param = f"tools[{i}].function.parameters"
        strict = bool(function.strict)
        what = f"function {function.name!r}"
        found = _check(what, param, function.parameters, strict, "object", judge)
        tools.append(Tool(function.name, function.description or "", found.schema, strict))
        dropped += ((param, gone) for gone in found.dropped)
        rewritten.append(found.rewritten)
        if found.dropped:
            relaxed.append((function.name, function.parameters))
    wire = msgspec.json.decode(raw)
    return _Checked(
        tuple(tools), tuple(wire), tuple(dropped), tuple(relaxed), tuple(rewritten)
    )


def _function(index: int, tool: _Tool, seen: set[str]) -> _Function:
    """The tool's function, its name checked and noted in `seen`."""
    at = f"tools[{index}]"
    if tool.type != "function":
        raise _bad(
            f"{at}.type", f"Tools of type {tool.type[:40]!r} are not served; use 'function'."
        )
    if tool.function is None:
        raise _bad(f"{at}.function", "A tool needs a 'function' with a 'name'.")
    name = tool.function.name
    if not 1 <= len(name) <= 64 or not _NAMES.issuperset(name):
        raise _bad(f"{at}.function.name", f"{name[:70]!r} must be 1-64 of a-z A-Z 0-9 _ and -.")
    if name in seen:
        raise _bad(f"{at}.function.name", f"Two tools are named {name!r}; names must be unique.")
    seen.add(name)
    return tool.function


def _check_size(functions: Sequence[_Function]) -> None:
    """Bound the work of all checks before the first one starts."""
    size = 0
    for i, function in enumerate(functions):
        param = f"tools[{i}].function.parameters"
        try:
            size += measure(function.parameters)
        except BadSchema as bad:
            raise _named(bad, f"function {function.name!r}", param) from None
        if size > SIZE_LIMIT:
            raise _bad(
                param,
                f"The schemas of all tools together may hold {SIZE_LIMIT:,} objects and arrays. "
                "Send fewer tools or smaller schemas.",
            )


def _named(bad: BadSchema, what: str, param: str) -> BadSchema:
    """The same refusal, saying whose schema it is."""
    message = f"Invalid schema for {what}: {bad.message}"
    return _bad(param, message, bad.code, bad.pointer, bad.keyword)


def _check(
    what: str, param: str, schema: object, strict: bool, root: Any, judge: Judge
) -> Checked:
    try:
        return check_apart(schema, strict=strict, root=root, judge=judge)
    except BadSchema as bad:
        raise _named(bad, what, param) from None


def _bad(
    param: str, message: str, code: str = "invalid_value", pointer: str = "", keyword: str = ""
) -> BadSchema:
    bad = BadSchema(code, message, pointer, keyword)
    bad.param = param
    return bad


def _decode(raw: bytes, kind: Any, param: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        what, _, path = str(error).partition(" - at `$")
        raise _bad(param + path.rstrip("`"), what + ".") from None
    except RecursionError:
        raise _bad(param, "The JSON is nested too deeply.") from None


def _answer(raw: bytes) -> Checked | None:
    """The schema of the answer, None for text."""
    if not raw:
        return None
    wanted: _ResponseFormat = _decode(raw, _ResponseFormat, "response_format")
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Checked({"type": "object"}, ())
    if wanted.type != "json_schema":
        raise _bad(
            "response_format.type",
            f"{wanted.type[:40]!r} is not one of 'text', 'json_object', 'json_schema'.",
        )
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise _bad("response_format.json_schema", "A 'schema' is needed.")
    param = "response_format.json_schema.schema"
    what = f"response_format {(wanted.json_schema.name or '')[:64]!r}"
    strict = bool(wanted.json_schema.strict)
    return _check(what, param, wanted.json_schema.schema, strict, "any", Judge())


def _answer_schema(raw: bytes) -> Any:
    return msgspec.json.decode(raw)["json_schema"]["schema"]


def _mode(choice: object, tools: Sequence[Tool]) -> tuple[Choice | Literal["none"], Sequence[Tool]]:
    """What tool_choice asks for ("none" too), and the tools it leaves."""
    match _parsed(choice):
        case None:
            return "auto", tools
        case "none":
            return "none", tools
        case "auto":
            return "auto", tools
        case "required":
            if not tools:
                raise _bad("tool_choice", "'required' needs at least one tool.")
            return "required", tools
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", _only([name], tools)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(listed)}}:
            if mode not in ("auto", "required"):
                raise _bad("tool_choice.allowed_tools.mode", "must be 'auto' or 'required'.")
            allowed = _only([_listed(entry) for entry in listed], tools)
            if not allowed:
                raise _bad("tool_choice.allowed_tools.tools", "must name at least one tool.")
            return mode, allowed
        case _:
            raise _bad(
                "tool_choice",
                "must be 'none', 'auto', 'required', a function by name, or allowed_tools.",
            )


def _parsed(choice: object) -> object:
    if isinstance(choice, bytes | msgspec.Raw):
        return _decode(bytes(choice), Any, "tool_choice")
    return msgspec.to_builtins(choice)


def _listed(entry: object) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise _bad("tool_choice.allowed_tools.tools", "must hold functions by name.")


def _only(names: Sequence[str], tools: Sequence[Tool]) -> Sequence[Tool]:
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise _bad("tool_choice", f"There is no tool {name[:64]!r} in 'tools'.")
    return [tool for tool in tools if tool.name in names]
