"""What a grammar's lexer may spend between masks, and that what is legal never runs out of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.grammar.masks import Masks
from engine.grammar.matcher import _LIMITS, Compiler, GrammarRefused
from engine.grammar.planner import Planner
from engine.grammar.schema import embed
from engine.messages import Grammar
from tests.schemas import record
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
