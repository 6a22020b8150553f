"""`slipstream draft`: the text of an answer, who guessed its tokens, and a prediction's worth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import slipstream
from engine.proposer import Draft, Turn
from gateway.poke_draft import token_texts
from speculative import traced
from speculative.traced import Traced
from tests.proposers import OneByOne
from tests.tiny import write_llama

SCHEMA = {
    "type": "object",
    "properties": {"weather": {"type": "string", "enum": ["sunny", "rainy"]}},
    "required": ["weather"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_llama(tmp_path_factory.mktemp("draft") / "tiny", max_len=512))


def run(model: str, *arguments: str) -> Result:
    done = CliRunner().invoke(
        slipstream.cli, ["draft", "hello", "--model", model, "--max-tokens", "40", *arguments]
    )
    assert done.exit_code == 0, done.output
    return done


def test_what_a_schema_dictates_is_told_apart_from_what_the_model_drew(model, tmp_path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    said = run(model, "--schema", str(schema)).output
    assert json.loads(said.partition("\n")[0])["weather"] in ("sunny", "rainy")
    assert "guessed: forced" in said and "drawn by the model" in said


def test_without_drafts_every_token_is_the_models(model) -> None:
    said = run(model, "--speculative-config", "off").output
    assert "100%  drawn by the model" in said and "1.00 a step" in said


class Says(OneByOne):
    """Always guesses the same three tokens."""

    source = "three"

    def guess(self, turn: Turn) -> Draft:
        return Draft([1, 2, 3])


@pytest.mark.parametrize("matched", [0, 1, 3])
def test_the_tokens_of_a_step_are_the_drafts_and_then_the_targets(matched: int) -> None:
    traced.told.clear()
    watched, key = Traced(Says()), ("r", 0)
    tokens = [9, 9]

    def propose() -> None:
        watched.propose([Turn(key, tokens, 2, 8, None, b"", lambda: [])])

    propose()
    for _ in range(2):
        watched.observe(key, ["three"] * 3, 3, matched)
        tokens += [0] * (matched + 1)
        propose()
    assert traced.told == (["three"] * matched + ["target"]) * 2


def frames(*tokens: bytes) -> Iterator[dict]:
    for token in tokens:
        content = [{"bytes": list(token)}]
        yield {"choices": [{"logprobs": {"content": content}}]}
    yield {"choices": []}


def test_a_character_of_several_tokens_is_shown_with_its_last() -> None:
    assert list(token_texts(frames(b"a", b"\xc3", b"\xa9", b"b"))) == ["a", "", "é", "b"]


def test_a_schema_that_is_no_json_is_one_sentence(model, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    asked = ["draft", "x", "--model", model, "--schema", str(bad)]
    done = CliRunner().invoke(slipstream.cli, asked)
    assert isinstance(done.exception, ValueError)  # main() makes a sentence and exit code 2 of it
