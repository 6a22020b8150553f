"""Plans that go on behind a token which is their beginning cut otherwise.  Needs no model."""

from __future__ import annotations

import random

import pytest

from engine.grammar.matcher import Compiler
from tests.engine.test_closing import SCHEMAS, WORDS
from tests.engine.test_closing_planner import ROOMY, lark
from tests.schemas import merged_tokenizer_json
from tests.scripted import EOS


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_a_token_cuts_otherwise_holds_behind_it_without_being_tried(seed: int) -> None:
    """Walks of merged tokens, each of them the beginning of the plan's bytes, or not."""
    chance, found = random.Random(seed), 0
    text, size = merged_tokenizer_json(w.replace(" ", "Ġ").replace("\n", "Ċ") for w in WORDS)
    compiler = Compiler(text, size, [EOS])
    for schema in SCHEMAS.values():
        compiled = compiler.compile(lark(schema))
        state = compiled.start()
        for _ in range(40):
            plan = compiled.planner.full(state, ROOMY)
            if not plan or state.finished:
                break
            ends = b"".join(map(compiler.vocabulary.piece, plan))
            fits = [t for t in range(compiler.vocabulary.size)
                    if (piece := compiler.vocabulary.piece(t)) and ends.startswith(piece)]
            token = chance.choice([t for t in fits if t != plan[0]] or fits)
            rest = compiled.planner.rest(plan, token)
            if not state.accept(token):
                continue
            if rest is not None:
                assert state.closes(rest) or (not rest and state.accepting)
                found += token != plan[0]
    assert found > 30
