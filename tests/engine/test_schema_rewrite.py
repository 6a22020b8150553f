"""Keywords that are said in others: exactly what they allow, never more; shown, and never alone."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.grammar.explain import rows
from engine.grammar.negate import VISITS, NoOpposite, Opposites
from engine.grammar.schema import BadSchema, Checked, check, embed
from tests.calls import byte_compiler, takes
from tests.schemas import STRING, record, whole

AB = {"a": {"enum": [1, 2, None]}, "b": {"type": ["integer", "string"]}, "c": {}}


def thing(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": AB, "additionalProperties": False, **keywords}


def strict(schema: Any) -> Checked:
    return check(schema, strict=True, root="any")


def says(checked: Checked, value: object) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    return takes(byte_compiler(), f"start: %json {embed(checked.schema)}\n", text)


EXACT: dict[str, dict[str, Any]] = {
    "not const": thing(**{"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}),
    "not type": {"not": {"type": ["string", "null"]}},
    "not enum": {"not": {"enum": ["x", "xy", 1, 2.5, True, None]}},
    "not required": thing(**{"not": {"required": ["a", "b"]}}),
    "not a bound": {"type": "integer", "not": {"minimum": 1, "maximum": 2}},
    "not a length": {"not": {"minLength": 2}},
    "not anything of": {"not": {"anyOf": [{"type": "string"}, {"minimum": 2}]}},
    "not not": {"not": {"not": {"type": "integer"}}},
    "not by reference": {"not": {"$ref": "#/$defs/d"}, "$defs": {"d": {"type": "string"}}},
    "if": thing(**{"if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
                   "then": {"required": ["b"]}, "else": {"required": ["c"]}}),
    "if without the key": thing(**{"if": {"properties": {"a": {"const": 1}}},
                                   "then": {"required": ["b"]}}),
    "if not": thing(**{"if": {"required": ["a"]}, "else": {"required": ["b"]}}),
    "dependentRequired": thing(dependentRequired={"a": ["b", "c"]}),
    "dependentRequired of anything": {"dependentRequired": {"a": ["b"]}, "properties": AB},
    "dependentSchemas": thing(dependentSchemas={"a": {"properties": {"b": {"type": "string"}}}}),
    "dependencies": thing(dependencies={"a": ["b"], "b": {"required": ["c"]}}),
    "oneOf of required": thing(oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
    "oneOf that overlap": {"oneOf": [{"type": "number", "minimum": 0},
                                     {"type": ["number", "null"], "maximum": 1}]},
    "propertyNames by enum": thing(propertyNames={"enum": ["a", "b"]}),
    "propertyNames by pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    "propertyNames by length": {"type": "object", "propertyNames": {"maxLength": 1},
                                "additionalProperties": {"type": "integer"}},
    "unevaluatedProperties": {"type": "object", "properties": {"a": {}}, "unevaluatedProperties":
                              False, "allOf": [{"properties": {"b": {"type": "integer"}}}]},
    "unevaluatedItems": {"type": "array", "prefixItems": [{}, {"type": "integer"}],
                         "unevaluatedItems": False},
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2, "x"]}, "uniqueItems": True},
    "uniqueItems by type": {"type": "array", "items": {"enum": [1, 2, "x", 3], "type": "integer"},
                            "uniqueItems": True, "minItems": 1, "maxItems": 2},
    "contains that nothing must be": {"contains": {"const": 1}, "minContains": 0},
}  # fmt: skip
LEAVES = [1, 2, 3, 0, -1, 2.5, 1.5, "x", "xy", "", "b", None, True, False]
OBJECTS = [dict(zip(keys, values, strict=True)) for size in range(4)
           for keys in itertools.combinations("abc", size)
           for values in itertools.product([1, 2, None, "x"], repeat=size)]  # fmt: skip
VALUES = [*LEAVES, *OBJECTS, {"d": 1}, {"a": 1, "d": 1}, {"ab": 1}, [], [1], [1, 2], [1, "x"],
          [1, 2, 3], [2, 1], [1, 1], [2, "x", 1], [1, 2, 1]]  # fmt: skip


def judge(schema: dict[str, Any], checked: Checked, values: list[Any]) -> list[Any]:
    """The values that the grammar takes though they are invalid, or refuses though valid."""
    valid = Draft202012Validator(_with_dependencies(schema)).is_valid
    return [value for value in values if says(checked, value) != valid(value)]


def _with_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without `dependencies`, which the validator of this draft ignores."""
    schema = dict(schema)
    for name, needs in schema.pop("dependencies", {}).items():
        kind = "dependentRequired" if isinstance(needs, list) else "dependentSchemas"
        schema[kind] = {**schema.get(kind, {}), name: needs}
    return schema


