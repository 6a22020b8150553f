"""What a schema would cost is counted beforehand: what patterns ask for, what holds at once."""

from __future__ import annotations

from typing import Any

import pytest

from engine.grammar.clean import Cleaner
from engine.grammar.schema import NODE_LIMIT, BadSchema, check, measure
from engine.grammar.work import AT_ONCE, crowds, least
from tests.schemas import STRING, record


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        ("^a{1000000}$", 1_000_000), ("(ab){100}", 200), ("(a{100}){1000}", 100_000),
        ("a{0,100000}", 0), ("a{5,}b+c*d?", 6), (r"\p{L}{3}x", 4), ("[]a{9}]{3}", 3),
        (r"[\]{]{4}", 4), ("[^]]{2}", 2), ("(a|b{3}){2}", 8), ("a{x}", 4), ("(((", 0), ("a)b", 3),
        (r"(?:\S+\s+){0,99}\S+", 1), ("a{3", 3), ("", 0), ("\\", 1),
    ],
)  # fmt: skip
def test_a_pattern_is_asked_how_long_its_texts_are_at_least(pattern: str, characters: int) -> None:
    assert least(pattern) == characters


@pytest.mark.parametrize(
    ("costly", "plain"),
    [
        ({"format": "uri"}, {"format": "x"}), ({"pattern": "a" * 400}, {"pattern": "a"}),
        ({"minimum": 10**17 // 3}, {"minimum": 3}), ({"multipleOf": 70_001}, {"multipleOf": 7}),
        ({"maximum": 0.12345678901234567}, {"maximum": 0.5}),
    ],
)  # fmt: skip
def test_what_takes_long_counts_as_many_subschemas(costly: Any, plain: Any) -> None:
    assert measure({"a": costly}) > measure({"a": plain}) == 2
    check({"items": plain, "type": "array"}, strict=False, root="any")
    with pytest.raises(BadSchema, match=f"{NODE_LIMIT:,}"):
        measure({"prefixItems": [costly] * NODE_LIMIT})


def found(schema: dict[str, Any]) -> list[tuple[str, str]]:
    return list(crowds(Cleaner(schema, False, []).run()))


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"pattern": f"{i}x"} for i in range(count)]


def test_rules_for_one_text_are_counted_and_those_for_others_are_not() -> None:
    assert found({"allOf": patterns(AT_ONCE)}) == []
    assert found({"allOf": patterns(AT_ONCE + 1)}) == [("", "allOf")]
    assert found({"allOf": patterns(AT_ONCE), "maxLength": 9}) == [("", "allOf")]
    assert found({"anyOf": patterns(99)}) == []
    mixins = [record({f"p{i}": {"pattern": "a"}}) for i in range(99)]
    assert found({"allOf": mixins}) == []
    same = [record({"p": {"items": {"pattern": f"{i}"}}}) for i in range(AT_ONCE + 1)]
    assert found({"allOf": same}) == [("", "allOf")]
    assert found(record({f"p{i}": {"pattern": "a", "format": "date"} for i in range(99)})) == []


def test_rules_are_counted_through_references_and_not_round_in_circles() -> None:
    chain = {f"d{i}": {"pattern": f"{i}", "$ref": f"#/$defs/d{i + 1}"} for i in range(AT_ONCE + 1)}
    (crowd,) = found({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{AT_ONCE + 1}": STRING}})
    assert crowd == ("/$defs/d0", "$ref")
    node = {"pattern": "a", "allOf": [{"$ref": "#/$defs/n"}]}
    assert found({"$ref": "#/$defs/n", "$defs": {"n": node}}) == []
    tree = record({"name": {"pattern": "a"}, "next": {"$ref": "#"}})
    assert found(tree) == []


def test_alternatives_are_multiplied_only_where_they_meet() -> None:
    assert found({"anyOf": patterns(400)}) == []
    met = {"allOf": [{"anyOf": patterns(80)}, {"anyOf": patterns(80)}]}
    assert found(met) == [("", "allOf")]
    assert found(record({"a": {"anyOf": patterns(80)}, "b": {"anyOf": patterns(80)}})) == []


def test_without_strict_only_what_crowds_is_dropped() -> None:
    schema = record({"x": {"type": "string", "allOf": patterns(AT_ONCE + 1), "maxLength": 5}})
    checked = check(schema, strict=False)
    (gone,) = checked.dropped
    assert (gone.pointer, gone.keyword) == ("/properties/x", "allOf")
    assert checked.schema == record({"x": {"type": "string", "maxLength": 5}})
