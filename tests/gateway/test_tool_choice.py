"""tools, tool_choice and response_format: what they let the model say.  Reads no stream."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from engine.grammar.masks import Masks
from engine.grammar.matcher import Compiler
from engine.grammar.schema import BadSchema
from gateway.tools.choice import ToolPlan, plan
from tests.calls import HERMES, byte_compiler, joined, scan, takes
from tests.schemas import FAMILIES, UNIQUE, record, tool, whole
from tests.scripted import EOS


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return byte_compiler()


def planned(
    tools: Any, choice: Any = None, parallel: bool | None = None, answer: Any = None
) -> ToolPlan:
    return plan(tools, choice, parallel, answer, HERMES)


def text_of(*calls: tuple[str, str]) -> str:
    return HERMES.write(list(calls))


TOOLS = [
    tool("add", record({"a": whole(0, 99)})),
    tool("lamp_on"),
    tool("spot", record({"p": {"$ref": "#/$defs/P"}}, **{"$defs": {"P": {"enum": ["left"]}}})),
    tool("area", record({"p": {"$ref": "#/$defs/P"}}, **{"$defs": {"P": whole(1, 3)}})),
]
ADD1, LAMP, SPOT, AREA = (
    ("add", '{"a": 1}'),
    ("lamp_on", "{}"),
    ("spot", '{"p": "left"}'),
    ("area", '{"p": 2}'),
)
NAMED = {"type": "function", "function": {"name": "add"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "add"}}],
    },
}

EVERY_CHOICE = [
    # tool_choice, parallel, taken, refused
    (None, None, ["", "hi", "<tool_cal", text_of(ADD1), "hi\n" + text_of(ADD1, LAMP, SPOT, AREA)],
     ["<tool_call>", text_of(ADD1) + "x", text_of(ADD1)[:-1], text_of(("nope", "{}"))]),
    ("auto", False, ["hi", "hi " + text_of(LAMP)], [text_of(ADD1, ADD1), text_of(ADD1) + "\n"]),
    ("required", True, [text_of(ADD1), text_of(ADD1, ADD1, LAMP)],
     ["", "hi", "hi" + text_of(ADD1), text_of(ADD1) + "\n", "\n" + text_of(ADD1)]),
    ("required", False, [text_of(ADD1), text_of(SPOT)], ["", text_of(ADD1, ADD1)]),
    (NAMED, None, [text_of(ADD1)], ["", "hi", text_of(LAMP), text_of(ADD1, ADD1)]),
    (ALLOWED, None, [text_of(ADD1), text_of(ADD1, ADD1)], ["", text_of(LAMP), text_of(ADD1, LAMP)]),
]  # fmt: skip


@pytest.mark.parametrize("case", EVERY_CHOICE)
def test_tool_choice_decides_what_may_be_said(case: Any, compiler: Compiler) -> None:
    choice, parallel, taken, refused = case
    found = planned(TOOLS, choice, parallel)
    assert found.grammar is not None and found.scan and found.grammar.param == "tools"
    assert found.named == (choice is NAMED)
    assert [entry["function"]["name"] for entry in found.tools] == [
        "add",
        "lamp_on",
        "spot",
        "area",
    ]
    for text in taken:
        assert takes(compiler, found.grammar.lark, text), text
    wrong = [
        text_of(("add", '{"a": "1"}')),
        text_of(("add", '{"a":1}')),
        text_of(("add", '{"a": 1 }')),
        text_of(("add", "{}")),
        text_of(("lamp_on", '{"x": 1}')),
        text_of(("spot", '{"p": 2}')),
        text_of(("area", '{"p": "left"}')),
    ]
    for text in refused + wrong:
        assert not takes(compiler, found.grammar.lark, text), text


def test_a_call_inside_free_text_cannot_be_left_open(compiler: Compiler) -> None:
    found = planned(TOOLS)
    assert found.grammar is not None
    state = compiler.compile(found.grammar).start()
    for at, letter in enumerate(text := "well <tool_call>\n" + text_of(LAMP)[12:]):
        assert state.accepting == (at < len("well <tool_call>")), text[:at]
        assert state.accept(ord(letter))
    assert state.accepting


def test_choice_none_shows_no_tools_and_leaves_text_alone() -> None:
    assert planned(TOOLS, "none") == ToolPlan(None, False, False)
    assert planned(None, "none") == planned(None) == planned([]) == ToolPlan(None, False, False)
    assert (
        planned(msgspec.Raw(b"null"), msgspec.Raw(b"null"), None, msgspec.Raw(b"null")).grammar
        is None
    )


COLOURS = {
    "type": "json_schema",
    "json_schema": {"name": "c", "strict": True, "schema": {"enum": ["red", {"no": 1}]}},
}


def test_an_answer_schema_and_tools_make_a_union(compiler: Compiler) -> None:
    both = planned(TOOLS, "auto", None, COLOURS)
    assert both.grammar is not None and both.scan
    for text in ('"red"', '{"no": 1}', text_of(ADD1), text_of(ADD1, LAMP)):
        assert takes(compiler, both.grammar.lark, text), text
    for text in ("", "red", "hi " + text_of(ADD1), '"red"' + text_of(ADD1), '"blue"'):
        assert not takes(compiler, both.grammar.lark, text), text
    alone = planned(None, None, None, COLOURS)
    assert alone.grammar is not None and alone.grammar.param == "response_format" and not alone.scan
    assert takes(compiler, alone.grammar.lark, '"red"')
    assert not takes(compiler, alone.grammar.lark, text_of(ADD1))
    forced = planned(TOOLS, "required", None, COLOURS)
    assert forced.grammar is not None and not takes(compiler, forced.grammar.lark, '"red"')


def test_json_object_means_any_object(compiler: Compiler) -> None:
    found = planned(None, None, None, {"type": "json_object"})
    assert found.grammar is not None
    assert takes(compiler, found.grammar.lark, '{"a": [1, {"b": null}], "c": "x"}')
    for text in ("[1]", "hi", '{"a": 1}\n', ""):
        assert not takes(compiler, found.grammar.lark, text)
    assert planned(None, None, None, {"type": "text"}).grammar is None


DEEP = b'[{"function": {"name": "a", "parameters": ' + b'{"a":' * 9_000 + b"1" + b"}" * 9_003 + b"]"

BAD_REQUESTS = [
    ({"tools": [tool("a"), tool("b", {"type": "array"})]}, "tools[1].function.parameters"),
    ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    ({"tools": "x"}, "tools"),
    ({"tools": b"[" * 100_000}, "tools[0]"),
    ({"tools": DEEP}, "tools"),
    ({"tools": TOOLS, "choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"tools": TOOLS, "choice": {"type": "function"}}, "tool_choice"),
    ({"tools": None, "choice": "required"}, "tool_choice"),
    ({"tools": None, "choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "choice": {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools"),
    ({"tools": TOOLS, "choice": {**ALLOWED, "allowed_tools": {"mode": "x", "tools": []}}},
     "tool_choice.allowed_tools.mode"),
    ({"tools": None, "answer": {"type": "yaml"}}, "response_format.type"),
    ({"tools": None, "answer": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"tools": None, "answer": {}}, "response_format"),
    ({"tools": None, "answer": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
     "response_format.json_schema.schema"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused_by_the_field_at_fault(case: Any) -> None:
    fields, param = case
    with pytest.raises(BadSchema) as caught:
        planned(**fields)
    assert caught.value.param == param
    assert caught.value.message


def test_a_refused_schema_names_function_pointer_and_keyword() -> None:
    with pytest.raises(BadSchema) as caught:
        planned([tool("book", UNIQUE)])
    bad = caught.value
    assert (bad.code, bad.param) == ("unsupported_schema_keyword", "tools[0].function.parameters")
    assert (bad.pointer, bad.keyword) == ("/properties/x", "uniqueItems")
    assert bad.message.startswith(
        "Invalid schema for function 'book': at /properties/x: keyword 'uniqueItems' is not"
    )


def test_what_is_not_enforced_is_listed_and_checked_after_the_fact() -> None:
    found = planned([tool("ok"), tool("pick", UNIQUE, strict=False)])
    assert [(param, gone.keyword) for param, gone in found.dropped] == [
        ("tools[1].function.parameters", "uniqueItems")
    ]
    assert found.schema_header == "relaxed; pointer=/properties/x/uniqueItems"
    assert found.complaint("pick", '{"x": [1, 2, 3]}') == ""
    assert found.complaint("pick", '{"x": [1, 1, 2]}') == "/x: uniqueItems"
    assert found.complaint("ok", '{"x": 1}') == ""
    assert planned(TOOLS).schema_header is None


def test_a_header_is_ascii_whatever_the_schema_is_called() -> None:
    odd = record({f"ü\n{i}": {"type": "string", "not": {}} for i in range(12)})
    header = planned([tool("odd", odd, strict=False)]).schema_header
    assert header is not None and header.isascii() and "\n" not in header
    assert header.endswith("; more=4")


def test_the_same_tools_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = msgspec.json.encode([tool("once", record({"zz": whole(3, 77)}))])
    first = planned(msgspec.Raw(raw))
    monkeypatch.setattr("gateway.tools.choice.check_apart", lambda *_, **__: pytest.fail("again"))
    assert planned(raw) == first
    with pytest.raises(pytest.fail.Exception, match="again"):
        planned(raw.replace(b"77", b"78"))


def test_all_schemas_together_are_bounded() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(890)}}
    with pytest.raises(BadSchema, match="8,000") as caught:
        planned([tool(f"t{i}", wide) for i in range(25)])
    assert caught.value.param == "tools[8].function.parameters"


@pytest.mark.parametrize("name", FAMILIES)
def test_random_output_under_required_is_always_valid_calls(name: str, compiler: Compiler) -> None:
    found = planned([tool("first", FAMILIES[name]), tool("second", FAMILIES["enum"])], "required")
    assert found.grammar is not None
    compiled, masks, rng = compiler.compile(found.grammar), Masks(259, 1), random.Random(name)
    calls = 0
    for _ in range(4):
        state, out = compiled.start(), bytearray()
        while len(out) < 3_000:
            row = masks.fill([(0, state, [])]).numpy().view(np.uint8)
            token = int(rng.choice(np.flatnonzero(np.unpackbits(row[0], bitorder="little"))))
            if token == EOS:
                break
            assert state.accept(token)
            out.append(token)
        else:
            continue
        for tool_name, arguments, end in joined(scan(HERMES, list(out.decode()))):
            assert end == "closed"
            schema = FAMILIES[name if tool_name == "first" else "enum"]
            jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))
            calls += 1
    assert calls >= 3