@pytest.mark.parametrize("name", EXACT)
def test_a_keyword_in_other_words_allows_exactly_the_same(name: str) -> None:
    checked = strict(EXACT[name])
    assert checked.rewritten and checked.dropped == ()
    assert judge(EXACT[name], checked, VALUES) == []
    assert check(EXACT[name], strict=False, root="any") == checked


PARTS: list[Any] = [
    True, False, {}, {"type": "string"}, {"const": 1}, {"enum": [1, "x"]}, {"minimum": 2},
    {"required": ["a"]}, {"required": ["a", "b"]}, {"properties": {"a": {"const": 1}}},
    {"properties": {"b": {"type": "string"}}, "required": ["b"]}, {"maxLength": 1},
    {"type": ["integer", "null"]}, {"type": "object"}, {"properties": {"c": False}},
]  # fmt: skip


def random_schema(rng: random.Random, depth: int = 2) -> Any:
    if not depth or rng.random() < 0.3:
        return copy.deepcopy(rng.choice(PARTS))
    more = [random_schema(rng, depth - 1) for _ in range(3)]
    return rng.choice([
        {"not": more[0]}, {"if": more[0], "then": more[1], "else": more[2]}, {"oneOf": more[:2]},
        {"if": more[0], "then": more[1]}, {"anyOf": more[:2]}, {"allOf": more[:2]},
        {"dependentRequired": {"a": ["b"], "c": ["a"]}}, {"dependentSchemas": {"a": more[0]}},
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_random_schemas_in_other_words_take_nothing_more(seed: int) -> None:
    rng = random.Random(seed)
    told = 0
    for _ in range(25):
        inner = random_schema(rng)
        if not isinstance(inner, dict):
            continue
        schema = {"properties": AB, "additionalProperties": False, **inner}
        try:
            checked = strict(schema)
        except BadSchema:
            continue
        values = [*rng.sample(OBJECTS, 12), *rng.sample(LEAVES, 4)]
        told += bool(checked.rewritten)
        wrong = judge(schema, checked, values)
        assert wrong == [], schema
    assert told > 3


def test_a_person_sees_what_is_said_in_other_words() -> None:
    schema = EXACT["if"]
    shown = {(row.pointer, row.state): row.keywords for row in rows(schema, strict(schema))}
    assert shown["", "rewritten"] == ("if", "then", "else")
    assert "if" not in shown["", "enforced"] and ("", "ignored") not in shown


def test_a_schema_is_refused_for_what_keeps_it_from_being_enforced() -> None:
    tags = {"type": "array", "uniqueItems": True}
    schema = record({"a": {"not": {"type": "string"}}, "b": tags})
    with pytest.raises(BadSchema) as caught:
        check(schema, strict=True)
    assert (caught.value.pointer, caught.value.keyword) == ("/properties/b", "uniqueItems")
    relaxed = check(schema, strict=False)
    assert [(gone.pointer, gone.keyword) for gone in relaxed.dropped] == [
        ("/properties/b", "uniqueItems")
    ]
    assert relaxed.rewritten == (("/properties/a", "not"),)


@pytest.mark.parametrize(
    ("keyword", "node"),
    [
        ("not", {"not": {"type": "string", "pattern": "a"}}),
        ("not", {"not": {"type": "integer"}}),
        ("not", {"not": {"const": {"a": 1}}}),
        ("not", {"not": {"enum": ["a" * 300]}}),
        ("uniqueItems", {"uniqueItems": True}),
        ("uniqueItems", {"type": "array", "items": {"enum": [1, 1.0]}, "uniqueItems": True}),
        ("uniqueItems", {"type": "array", "items": {"enum": [*"abcdefgh"]}, "uniqueItems": True}),
        ("propertyNames", {"propertyNames": {"pattern": "^a", "maxLength": 3}}),
        ("propertyNames", {"propertyNames": {"pattern": "^a"}, "patternProperties": {"b": {}}}),
        ("oneOf", {"oneOf": [{"minLength": i} for i in range(5)]}),
        ("if", {"if": {"format": "date"}, "then": {"minLength": 3}}),
        ("unevaluatedProperties", {"anyOf": [{"properties": {"a": {}}}],
                                   "unevaluatedProperties": False}),
        ("unevaluatedItems", {"contains": {"const": 1}, "minContains": 0,
                              "unevaluatedItems": False}),
    ],
)  # fmt: skip
def test_what_has_no_exact_words_is_refused_as_it_is(keyword: str, node: dict[str, Any]) -> None:
    with pytest.raises(BadSchema) as caught:
        check(record({"x": node}), strict=True)
    assert (caught.value.pointer, caught.value.keyword) == ("/properties/x", keyword)


def test_the_keys_come_in_the_order_of_the_properties() -> None:
    schema = record({"z": STRING, "a": whole(1, 3)}, [], **{
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["z"]}})
    checked = strict({"if": schema.pop("if"), "then": schema.pop("then"), **schema})
    assert says(checked, {"z": "s", "a": 1}) and not says(checked, {"a": 1})
    assert not says(checked, {"a": 1, "z": "s"})


def test_opposites_within_opposites_are_counted() -> None:
    seen: list[str] = []

    def resolve(ref: str) -> Any:
        seen.append(ref)
        return {"anyOf": [{"$ref": "#"}] * 10}  # 10^8 to look at

    with pytest.raises(NoOpposite):
        Opposites(resolve).of({"anyOf": [{"type": "null"}, {"$ref": "#"}]})
    told = Opposites(resolve)
    for _ in range(2 * VISITS):
        with pytest.raises(NoOpposite):
            told.of({"format": "date"})
    with pytest.raises(NoOpposite):
        told.of({"type": "null"})  # which has one, but not after so many
    assert len(seen) <= VISITS


@pytest.mark.parametrize(
    "keyword",
    [
        {"oneOf": [{"required": ["d"]}, {"required": ["c", "b"]}]},
        {"not": {"required": ["d", "a"]}},
        {"if": {"required": ["d"]}, "then": {"required": ["a"]}, "else": {"required": ["c"]}},
        {"dependentRequired": {"d": ["b"]}},
    ],
    ids=lambda keyword: next(iter(keyword)),
)
@pytest.mark.parametrize("first", [True, False])
def test_what_is_said_otherwise_keeps_the_schemas_own_order_of_keys(
    keyword: dict[str, Any], first: bool
) -> None:
    plain = {"type": "object", "properties": {name: whole(0, 9) for name in "abcd"}}
    schema = {**keyword, **plain} if first else {**plain, **keyword}
    said, judge = strict(schema), Draft202012Validator(schema)
    assert said.rewritten
    for size in range(5):
        for keys in itertools.permutations("abcd", size):
            value = dict.fromkeys(keys, 1)
            ordered = list(keys) == sorted(keys)  # as llguidance writes an object, always
            assert says(said, value) == (ordered and judge.is_valid(value)), value
            assert says(strict(plain), value) == ordered
