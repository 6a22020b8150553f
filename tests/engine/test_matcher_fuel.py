"""What a grammar's lexer may spend between masks, and that what is legal never runs out of it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.grammar.dear import dear
from engine.grammar.masks import Masks
from engine.grammar.matcher import _LIMITS, Compiler, GrammarRefused
from engine.grammar.planner import Planner
from engine.grammar.schema import embed
from engine.messages import Grammar
from tests.schemas import merged_tokenizer_json, record
from tests.scripted import EOS, byte_tokenizer_json

WORDS = {"type": "string", "pattern": r"^(?:\S+\s+){0,29}\S+$"}


def of(schema: dict[str, Any]) -> Grammar:
    return Grammar(f"start: %json {embed(record({'p': schema}))}\n")


@pytest.mark.parametrize("most", [300, 600])
def test_a_run_of_drafts_does_not_use_up_what_a_lexer_may_spend(most: int) -> None:
    """Only masks give it back; text was refused, and all copies with it, when it ran out."""
    words = {**WORDS, "maxLength": most}
    compiler = Compiler(byte_tokenizer_json(), EOS + 1, [EOS])
    state = compiler.compile(of(words)).start()
    raw = json.dumps({"p": "five words of plain text " * 5 + "x"}).encode()
    masks = Masks(EOS + 1, 1)
    for at in range(0, len(raw), 40):  # eight drafts of five letters
        masks.fill([(0, state, ())])
        assert state.accept_all(raw[at : at + 40]) == len(raw[at : at + 40])
    assert state.accepting and not state.broken


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("most", [300, 600, 1200, 3000])
def test_drafts_never_use_up_what_a_lexer_may_spend(most: int, lean: bool) -> None:
    """As the engine drafts, 31 tokens of five letters: right ones, of which it takes what it may.

    Two counts run side by side here, so that a byte costs much.  Where the text is forced, at the
    beginning, drafts are as long as ever.
    """
    chance = random.Random(3)
    words = [" " + "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(29)]
    text, size = merged_tokenizer_json([word.replace(" ", "\u0120") for word in words])
    compiler = Compiler(text, size, [EOS])
    body = json.dumps({"p": "go" + "".join(words)})
    tokens = compiler.vocabulary.tokenizer.tokenize_str(body)
    state, masks, longest = compiler.compile(of({**WORDS, "maxLength": most})).start(), None, 0
    masks, at = Masks(size, 40), 0
    while at < len(tokens):
        drafts = tokens[at : at + 31][: len(tokens) - at - 1]
        drafts = drafts[: state.guessable(drafts)]
        rows = masks.fill([(0, state, drafts)], len(drafts) + 1, {0} if lean else ()).numpy()
        assert masks.legal == [len(drafts)]
        for row, token in zip(rows, tokens[at:], strict=False):
            assert int(row[token >> 5]) >> (token & 31) & 1 and state.accept(token)
            at += 1
        longest = max(longest, len(drafts))
    assert not state.broken and longest >= 5


@pytest.mark.parametrize("schema, is_dear", [
    ({**WORDS, "maxLength": 3000}, True),
    ({"allOf": [WORDS, {"type": "string", "maxLength": 600}]}, True),
    ({"type": "array", "items": {**WORDS, "maxLength": 600}}, True),
    (WORDS, False),
    ({"type": "string", "maxLength": 100_000}, False),
    ({"type": "string", "pattern": "^[a-z ]+$", "maxLength": 3000}, False),
    ({"type": "string", "pattern": r"^[A-Z]{3}-\d{4}$", "maxLength": 40}, False),
    ({"type": "object", "properties": {"a": WORDS, "b": {"type": "string", "maxLength": 900}}},
     False),
])  # fmt: skip
def test_a_grammar_is_dear_where_large_counts_meet_in_one_string(schema, is_dear) -> None:
    assert dear(of(schema).lark) == is_dear
    compiled = Compiler(byte_tokenizer_json(), EOS + 1, [EOS]).compile(of(schema))
    state = compiled.start()
    assert state.dear == state.clone().dear == is_dear
    for text in (b'{"p": "x', b'{"p": {"a": "x', b'{"p": ["x'):
        forced = len(state.forced()) if text.startswith(bytes(state.forced())) else 0
        guessable = state.guessable(list(text))
        assert guessable == (forced if is_dear else state.valid_prefix(list(text))) or not forced


class Spending(Planner):
    """A planner that spends about 600,000 of fuel."""

    @property
    def start_plan(self) -> tuple[int, ...] | None:
        probe = self._start.clone()
        probe.accept_all(b'{"p": "')
        Masks(EOS + 1, 1).fill([(0, probe, ())])
        probe.accept_all(b"five words of plain text " * 2)
        return (EOS,)


def test_the_search_for_an_ending_leaves_the_first_tokens_their_fuel(monkeypatch) -> None:
    monkeypatch.setattr("engine.grammar.matcher.Planner", Spending)
    monkeypatch.setitem(_LIMITS, "step_lexer_fuel", 650_000)
    compiler = Compiler(byte_tokenizer_json(), EOS + 1, [EOS])
    state = compiler.compile(of({**WORDS, "maxLength": 300})).start()
    text = b'{"p": "in no place we may see what to do or be so, or'
    assert state.accept_all(text) == len(text)


def test_a_grammar_whose_lexer_broke_while_an_ending_was_sought_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("engine.grammar.matcher.Planner", Spending)
    monkeypatch.setitem(_LIMITS, "step_lexer_fuel", 200_000)
    compiler = Compiler(byte_tokenizer_json(), EOS + 1, [EOS])
    with pytest.raises(GrammarRefused) as caught:
        compiler.compile(of({**WORDS, "maxLength": 300}))
    assert caught.value.code == "grammar_too_complex"
