"""What the schema check makes of words beside the plain ones: types, formats, `$id`, counts."""

from __future__ import annotations

import copy
import datetime
import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.grammar.schema import BadSchema, check, embed
from engine.grammar.verdict import refusal
from engine.grammar.wellformed import well_formed
from tests.calls import byte_compiler, takes
from tests.schemas import FAMILIES, ODD, STRING, record, whole


def refused(schema: object, strict: bool = True, **more: Any) -> BadSchema:
    with pytest.raises(BadSchema) as caught:
        check(schema, strict=strict, **more)
    return caught.value


def says(schema: dict[str, Any], value: object) -> bool:
    """Whether the strict grammar of the schema takes the value as json.dumps prints it."""
    checked = check(schema, strict=True, root="any")
    text = json.dumps(value, ensure_ascii=False)
    return takes(byte_compiler(), f"start: %json {embed(checked.schema)}\n", text)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("dict", "'object'"), ("float", "'number'"), ("tuple", "'array'"), ("int", "'integer'"),
     ("STRING", "'string'"), ("bool", "'boolean'"), ("None", "'null'"), ("strin", "'string'"),
     ("any", "Leave 'type' out"), ("qqq", "Use one of string, number")],
)  # fmt: skip
@pytest.mark.parametrize("strict", [True, False])
def test_a_type_of_another_language_is_refused_with_the_one_that_is_meant(word, meant, strict):
    for schema in (record({"x": {"type": word}}), record({"x": {"type": ["string", word]}})):
        bad = refused(schema, strict)
        assert bad.code == "invalid_schema" and bad.pointer.startswith("/properties/x")
        assert meant in bad.message
    assert "'object'" in refused({"type": "dict", "properties": {}}, strict).message


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-02-28", "1999-12-31"],
         ["2023-02-29", "1900-02-29", "2100-02-29", "0000-01-01", "2024-02-30", "2024-13-01"]),
        ("time", ["23:59:60Z", "23:59:60.5+00:00", "10:20:30.123z", "00:00:00-08:00"],
         ["22:59:60Z", "23:58:60Z", "23:59:60+01:00", "24:00:00Z", "10:20:30"]),
        ("date-time", ["2024-02-29T10:20:30Z", "1998-12-31t23:59:60z", "2024-02-28T01:02:03+04:00"],
         ["2023-02-29T10:20:30Z", "1998-12-31T22:59:60Z", "2024-02-29", "2024-02-29T10:20:60Z"]),
        ("hostname", ["a", "a-b.example", "a." * 126 + "a"], ["-a", "a..b", "a." * 127 + "a"]),
    ],
)  # fmt: skip
def test_a_format_takes_only_what_calendars_and_host_names_have(format, good, bad):
    for schema in ({"format": format}, {"type": "string", "format": format},
                   {"type": "string", "format": format, "pattern": "^[^x]", "maxLength": 400}):
        assert [says(schema, value) for value in good] == [True] * len(good)
        assert [says(schema, value) for value in bad] == [False] * len(bad)
    assert says({"format": format}, 5)


def test_the_days_of_a_date_are_those_of_the_calendar():
    years = [1, 4, 96, 100, 400, 1900, 1996, 2000, 2023, 2024, 2096, 2100, 2400, 9996, 9999]
    compiled = byte_compiler()
    lark = f"start: %json {embed(check({'format': 'date'}, strict=True, root='any').schema)}\n"
    for year in years:
        for month in (1, 2, 4, 12):
            for day in (0, 1, 28, 29, 30, 31, 32):
                try:
                    datetime.date(year, month, day)
                    real = True
                except ValueError:
                    real = False
                assert takes(compiled, lark, f'"{year:04}-{month:02}-{day:02}"') == real


def test_a_format_beside_a_pattern_keeps_both_also_when_checked_again():
    schema = record({"x": {"type": "string", "format": "date", "pattern": "-0[1-6]-"}, "y": {}})
    schema["properties"]["y"] = {"type": "string", "pattern": "(?=a)"}
    checked = check(schema, strict=False)  # the second word is dropped, so the rest is read again
    assert [gone.pointer for gone in checked.dropped] == ["/properties/y"]
    assert len(checked.schema["properties"]["x"]["allOf"]) == 1


