"""`slipstream grammar`: what it shows of a schema, and its mistakes.  Runs no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

import slipstream
from engine.grammar.explain import Explainer, _spaced
from engine.grammar.schema import BadSchema, check
from tests.schemas import FAMILIES, STRING, record, tool, whole
from tests.tiny import write_llama

ORDER = record({"city": {"type": "string", "maxLength": 20}, "seats": whole(1, 90)})


def run(*arguments: str, **more: Any) -> Result:
    return CliRunner().invoke(slipstream.cli, ["grammar", *arguments], **more)


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def rejections(schema: dict[str, Any], *texts: str) -> list[tuple[int, str] | None]:
    explained = Explainer(check(schema, strict=True, root="any"))
    found = [explained.rejection(text) for text in texts]
    return [None if one is None else (one.at, one.expected) for one in found]


def test_each_line_of_the_instances_is_answered_by_one_json_line(tmp_path):
    schema = written(tmp_path, "schema.json", json.dumps(ORDER))
    lines = ['{"city":"Römé","seats":7}', "", '{"city": "Rome", "seats": 91}', "nonsense"]
    said = run(schema, "--check", written(tmp_path, "i.jsonl", "\n".join(lines)))
    assert said.exit_code == 0
    assert [json.loads(line) for line in said.output.splitlines()] == [
        {"line": 1, "accepted": True},
        {"line": 3, "accepted": False, "at": 27, "expected": "one of: '0', '}'"},
        {"line": 4, "accepted": False, "at": 0, "expected": '{"city": "'},
    ]


def test_a_rejection_says_where_and_what_was_expected():
    text = '{"city":"Römé\\n", "seats" :  0}'
    assert rejections(ORDER, text) == [(text.index("0"), "one of: '1', '2', '3', '4', '5', '6', "
                                        "'7', '8', '9'")]  # fmt: skip
    assert rejections(ORDER, '{"city": "' + "a" * 21) == [(30, '", "seats": ')]
    assert rejections(ORDER, '{"city": "a"') == [(12, ', "seats": ')]
    assert rejections(ORDER, '{"city": "a", "seats": 5} x') == [(26, "the end")]
    assert rejections(whole(0, 1000), "7x", "") == [(1, "a digit or the end"), (0, "a digit")]
    assert rejections(STRING, "5", '"a\n"') == [(0, '"'), (2, "any character of a string")]
    assert rejections({"enum": ["ä", "ö"]}, '"x"') == [(1, "a character beyond ASCII")]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_is_valid_and_taken_by_its_own_check(name, tmp_path_factory):
    model = str(write_llama(tmp_path_factory.mktemp("model")))
    explained = Explainer(check(FAMILIES[name], strict=True))
    for seed in range(3):
        sample, cost = explained.sample(model, seed)
        assert sample.whole and explained.rejection(sample.text) is None
        jsonschema.validate(json.loads(sample.text), FAMILIES[name])
        assert 0 <= sample.forced <= sample.tokens
        assert cost.compile_ms > 0 and cost.first_mask_ms > 0


def test_white_space_is_put_as_the_grammar_pins_it_and_leaves_strings_alone():
    assert _spaced(' {"a , b":1,\n"c":"x:\\"y, z"}')[0] == '{"a , b": 1, "c": "x:\\"y, z"}'
    spaced, origin = _spaced('[ 1,2 ]')
    assert (spaced, len(origin)) == ("[1, 2]", 7)
    assert [origin[i] for i in (0, 1, 4, 5, 6)] == [0, 2, 4, 6, 7]


def test_every_keyword_is_shown_with_what_became_of_it(tmp_path):
    properties = {
        "tags": {"type": "array", "items": STRING, "uniqueItems": True, "title": "Tags"},
        "note": {"type": "string", "nullable": True},
        "pick": {"oneOf": [{"type": "integer"}, {"type": "number", "not": {"pattern": "1"}}]},
        "kind": {"type": "integer", "minimum": 1, "maximum": 9, "not": {"const": 4}},
    }
    model = str(write_llama(tmp_path / "model"))
    schema = written(tmp_path, "tool.json", json.dumps(tool("t", record(properties))))
    said = run(schema, "--model", model)
    assert said.exit_code == 0, said.output
    lines = [" ".join(line.split()) for line in said.output.splitlines()]
    for wanted in (
        "/ enforced type, properties, required, additionalProperties",
        "/properties/tags enforced type, items",
        "/properties/tags dropped uniqueItems: it cannot be enforced",
        "/properties/tags ignored title: it allows everything",
        "/properties/note ignored nullable: not of JSON Schema; to allow null write it into 'type'",
        "/properties/pick dropped oneOf: it cannot be enforced as it stands here",
        "/properties/pick/oneOf/1 dropped not: it cannot be enforced",
        "/properties/kind rewritten not: enforced in other words",
    ):
        assert wanted in lines
    assert "forced (" in said.output and "first mask" in said.output


def test_strict_refuses_what_is_otherwise_dropped(tmp_path):
    loose = {"type": "array", "uniqueItems": True}
    schema = written(tmp_path, "s.json", json.dumps(loose))
    assert run(schema, "--lark").exit_code == 0
    refused = run(schema, "--lark", "--strict").exception
    assert isinstance(refused, BadSchema) and "'uniqueItems'" in refused.message


def test_the_grammar_itself_can_be_had_of_a_schema_a_tool_and_a_response_format():
    for wrapped in (
        whole(7, 9),
        {"type": "json_schema", "json_schema": {"name": "n", "schema": whole(7, 9)}},
    ):
        said = run("-", "--lark", input=json.dumps(wrapped))
        assert said.output.startswith('start: %json {"type": "integer", "minimum": 7, "maximum": 9')
    assert '"additionalProperties": false' in run("-", "--lark", input=json.dumps(tool("t"))).output


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"type": "integer"', "is no JSON: line 1, column 19"),
        (b'{"a": "\xff"}', "no UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_holds_no_schema_is_refused_in_words(tmp_path, raw, says):
    (tmp_path / "s.json").write_bytes(raw)
    said = run(str(tmp_path / "s.json"))
    assert said.exit_code == 2
    assert says in " ".join(said.output.split())


def test_a_file_that_is_not_there_is_named():
    said = run("nowhere.json")
    assert said.exit_code == 2 and "nowhere.json" in said.output
