"""What a grammar's state remembers of a draft that it judged.  Computes no mask.

A draft is judged when it is made, and again by the step that verifies it.
"""

from __future__ import annotations

import random

from engine.grammar.matcher import Compiler
from tests.engine.test_matcher import AB, AB_TEXT
from tests.scripted import EOS, byte_tokenizer_json


def test_what_was_found_legal_is_not_asked_for_again_and_never_of_another_place():
    compiler = Compiler(byte_tokenizer_json(), 259, [EOS])
    state, twin = compiler.compile(AB).start(), compiler.compile(AB).start()
    text, rng = list(AB_TEXT), random.Random(4)
    for _ in range(300):
        at = state.steps
        draft = text[at : at + rng.randrange(6)]
        if draft and rng.random() < 0.3:
            draft[rng.randrange(len(draft))] = rng.choice([0x7B, 0xFF, EOS])
        for tokens in (draft, tuple(draft), draft[:2], [*draft, EOS]):
            fresh = twin.clone().valid_prefix(tokens)
            assert state.valid_prefix(tokens) == fresh == state.valid_prefix(tokens)
        move = rng.randrange(3)
        if move == 0 and at:
            back = rng.randrange(1, at + 1)
            state.rollback(back)
            twin.rollback(back)
        elif move == 1:
            step = text[at : at + rng.randrange(4)]
            assert state.accept_all(step) == twin.accept_all(step) == len(step)
