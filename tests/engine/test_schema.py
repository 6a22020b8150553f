"""The schema check: what is enforced, dropped, refused, and with which pointer and keyword."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from engine.grammar.schema import BadSchema, check, embed
from engine.grammar.verdict import refusal
from tests.schemas import FAMILIES, ODD, STRING, record, whole


def refused(schema: object, strict: bool = True, **more: Any) -> BadSchema:
    with pytest.raises(BadSchema) as caught:
        check(schema, strict=strict, **more)
    return caught.value


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_schema_is_enforced_as_it_is(name: str, strict: bool) -> None:
    checked = check(FAMILIES[name], strict=strict)
    assert checked.schema == FAMILIES[name]
    assert checked.dropped == ()


@pytest.mark.parametrize("name", ODD)
def test_an_odd_schema_is_enforced_or_refused_by_pointer_and_keyword(name: str) -> None:
    schema, wanted = ODD[name]
    if wanted is None:
        checked = check(schema, strict=True)
        assert checked.dropped == ()
        node = schema["properties"].get("x", {})
        assert checked.rewritten or checked.schema["properties"]["x"].items() >= node.items()
        return
    bad = refused(schema)
    assert (bad.code, bad.pointer, bad.keyword) == wanted
    assert (wanted[1] or "/") in bad.message and repr(wanted[2]) in bad.message


@pytest.mark.parametrize("name", ODD)
def test_without_strict_only_what_cannot_be_enforced_is_dropped(name: str) -> None:
    schema, wanted = ODD[name]
    if wanted and wanted[0] == "invalid_schema":
        assert refused(schema, strict=False).code == "invalid_schema"
        return
    checked = check(schema, strict=False)
    assert not refusal(embed(checked.schema))
    gone = {(d.pointer, d.keyword) for d in checked.dropped}
    assert ({wanted[1:]} if wanted else set()) <= gone
    assert checked.schema.get("required") == schema["required"]


UNSUPPORTED = {
    "propertyNames": {"maxLength": 3},
    "contains": {"const": 1},
    "not": {"pattern": "x"},
    "uniqueItems": True,
    "$dynamicRef": "#x",
    "minProperties": 1,
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_a_keyword_that_cannot_be_enforced_is_named_wherever_it_stands(keyword: str) -> None:
    inner = {"type": "object", "properties": {"x": STRING}, keyword: UNSUPPORTED[keyword]}
    for schema, pointer in (
        (inner, ""),
        (record({"a/b": inner}), "/properties/a~1b"),
        (record({"a": {"anyOf": [STRING, inner]}}), "/properties/a/anyOf/1"),
        (record({"a": {"$ref": "#/$defs/d"}}, **{"$defs": {"d": inner}}), "/$defs/d"),
        (record({"a": {"type": "array", "items": inner}}), "/properties/a/items"),
    ):
        bad = refused(schema)
        assert (bad.code, bad.pointer, bad.keyword) == (
            "unsupported_schema_keyword",
            pointer,
            keyword,
        )
        relaxed = check(schema, strict=False)
        assert [(d.pointer, d.keyword) for d in relaxed.dropped] == [(pointer, keyword)]
        assert not refusal(embed(relaxed.schema))


def test_a_property_may_be_named_like_a_keyword() -> None:
    schema = record({"not": STRING, "$ref": STRING, "if": STRING, "pattern": whole(1, 2)})
    assert check(schema, strict=True).schema == schema


def test_keywords_that_mean_nothing_are_left_out() -> None:
    noisy = record(
        {"a": {**STRING, "title": "A", "default": "x", "examples": ["y"], "deprecated": True}},
        **{"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "hi"},
        **{"uniqueItems": False, "dependentRequired": {}, "then": {"required": ["z"]}},
        **{"minContains": 1, "x-guidance": {"whitespace_flexible": True}, "nullable": True},
    )
    noisy["properties"]["a"]["additionalProperties"] = True
    assert check(noisy, strict=True).schema == record({"a": STRING})


def test_the_order_of_keys_is_kept() -> None:
    names = ["zeta", "alpha", "mid", "beta"]
    assert (
        list(check(record({n: STRING for n in names}), strict=True).schema["properties"]) == names
    )


@pytest.mark.parametrize("nothing", [None, {}, {"type": "object", "properties": {}}])
def test_no_parameters_means_the_empty_object(nothing: object) -> None:
    schema = check(nothing, strict=True).schema
    assert schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_free_form_object_stays_free() -> None:
    assert check({"type": "object"}, strict=True).schema == {"type": "object"}
    schema = {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}
    assert check(schema, strict=True).schema == schema


def test_parameters_without_a_type_are_an_object() -> None:
    assert check({"properties": {"a": STRING}}, strict=True).schema["type"] == "object"
    assert check({"type": ["null", "object"]}, strict=True).schema["type"] == "object"
    assert check({"type": "array", "items": STRING}, strict=True, root="any").dropped == ()


@pytest.mark.parametrize("root", [[], "object", 5, True])
def test_a_root_that_is_no_object_is_refused(root: object) -> None:
    assert refused(root).code == "invalid_schema"


@pytest.mark.parametrize(
    "broken",
    [
        {"properties": {"x": {"type": 5}}},
        {"properties": ["x"]},
        {"required": "x"},
        {"properties": {"x": {"minLength": -1}}},
        {"properties": {"x": {"enum": 3}}},
        {"properties": {"x": 3}},
        {"anyOf": []},
        {"properties": {"x": {"pattern": 7}}},
        {"properties": {"x": {"exclusiveMinimum": True}}},
        {"$ref": 7},
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_malformed_schema_is_always_refused(broken: dict[str, Any], strict: bool) -> None:
    assert refused(broken, strict=strict).code == "invalid_schema"


def test_draft_07_tuples_are_understood() -> None:
    schema = {"type": "array", "items": [STRING, {"type": "integer"}], "additionalItems": False}
    checked = check(record({"x": schema}), strict=True).schema["properties"]["x"]
    assert checked == {
        "type": "array",
        "prefixItems": [STRING, {"type": "integer"}],
        "items": False,
    }


def test_local_references_resolve_through_escapes_and_anchors() -> None:
    definitions = {"a/b~c d": STRING, "n": {"$anchor": "num", "type": "integer"}}
    schema = record(
        {"p": {"$ref": "#/$defs/a~1b~0c%20d"}, "q": {"$ref": "#num"}}, **{"$defs": definitions}
    )
    checked = check(schema, strict=True).schema
    assert not refusal(embed(checked))
    assert checked["properties"]["q"] == {"$ref": "#/$defs/n"}
    assert checked["properties"]["p"] == {"$ref": "#/$defs/a~1b~0c%20d"}


def test_a_reference_that_leads_only_to_itself_is_refused() -> None:
    loop = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    bad = refused(record({"x": {"$ref": "#/$defs/a"}}, **{"$defs": loop}), strict=False)
    assert (bad.code, bad.keyword) == ("invalid_schema", "$ref")
    assert refused({"$ref": "#"}, strict=False).keyword == "$ref"


@pytest.mark.parametrize(
    "ref", ["http://x/y", "file:///etc/passwd", "other.json", "#/properties", "#nowhere", "#/type"]
)
def test_a_reference_outside_or_to_nothing_is_refused(ref: str) -> None:
    assert refused(record({"x": {"$ref": ref}}), strict=False).pointer == "/properties/x"


def test_one_of_that_cannot_be_told_apart_becomes_any_of() -> None:
    schema = record({"x": {"oneOf": [{"type": "integer"}, {"type": "number"}]}})
    assert refused(schema).keyword == "oneOf"
    relaxed = check(schema, strict=False)
    assert relaxed.schema["properties"]["x"] == {"anyOf": [{"type": "integer"}, {"type": "number"}]}
    apart = record({"x": {"oneOf": [{"type": "integer"}, STRING]}})
    assert check(apart, strict=True).schema == apart


def test_patterns_that_overlap_are_dropped_with_what_depends_on_them() -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^x": STRING, "x$": STRING},
        "additionalProperties": False,
    }
    assert refused(schema).keyword == "patternProperties"
    assert check(schema, strict=False).schema == {"type": "object"}


def test_an_excluded_whole_number_that_would_leak_is_not_called_enforced() -> None:
    leaks = record({"x": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}})
    assert refused(leaks).keyword == "exclusiveMinimum"
    for fine in ({"exclusiveMinimum": 0, "maximum": 1}, {"exclusiveMaximum": 1.5, "minimum": 1}):
        assert check(record({"x": {"type": "number", **fine}}), strict=True).dropped == ()


@pytest.mark.parametrize("bound", [10**400, -(10**400)])
def test_an_excluded_number_beyond_floats_is_not_called_enforced(bound: int) -> None:
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        schema = record({"x": {"type": "number", keyword: bound, "minimum": 1.5}})
        assert refused(schema).keyword == keyword
        assert keyword in {gone.keyword for gone in check(schema, strict=False).dropped}


def test_an_unknown_format_matters_only_for_strings() -> None:
    assert refused(record({"x": {"type": "string", "format": "cidr"}})).keyword == "format"
    assert refused(record({"x": {"format": "cidr"}})).keyword == "format"
    schema = record({"x": {"type": "integer", "format": "int32"}})
    assert check(schema, strict=True).schema == record({"x": {"type": "integer"}})


def test_several_faults_are_all_listed() -> None:
    faults = {
        f"p{i}": {"type": "string", "pattern": pattern}
        for i, pattern in enumerate(["(?=a)", "(a)\\1", "((", "\\bx", "ok"])
    }
    relaxed = check(record(faults), strict=False)
    assert [d.pointer for d in relaxed.dropped] == [f"/properties/p{i}" for i in range(4)]
    assert relaxed.schema["properties"]["p4"] == faults["p4"]


def test_too_many_faults_leave_an_object() -> None:
    faults = {f"p{i}": {"type": "string", "pattern": "(?=a)"} for i in range(60)}
    relaxed = check(record(faults), strict=False)
    assert relaxed.schema == {"type": "object"}
    assert relaxed.dropped[-1].keyword == "*"


def test_what_was_dropped_is_not_blamed_again() -> None:
    """The parts of a keyword that is gone are gone, and `oneOf` has moved to `anyOf`."""
    bad = {"type": "string", "pattern": "(?=a)"}
    schema = {
        "type": "object",
        "properties": {"x": {"oneOf": [{"type": "integer"}, {"type": "number"}, bad]}},
        "patternProperties": {"^x": bad, "y$": STRING},
    }
    relaxed = check(schema, strict=False)
    kinds = [{"type": kind} for kind in ("integer", "number", "string")]
    assert relaxed.schema == {"type": "object", "properties": {"x": {"anyOf": kinds}}}
    assert all(d.keyword in ("oneOf", "pattern", "patternProperties") for d in relaxed.dropped)


def test_the_search_for_a_fault_leaves_the_references_as_they_were() -> None:
    definitions = {"d": {"type": "string", "pattern": "(?=a)"}, "e": {"$ref": "#/$defs/d"}}
    schema = record({"x": {"$ref": "#/$defs/e"}}, **{"$defs": definitions})
    relaxed = check(schema, strict=False)
    assert [(d.pointer, d.keyword) for d in relaxed.dropped] == [("/$defs/d", "pattern")]
    assert relaxed.schema["$defs"] == {"d": {"type": "string"}, "e": {"$ref": "#/$defs/d"}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = dict(STRING)
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"x": schema}}


def test_depth_is_bounded() -> None:
    assert check(nested(61), strict=True).dropped == ()
    assert "64 levels" in refused(nested(62)).message
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "64 levels" in refused({"enum": deep}).message


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        ({"properties": {f"p{i}": {} for i in range(5_001)}}, "5,000 objects"),
        ({"enum": [0] * 10_001}, "10,000 enum values"),
        ({"enum": ["x" * 500_001]}, "500,000 characters"),
        ({"properties": {"x": {"pattern": "a" * 4_097}}}, "4,096"),
        ({"properties": {f"p{i}": True for i in range(901)}}, "900 optional"),
        ({"enum": [float("inf")]}, "finite"),
    ],
)
def test_size_is_bounded(schema: dict[str, Any], limit: str) -> None:
    assert limit in refused(schema, strict=False).message


def test_no_pattern_of_a_request_is_ever_run(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "^(a|a)*$"
    seen: list[str] = []
    whole_compile = re._compiler.compile  # type: ignore[attr-defined]

    def watch(pattern: Any, flags: int = 0) -> Any:
        seen.append(str(pattern))
        return whole_compile(pattern, flags)

    monkeypatch.setattr(re._compiler, "compile", watch)  # type: ignore[attr-defined]
    re.compile("seen by the watch")
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string", "pattern": evil, "default": "a" * 40}},
        "patternProperties": {evil + "|^z": {"type": "integer"}},
    }
    check(schema, strict=False)
    assert "seen by the watch" in seen
    assert not [pattern for pattern in seen if evil in pattern]


@pytest.mark.timed
def test_hostile_schemas_are_answered_quickly() -> None:
    fan = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(24)}
    fan["d24"] = {"type": "integer"}
    faulty = {f"p{i}": {"type": "string", "pattern": f"(?=a){i}"} for i in range(1_000)}
    started = time.perf_counter()
    for schema in (
        record({"x": {"$ref": "#/$defs/d0"}}, **{"$defs": fan}),
        record(faulty),
        record({"x": {"type": "array", "maxItems": 2**63 - 1, "items": STRING}}),
        record({"x": {"type": "string", "maxLength": 10**30}}),
    ):
        try:
            check(schema, strict=False)
        except BadSchema:
            pass
    assert time.perf_counter() - started < 20  # about 1 s on an idle core


def test_the_schema_embeds_as_plain_ascii_json_with_white_space_pinned() -> None:
    text = embed(record({"straße": {"const": "\n\u2028"}}))
    assert text.isascii() and "\n" not in text
    assert json.loads(text)["x-guidance"] == {
        "item_separator": ", ",
        "key_separator": ": ",
        "whitespace_flexible": False,
    }
