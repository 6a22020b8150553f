"""Schemas made to hurt: each is answered soon, by a grammar or by a refusal in words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import llguidance
import pytest

from engine.grammar.matcher import GrammarRefused
from engine.grammar.schema import BadSchema, check, embed
from gateway.tools.choice import plan
from tests.calls import HERMES, byte_compiler
from tests.schemas import STRING, record, tool, whole

SECONDS = 8.0  # of the thread's CPU time; a quiet core needs half a second, a slow one 2.4


def fan(keyword: str, depth: int, each: int = 2) -> dict[str, Any]:
    """References that a naive walk follows each^depth times."""
    parts: dict[str, Any] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * each} for i in range(depth)
    }
    return record({"x": {"$ref": "#/$defs/d0"}}, **{"$defs": {**parts, f"d{depth}": whole(0, 9)}})


def property_fan(depth: int) -> dict[str, Any]:
    parts: dict[str, Any] = {
        f"d{i}": record({"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}})
        for i in range(depth)
    }
    return record({"x": {"$ref": "#/$defs/d0"}}, **{"$defs": {**parts, f"d{depth}": STRING}})


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = dict(STRING)
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return record({"x": schema})


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": STRING for i in range(count)}}


def nested_one_of(levels: int) -> dict[str, Any]:
    """Said in other words, each level would be four of the one below."""
    inner: dict[str, Any] = {"required": ["a"]}
    for i in range(levels):
        inner = {"oneOf": [inner, {"required": [f"b{i}"], "properties": {"c": inner}}]}
    return inner


def nested_if(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"required": ["a"]}
    for i in range(levels):
        inner = {"if": inner, "then": {"required": [f"b{i}"]}}
    return inner


def strings(patterns: list[str]) -> dict[str, Any]:
    return record({f"p{i}": {"type": "string", "pattern": p} for i, p in enumerate(patterns)})


def anything(**keywords: Any) -> dict[str, Any]:
    return record({"x": keywords})


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "20,000 enum values": lambda: anything(enum=[f"value {i}" for i in range(20_000)]),
    "10,000 enum values": lambda: anything(enum=[f"value {i}" for i in range(10_000)]),
    "4,900 objects in an enum": lambda: anything(enum=[{"a": i} for i in range(4_900)]),
    "allOf of references": lambda: fan("allOf", 24),
    "anyOf of references": lambda: fan("anyOf", 24),
    "oneOf of references": lambda: fan("oneOf", 24),
    "eightfold allOf": lambda: fan("allOf", 20, 8),
    "properties of references": lambda: property_fan(24),
    "maxItems": lambda: anything(type="array", maxItems=2**63 - 1, items=STRING),
    "minItems": lambda: anything(type="array", minItems=2**63 - 1, items=STRING),
    "maxLength": lambda: anything(type="string", maxLength=10**30),
    "minLength": lambda: anything(type="string", minLength=10**6),
    "depth 60": lambda: nested(60),
    "depth 65": lambda: nested(65),
    "depth 200": lambda: nested(200),
    "900 optional properties": lambda: wide(900),
    "4,000 optional properties": lambda: wide(4_000),
    "five times 900": lambda: record({f"o{i}": wide(900) for i in range(5)}),
    "20,000 required names": lambda: {
        "type": "object", "required": [f"r{i}" for i in range(20_000)]},
    "stars in stars": lambda: strings(["^((a*)*)*$", "^(a|a)*(a|a)*b$", "^(((a+)+)+)+$"]),
    "counts in counts": lambda: strings(["^(((a{0,100}){0,100}){0,100}){0,100}$"]),
    "a count of a million": lambda: strings(["^a{1000000}$"]),
    "exponential states": lambda: strings(["(a|b)*a(a|b){200}", "a.{0,200}b.{0,200}c.{0,200}d"]),
    "1,000 faulty patterns": lambda: strings([f"(?=a){i}" for i in range(1_000)]),
    "patterns of keys": lambda: {
        "type": "object", "patternProperties": {f"x{i}": STRING for i in range(60)}},
    "1,200 alternatives": lambda: anything(
        oneOf=[record({"k": {"const": i}}) for i in range(1_200)]),
    "1,200 that overlap": lambda: anything(
        oneOf=[{"type": "string", "minLength": i} for i in range(1_200)]),
    "a large divisor": lambda: anything(type="integer", multipleOf=999_983),
    "a larger divisor": lambda: anything(type="number", multipleOf=2**61 - 1),
    "many divisors": lambda: record({f"p{i}": {"multipleOf": 20_011 + 2 * i} for i in range(99)}),
    "20 patterns at once": lambda: anything(
        allOf=[{"pattern": f".*{c}.{{{20 + i}}}$"} for i, c in enumerate("abcdefghijklmnopqrst")]),
    "20 patterns at once, far below": lambda: {"type": "object", "allOf": [
        record({"x": {"items": {"pattern": f".*{c}.{{{20 + i}}}$"}}}, ["x"])
        for i, c in enumerate("abcdefghijklmnopqrst")]},
    "20 patterns by reference": lambda: record({"x": {"$ref": "#/$defs/d0"}}, **{"$defs": {
        f"d{i}": {"pattern": f".*{chr(97 + i)}.{{{20 + i}}}$", "$ref": f"#/$defs/d{i + 1}"}
        for i in range(20)} | {"d20": STRING}}),
    "alternatives times alternatives": lambda: anything(allOf=[
        {"anyOf": [{"type": "string", "pattern": f"{c}{i}"} for i in range(200)]} for c in "ab"]),
    "600 patterns of keys": lambda: {
        "type": "object", "patternProperties": {f"^p{i}_": STRING for i in range(600)}},
    "a million letters of a key": lambda: {
        "type": "object", "patternProperties": {"^(a{1000}){1000}$": STRING}},
    "1,600 formats": lambda: record({f"p{i}": {"format": "uri"} for i in range(1_600)}),
    "1,600 ranges": lambda: record({f"p{i}": {
        "type": "integer", "minimum": -98765432109876543 + i, "maximum": 1234567890123456789}
        for i in range(1_600)}),
    "nested oneOf": lambda: anything(**nested_one_of(9)),
    "nested if": lambda: anything(**nested_if(50)),
    "huge bounds": lambda: anything(type="integer", minimum=10**300, maximum=10**301),
    "1,500 references in a row": lambda: record({"x": {"$ref": "#/$defs/d0"}}, **{
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1_500)}
        | {"d1500": STRING}}),
    "2,000 subschemas that are refused late": lambda: record(
        {**{f"p{i}": {"not": {}} for i in range(1_999)}, "z": {"type": "nothing"}}),
}  # fmt: skip


def judged(schema: dict[str, Any], strict: bool) -> str:
    """The check and the grammar: "" when it is one, else the words of the refusal."""
    try:
        checked = check(schema, strict=strict)
    except BadSchema as bad:
        return bad.message
    lark = f"start: %json {embed(checked.schema)}\n"
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark, log_level=0)
    assert not matcher.is_error()
    return ""


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_answered_soon(name: str, strict: bool) -> None:
    schema = HOSTILE[name]()
    start = time.thread_time()  # ours alone: other work on the machine must not count
    said = judged(schema, strict)
    assert time.thread_time() - start < SECONDS
    assert not said or said[-1] == "." or "JSON Schema" in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("20,000 enum values", "10,000 enum values"), ("depth 65", "64 levels"),
        ("4,000 optional properties", "900 optional"), ("20,000 required names", "2,000 names"),
        ("a large divisor", "too large"), ("many divisors", "5,000 objects"),
        ("1,200 alternatives", "too many alternatives"),
        ("a count of a million", "more than 10,000 characters"),
        ("a million letters of a key", "more than 10,000 characters"),
        ("20 patterns at once", "more than 10 patterns"),
        ("20 patterns at once, far below", "more than 10 patterns"),
        ("20 patterns by reference", "more than 10 patterns"),
        ("alternatives times alternatives", "5,000 combinations"),
        ("600 patterns of keys", "too many patterns"), ("1,600 formats", "5,000 objects"),
        ("1,600 ranges", "5,000 objects"),
    ],
)  # fmt: skip
def test_what_is_too_much_is_refused_with_its_limit(name: str, says: str) -> None:
    assert says in judged(HOSTILE[name](), strict=True)


def test_alternatives_that_are_too_many_to_tell_apart_are_still_alternatives() -> None:
    checked = check(HOSTILE["1,200 that overlap"](), strict=False)
    (gone,) = checked.dropped
    assert (gone.pointer, gone.keyword) == ("/properties/x", "oneOf")
    assert len(checked.schema["properties"]["x"]["anyOf"]) == 1_200


def required(count: int, each: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    return record({f"p{i}": each(i) for i in range(count)})


MANY: dict[str, Callable[[int], dict[str, Any]]] = {
    "39 properties": lambda i: wide(39),
    "78 properties": lambda i: wide(78),
    "59 own properties": lambda i: {"properties": {f"p{i}_{j}": STRING for j in range(59)}},
    "59 required": lambda i: required(59, lambda j: STRING),
    "long enums": lambda i: anything(enum=["v" * 900] * 500),
    "divisors": lambda i: anything(type="integer", multipleOf=99_991),
    "faults": lambda i: strings([f"(?=a){j}" for j in range(30)]),
    "formats": lambda i: required(8, lambda j: {"type": "string", "format": "uri"}),
    "ranges": lambda i: required(15, lambda j: {"type": "number", "minimum": 0.1234567 * i + j}),
    "patterns": lambda i: required(30, lambda j: {"pattern": f"^(a{i}|b{j})+$"}),
    "words": lambda i: required(2, lambda j: {
        "type": "string", "pattern": rf"^(?:\S+\s+){{0,29}}\S+{9 * i + j}$", "maxLength": 300}),
    "states": lambda i: required(2, lambda j: {"pattern": f"(a|b)*a(a|b){{200}}{i}{j}$"}),
    "recursion": lambda i: {"properties": {"n": {"$ref": "#"}, "v": STRING}, "required": ["v"]},
    "overlaps": lambda i: anything(oneOf=[{"type": "string", "pattern": f"{j}$"}
                                          for j in range(12)]),
    "conditions": lambda i: record({"a": whole(0, 9), "b": STRING}, ["a"], **{
        "if": {"properties": {"a": {"const": i % 9}}}, "then": {"required": ["b"]}}),
}  # fmt: skip


@pytest.mark.timed
@pytest.mark.parametrize("name", MANY)
def test_128_large_tools_are_answered_soon(name: str) -> None:
    """Checked, compiled and with an ending found, or refused."""
    tools = [tool(f"t{i}", MANY[name](i), strict=False) for i in range(128)]
    compiler = byte_compiler()
    start = time.thread_time()
    try:
        planned = plan(json.dumps(tools).encode(), "required", True, None, HERMES)
        assert planned.grammar is not None
        compiler.compile(planned.grammar)
    except BadSchema as bad:
        assert "together" in bad.message or "large" in bad.message
    except GrammarRefused as refused:
        assert refused.message.endswith(".")
    assert time.thread_time() - start < SECONDS
