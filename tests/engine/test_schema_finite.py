"""Schemas that no finite value satisfies are refused by name and place; others never are."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from engine.grammar.schema import BadSchema, check
from tests.schemas import STRING, record

SELF = {"$ref": "#"}
NODE = {"$ref": "#/$defs/node"}


def with_node(node: dict[str, Any]) -> dict[str, Any]:
    return record({"a": NODE}, **{"$defs": {"node": node}})


ENDLESS = {
    "itself": (record({"a": SELF}), "", "required"),
    "below": (with_node(record({"next": NODE})), "", "required"),
    "two by turns": (
        record({"a": {"$ref": "#/$defs/b"}}, **{"$defs": {
            "b": record({"c": {"$ref": "#/$defs/c"}}), "c": record({"b": {"$ref": "#/$defs/b"}}),
        }}), "", "required",
    ),
    "items": (with_node({"type": "array", "items": NODE, "minItems": 1}), "", "required"),
    "first item": (with_node({"type": "array", "prefixItems": [NODE], "minItems": 1}), "",
                   "required"),
    "every alternative": (with_node({"anyOf": [record({"x": NODE}), {
        "type": "array", "items": NODE, "minItems": 2}]}), "", "required"),
    "all of": (with_node({"allOf": [record({"x": NODE}), {"type": "object"}]}), "", "required"),
    "any other key": (
        record({}, additionalProperties=SELF, required=["a"]), "", "required",
    ),
    "never": (record({"a": False}), "", "required"),
}  # fmt: skip
FINITE = {
    "optional": {**record({"a": SELF}), "required": []},
    "or null": with_node({"anyOf": [record({"next": NODE}), {"type": "null"}]}),
    "an empty list": with_node({"type": "array", "items": NODE}),
    "a list with one that is no list": with_node(
        {"type": "array", "items": {"anyOf": [NODE, STRING]}, "minItems": 1}),
    "any type": with_node({"properties": {"next": NODE}, "required": ["next"]}),
    "a word": with_node({"type": ["object", "string"], "required": ["next"],
                         "properties": {"next": NODE}}),
    "an example": with_node({"enum": ["x"], "properties": {"next": NODE}}),
    "a key by its pattern": record({}, patternProperties={"^a": STRING}, required=["ab"]),
    "never, but optional": {**record({"a": False}), "required": []},
    "tree": with_node(record({"left": {"anyOf": [NODE, {"type": "null"}]}, "name": STRING})),
}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", list(ENDLESS))
def test_a_schema_without_a_finite_value_is_refused_whoever_asks(name: str, strict: bool) -> None:
    schema, _, keyword = ENDLESS[name]
    with pytest.raises(BadSchema, match="no finite value satisfies it") as bad:
        check(schema, strict=strict)
    assert bad.value.code == "invalid_schema"
    assert bad.value.keyword in (keyword, "$ref", "minItems", "allOf", "anyOf")
    assert str(bad.value).startswith(f"at {bad.value.pointer or '/'}:")


@pytest.mark.parametrize("name", list(FINITE))
def test_recursion_that_can_end_is_not(name: str) -> None:
    try:
        check(FINITE[name], strict=False)
    except BadSchema as bad:
        assert "no finite value" not in str(bad)


def value_of(schema: dict[str, Any], depth: int) -> bool:
    """Whether a value nested at most so deep satisfies the schema; found by trying."""

    @functools.cache
    def found(name: str, left: int) -> bool:
        return tried(schema["$defs"][name], left)

    def tried(node: Any, left: int) -> bool:
        if left == 0:
            return False
        if "$ref" in node:
            return found(node["$ref"].rpartition("/")[2], left - 1)
        if "anyOf" in node:
            return any(tried(one, left) for one in node["anyOf"])
        if node["type"] == "array":
            return not node["minItems"] or tried(node["items"], left - 1)
        if node["type"] == "object":
            return all(tried(node["properties"][name], left - 1) for name in node["required"])
        return True

    return tried({key: value for key, value in schema.items() if key != "$defs"}, depth)


@pytest.mark.parametrize("seed", range(150))
def test_it_finds_what_a_search_finds(seed: int) -> None:
    chance = random.Random(seed)
    names = ["a", "b", "c", "d"]

    def node(depth: int) -> dict[str, Any]:
        kind = chance.choice(["ref", "ref", "object", "array", "either", "word"])
        if kind == "ref" or (depth == 0 and kind != "word"):
            return {"$ref": f"#/$defs/{chance.choice(names)}"}
        if kind == "object":
            props = {name: node(depth - 1) for name in chance.sample(names, 2)}
            needed = [name for name in props if chance.random() < 0.7]
            return {"type": "object", "properties": props, "required": needed,
                    "additionalProperties": False}
        if kind == "array":
            return {"type": "array", "items": node(depth - 1), "minItems": chance.randint(0, 1)}
        if kind == "either":
            return {"anyOf": [node(depth - 1), node(depth - 1)]}
        return {"type": "string", "maxLength": 3}

    schema = record({"x": node(2)}, **{"$defs": {name: node(2) for name in names}})
    try:
        check(schema, strict=True)
        refused = ""
    except BadSchema as bad:
        refused = str(bad)
    if "leads only to itself" in refused:
        return
    assert ("no finite value" in refused) == (not value_of(schema, 60)), refused