def test_a_count_of_keys_that_a_doubled_key_would_meet_is_not_called_enforced():
    two = {"type": "object", "minProperties": 2}
    assert refused(two).keyword == "minProperties"
    assert check(two, strict=False).schema == {"type": "object"}
    one = {"type": "object", "minProperties": 1}
    assert not says(one, {}) and says(one, {"a": 1})
    needless = record({"a": STRING, "b": STRING}, minProperties=2)
    assert check(needless, strict=True).schema == record({"a": STRING, "b": STRING})


def test_references_by_the_documents_own_id_resolve():
    base = "https://x.test/s.json"
    schema = record({"a": {"$ref": base + "#/$defs/d"}, "b": {"$ref": "#n"}},
                    **{"$id": base, "$defs": {"d": whole(1, 3), "e": {"$anchor": "n"}}})
    checked = check(schema, strict=True).schema
    assert checked["properties"] == {"a": {"$ref": "#/$defs/d"}, "b": {"$ref": "#/$defs/e"}}
    assert refused(record({"a": {"$ref": base}}), strict=False).keyword == "$ref"


def test_an_id_below_the_root_matters_only_where_it_changes_a_reference():
    idle = record({"a": {"$id": "/properties/a", **STRING}})
    assert check(idle, strict=True).schema == record({"a": STRING})
    moved = record({"a": {"$id": "other.json", "items": {"$ref": "#/$defs/d"}}},
                   **{"$defs": {"d": STRING}})
    bad = refused(moved)
    assert (bad.pointer, bad.keyword) == ("/properties/a/items", "$ref")
    relaxed = check(moved, strict=False)
    assert relaxed.schema["properties"]["a"] == {"items": {}}
    assert [(gone.pointer, gone.keyword) for gone in relaxed.dropped] == [(bad.pointer, "$ref")]


def test_what_generators_of_draft_07_write_is_understood():
    schema = record({"a": {"$id": "#/properties/a", **STRING}, "b": {"$ref": "#num"}},
                    **{"definitions": {"n": {"$id": "#num", **whole(0, 9)}, "any": True}})
    checked = check(schema, strict=True).schema
    assert checked["properties"] == {"a": STRING, "b": {"$ref": "#/definitions/n"}}
    anything = record({"a": {"$ref": "#/definitions/any"}}, **{"definitions": {"any": True}})
    assert not refusal(embed(check(anything, strict=True).schema))


def test_nullable_is_no_word_of_json_schema_and_lets_no_null_through():
    schema = {"type": "string", "nullable": True}
    assert says(schema, "a") and not says(schema, None)
    assert says({"type": ["string", "null"]}, None)


def test_equal_names_in_the_definitions_of_two_schemas_do_not_meet():
    """Each tool's schema is a document of its own in the grammar."""
    points = [record({"p": {"$ref": "#/$defs/Point"}}, **{"$defs": {"Point": point}})
              for point in (record({"x": whole(0, 5)}), record({"y": STRING}))]
    first, second = (embed(check(point, strict=True).schema) for point in points)
    lark = f'start: "1" a | "2" b\na: %json {first}\nb: %json {second}\n'
    for text, good in (('1{"p": {"x": 3}}', True), ('2{"p": {"y": "s"}}', True),
                       ('1{"p": {"y": "s"}}', False), ('2{"p": {"x": 3}}', False)):
        assert takes(byte_compiler(), lark, text) == good


def test_what_is_quickly_called_well_formed_is_so_by_the_meta_schema():
    rng = random.Random(7)
    meta = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    junk = [None, True, -1, 0, 1.5, "", "string", "#a", [], ["a", "a"], ["string"], {}, {"a": 1},
            {"a": {"type": "no"}}, [{}], [1]]
    words = ["type", "enum", "required", "properties", "items", "not", "anyOf", "$defs", "$id",
             "$anchor", "minLength", "maximum", "multipleOf", "pattern", "format", "uniqueItems",
             "dependentRequired", "dependencies", "prefixItems", "$ref", "title", "x-y"]
    plain = [*FAMILIES.values(), *(schema for schema, _ in ODD.values())]
    sure = unsure = 0
    for _ in range(600):
        schema = copy.deepcopy(rng.choice(plain))
        at: Any = schema
        while (inner := [v for v in at.values() if isinstance(v, dict)]) and rng.random() < 0.7:
            at = rng.choice(inner)
        at[rng.choice(words)] = copy.deepcopy(rng.choice(junk))
        if well_formed(schema):
            assert meta.is_valid(schema), schema
            sure += 1
        else:
            unsure += 1
    assert sure > 50 and unsure > 50
