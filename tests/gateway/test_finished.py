"""Checks of finished arguments: what they find, and that no schema makes them slow.  No engine."""

from __future__ import annotations

import json
import time

import pytest

from gateway.tools.finished import NOT_JUDGED, complaint


def test_a_check_after_the_fact_runs_no_pattern_and_fetches_nothing() -> None:
    evil = {"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False, "not": {}}
    text = json.dumps({"a" * 40 + "b": "a" * 40 + "b"})
    assert complaint({"properties": {"x": {"pattern": "^(a|a)*$"}}, **evil}, text) == ": not"
    assert complaint({"$ref": "http://127.0.0.1:9/x"}, "{}") == ": not judged"
    assert complaint({}, "no json") == ": not judged"


def doubled(depth: int) -> dict[str, object]:
    """A schema of `depth` levels that is visited 2^depth times."""
    levels: dict[str, object] = {"d0": {"type": ["integer", "array"]}}
    for level in range(1, depth + 1):
        levels[f"d{level}"] = {"allOf": [{"$ref": f"#/$defs/d{level - 1}"}] * 2}
    return {"$defs": levels, "$ref": f"#/$defs/d{depth}"}


MANY = json.dumps(list(range(3_000)))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (doubled(16), "1"),
        (doubled(60), "1"),
        ({"items": {"enum": [str(word) for word in range(100_000)]}}, MANY),
        ({"anyOf": [{"type": "string"}] * 9_000}, MANY),
        ({"properties": {"a": {"$schema": "https://json-schema.org/draft/2020-12/schema",
                               **doubled(40)}}}, '{"a": 1}'),
        ({"unevaluatedItems": False, **doubled(40)}, "[1]"),
    ],
    ids=["depth 16", "depth 60", "enum", "anyOf", "dialect", "unevaluatedItems"],
)  # fmt: skip
def test_a_check_that_would_take_long_is_given_up(schema: object, text: str) -> None:
    start = time.thread_time()  # ours alone: other work on the machine must not count
    assert complaint(schema, text) == NOT_JUDGED
    assert time.thread_time() - start < 0.5


@pytest.mark.timed
def test_a_check_of_ordinary_depth_is_finished() -> None:
    assert complaint(doubled(8), "1") == ""
    assert complaint(doubled(8), '"x"') == ": type"


def test_a_pattern_does_not_run_below_a_schema_that_names_its_dialect_either() -> None:
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "^(a|a)*$"}
    assert complaint({"properties": {"x": dialect}}, json.dumps({"x": "a" * 40 + "b"})) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", ""), ('[1, "1", true, [1], {"a": 1}]', ""), ("[1, 1.0]", ": uniqueItems"),
        ('[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', ": uniqueItems"), ("[1, 2, 1]", ": uniqueItems"),
    ],
)  # fmt: skip
def test_equal_items_are_found_as_json_schema_defines_equal(text: str, said: str) -> None:
    assert complaint({"uniqueItems": True}, text) == said


def test_unique_items_of_mixed_types_are_judged_in_linear_time() -> None:
    mixed = json.dumps([*range(20_000), *map(str, range(20_000))])
    start = time.thread_time()
    assert complaint({"uniqueItems": True}, mixed) == ""
    assert time.thread_time() - start < 0.5


def test_a_number_beyond_floats_is_not_judged_instead_of_raising() -> None:
    assert complaint({"multipleOf": 0.5}, "1" + "0" * 400) == NOT_JUDGED
