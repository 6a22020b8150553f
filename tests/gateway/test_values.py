"""Parameters written one by one: what is text, what JSON, and how schemas of texts are enforced."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from engine.grammar.schema import BadSchema
from gateway.tools import Tool, load, pick
from gateway.tools.choice import plan
from gateway.tools.texts import regex
from gateway.tools.values import Schema, members
from tests.calls import Dialect, dialect, joined, scan, takes
from tests.schemas import record, tool, whole

TAGGED = ["qwen3_coder", "glm45", "glm47", "minimax_m2"]


@pytest.fixture(params=[(name, bound) for name in TAGGED for bound in (False, True)],
                ids=lambda param: f"{param[0]}-{'bound' if param[1] else 'text'}")  # fmt: skip
def said(request: pytest.FixtureRequest) -> Dialect:
    return dialect(*request.param)


def call(said: Dialect, schema: Any, value: object) -> tuple[bool, Any]:
    """Whether the grammar takes a call with this value, and how it is read back."""
    used = Tool("f", "", record({"x": schema}), True)
    seen = said.written([("f", json.dumps({"x": value}, ensure_ascii=False))])
    taken = takes(said.compiler, said.fmt.grammar([used], "named", True), said.tokens(seen))
    return taken, joined(scan(said.fmt, list(seen), [used]))


TEXTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string"}, ["", "a", "\n", "\n\n x", '"', "\\", "null", "1", "</x", "}{,"], []),
    ({"type": "string", "maxLength": 3}, ["", "abc", "é🌊\n"], ["abcd", "\n\n\n\n"]),
    ({"type": "string", "minLength": 2}, ["ab", "é🌊", "ab<\n"], ["", "a", "🌊"]),
    ({"type": "string", "minLength": 2, "maxLength": 900}, ["ab", "x" * 900], ["a", "x" * 901]),
    ({"type": "string", "pattern": "^[a-z]{2}/\\d+$"}, ["ab/1", "zz/123"], ["ab/", "a/1", "ab/1 "]),
    ({"type": "string", "pattern": "cat|dog"}, ["cat", "hotdogs", "a cat."], ["ca", "", "do g"]),
    ({"type": "string", "pattern": "^(a|b)"}, ["a", "bcd"], ["", "cab"]),
    ({"type": "string", "pattern": "^<b>.*$"}, ["<b>x", "<b>"], ["b", "x<b>"]),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ["a", "aa"], ["aaa", "", "b"]),
    ({"enum": ["on", "off", "a\nb"]}, ["on", "off", "a\nb"], ["o", "onn", '"on"']),
    ({"type": "string", "enum": ["aa", "b"], "minLength": 2}, ["aa"], ["b"]),
    ({"const": "only"}, ["only"], ["onl", ""]),
    ({"anyOf": [{"const": "x"}, {"type": "string", "minLength": 3}]}, ["x", "xyz"], ["xy", ""]),
    ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-02-30", "2024-13-01", ""]),
    ({"type": "string", "format": "time"}, ["10:00:00Z", "23:59:59.5+01:00"], ["24:00:00Z"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.255"], ["1.2.3.256", "1.2.3"]),
    ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a@b", "@c.de"]),
    ({"type": "string", "format": "uuid"}, ["0" * 8 + "-aaaa-bbbb-cccc-" + "d" * 12], ["0"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), TEXTS, ids=[str(one[0]) for one in TEXTS])
def test_texts_are_taken_and_read_back_exactly_as_their_schema_says(
    said: Dialect, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for value in good:
        taken, found = call(said, schema, value)
        assert taken, value
        (name, arguments, end), = found  # fmt: skip
        assert (name, end, json.loads(arguments)) == ("f", "closed", {"x": value})
    for value in bad:
        assert not call(said, schema, value)[0], value


def test_a_text_that_may_be_null_is_null_only_as_a_whole(said: Dialect) -> None:
    schema = {"type": ["string", "null"], "maxLength": 6}
    for value, read in ((None, None), ("null", None), ("nul", "nul"), ("nulls", "nulls"), ("", "")):
        taken, ((_, arguments, _),) = call(said, schema, value)
        assert taken and json.loads(arguments) == {"x": read}
    assert not call(said, schema, "1234567")[0]
    optional = {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}
    assert call(said, optional, "a")[0] and call(said, optional, None)[0]
    assert not call(said, optional, "c")[0] and not call(said, optional, 1)[0]


def test_a_text_ends_at_its_first_closing_literal_whatever_the_schema_allows(said: Dialect) -> None:
    """So whatever the grammar takes is read back as one valid call, closing literals inside too."""
    stop, rng, count = said.fmt.tags.stop, random.Random(7), 0
    schemas = [one[0] for one in TEXTS]
    listed = call(said, {"enum": ["a", f"b{stop}"]}, f"b{stop}")[0]
    assert listed == (stop in said.ids), "one that holds it can be written only as a control token"
    ways = [stop, stop[:-1], stop[1:], "ab", "a", "\n", "<", "<b>", "cat", "/1", ">", ""]
    for _ in range(600):
        schema = rng.choice(schemas)
        value = "".join(rng.choices(ways, k=3))
        used = Tool("f", "", record({"x": schema, "y": whole(0, 9)}, ["x"]), True)
        hidden = json.dumps({"x": "\ue000"})
        seen = said.seen(said.fmt.write([("f", hidden)])).replace("\ue000", value)
        if takes(said.compiler, said.fmt.grammar([used], "named", True), said.tokens(seen)):
            (name, arguments, end), = joined(scan(said.fmt, [seen], [used]))  # fmt: skip
            assert (name, end) == ("f", "closed"), seen
            jsonschema.validate(json.loads(arguments), dict(used.parameters))
            count += 1
    assert count > 60


def test_other_values_are_json_and_carry_their_own_definitions(said: Dialect) -> None:
    node = record({"n": {"$ref": "#/$defs/name"}, "below": {"$ref": "#/$defs/list"}})
    used = {
        **record({"tree": {"$ref": "#/$defs/node"}, "name": {"$ref": "#/$defs/name"}}),
        "$defs": {
            "node": node,
            "list": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
            "name": {"type": "string", "maxLength": 3},
        },
    }
    kinds = {param.name: param.kind for param in Schema(used).params()}
    assert kinds == {"tree": "json", "name": "text"}
    lark = said.fmt.grammar([Tool("f", "", used, True)], "named", True)

    def fits(value: object) -> bool:
        seen = said.written([("f", json.dumps(value))])
        return takes(said.compiler, lark, said.tokens(seen))

    leaf = {"n": "abc", "below": []}
    assert fits({"tree": {"n": "", "below": [leaf, leaf]}, "name": "abc"})
    assert not fits({"tree": {"n": "", "below": [leaf, leaf, leaf]}, "name": ""})
    assert not fits({"tree": {"n": "abcd", "below": []}, "name": ""})
    assert not fits({"tree": leaf, "name": "abcd"})
    free = {"type": "object", "properties": {"s": {"type": "string"}}}
    for value in ({"s": f'"{said.fmt.tags.stop}\\"x'}, {"s": said.fmt.tags.stop}, {}):
        taken, ((_, arguments, end),) = call(said, free, value)
        assert taken and (json.loads(arguments), end) == ({"x": value}, "closed")


def test_types_that_cannot_be_told_in_time_are_json() -> None:
    wide = {"$defs": {"a0": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/a40"}}}
    for i in range(40):
        both = [{"$ref": f"#/$defs/a{i}"}] * 2
        wide["$defs"][f"a{i + 1}"] = {"anyOf": both}
    (param,) = Schema(wide).params()
    assert param.kind == "json"
    loop = {"$defs": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}}}
    assert Schema(loop).kind({"$ref": "#/$defs/a"}) == "json"


@pytest.mark.parametrize(
    "pattern", ["(?=a)a", "a\\b", "^a$|b", "a^b", "(a)\\1", "(?<n>a)", "\\cA", "[\\D]"]
)
def test_a_pattern_without_a_form_for_whole_texts_is_named(pattern: str) -> None:
    assert regex(pattern) is None
    dropped = load("glm45").unenforced(
        Tool("f", "", record({"a/b": {"type": "string", "pattern": pattern}}), True)
    )
    assert [(one.pointer, one.keyword) for one in dropped] == [("/properties/a~1b", "pattern")]


def asked(schema: Any, strict: bool, name: str = "glm45") -> Any:
    listed = [tool("f", schema, strict)]
    return plan(listed, "required", None, None, load(name))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (record({"x": {"type": "string", "pattern": "^a$|^b$"}}), "pattern"),
        ({**record({"a": {"type": "string"}}, []), "minProperties": 1}, "minProperties"),
        (record({"a>b": {"type": "string"}}), "required"),
    ],
)
def test_what_a_layout_cannot_promise_is_refused_when_strict_and_else_relaxed(
    schema: Any, keyword: str
) -> None:
    with pytest.raises(BadSchema, match=f"{keyword!r} cannot be enforced") as refused:
        asked(schema, True)
    assert refused.value.code == "unsupported_schema_keyword"
    assert refused.value.param == "tools[0].function.parameters"
    loose = asked(schema, False)
    assert loose.schema_header.startswith("relaxed; pointer=")
    assert loose.schema_header.endswith(keyword)
    assert loose.complaint("f", "{}") != ""
    assert asked(schema, True, "hermes").dropped == ()


def test_members_are_the_texts_that_stand_there() -> None:
    text = ' { "a" : 1.50 , "b":[1, {"x": "},"}],"c": "\\u00e9" , "d":null}'
    assert list(members(text)) == [
        ("a", "1.50"), ("b", '[1, {"x": "},"}]'), ("c", '"\\u00e9"'), ("d", "null")
    ]  # fmt: skip
    assert list(members("{}")) == []
    for broken in ("", "[]", '{"a": 1', '{"a" 1}', "{1: 2}", '{"a": 1,}'):
        with pytest.raises(ValueError):
            list(members(broken))


#: What the models' own chat templates say of their layouts.
SPEAK = {
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}",
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}",
    "minimax_m2": "{%- set begin = '<minimax:tool_call>' -%}<invoke name=\"tool-name-1\">",
    "pythonic": "[func_name1(params_name1=params_value1, ...), func_name2(params)]",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
}


@pytest.mark.parametrize("name", SPEAK)
def test_a_model_speaks_the_layout_that_its_own_template_tells_of(name: str) -> None:
    assert pick(SPEAK[name], None).name == name
    assert pick(SPEAK[name] + "<tool_call> <|python_tag|>", None).name == name
