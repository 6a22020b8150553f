"""Masks of free text that are remembered are the masks that would be computed.  Runs no model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.grammar.lexical import INSIDE, OUTSIDE
from engine.grammar.masks import Masks
from engine.grammar.prose import Prose
from engine.messages import Grammar
from tests.calls import SIZE, dialect
from tests.gateway.test_tools import ADD

TRIGGERED = [("hermes", False), ("hermes", True), ("kimi", False), ("kimi", True),
             ("mistral13", True), ("llama3", False), ("llama3", True)]  # fmt: skip


@pytest.mark.parametrize(("name", "bound"), TRIGGERED)
def test_a_remembered_mask_is_the_computed_one(name: str, bound: bool) -> None:
    said = dialect(name, bound)
    free = (said.fmt.begin, said.fmt.opening)
    assert any(free)
    compiler, lark = said.compiler, said.fmt.grammar([ADD], "auto", True)
    kept, plain = (compiler.compile(Grammar(lark, "tools", *f)) for f in (free, ()))
    masks = Masks(SIZE + len(said.ids), 2)
    rng = random.Random(name)
    call = said.tokens(said.written([("add", '{"a": 1, "b": 2}')]))
    pieces = ["a", "{", '{"name"', '{"name": "x', " ", "é", "\n"]
    pieces += [said.fmt.begin, said.fmt.begin[:5]]
    recalled = 0
    for _ in range(40):
        tokens = [t for piece in rng.choices(pieces, k=rng.randrange(6)) for t in piece.encode()]
        tokens = rng.choice([tokens, tokens[:-1]]) + rng.choice([[], call])
        one, other = kept.start(), plain.start()
        for token in tokens:
            recalled += bool(one.prose_keys([])) and one.prose_keys([])[0] in one.prose_masks
            rows = masks.fill([(0, one, []), (1, other, [])]).numpy()
            assert np.array_equal(rows[0], rows[1]), (tokens, one.steps)
            assert one.accept(token) == other.accept(token)
        one.rollback(one.steps // 2)
        other.rollback(other.steps // 2)
        rows = masks.fill([(0, one, []), (1, other, [])]).numpy()
        assert np.array_equal(rows[0], rows[1])
    assert recalled > 100


def test_an_opening_counts_at_the_start_of_the_text_only() -> None:
    start = Prose(b"<t>", b"", b"{x")
    assert start.key != start.after(b"{").key != start.after(b"a").key
    assert start.after(b"{x") is None and start.after(b"{xy") is None
    assert start.after(b"a").after(b"{x").key == start.after(b"a").key
    assert start.after(b"a").after(b"<t>") is None
    assert start.after(b"{").after(b"y").key == start.after(b"ab").key


def test_behind_a_call_that_opens_the_message_the_json_is_known() -> None:
    said = dialect("llama3", False)
    grammar = Grammar(said.fmt.grammar([ADD], "auto", True), "tools", "", said.fmt.opening)
    state = said.compiler.compile(grammar).start()
    for token in said.fmt.opening.encode():
        assert state.lexical == OUTSIDE
        assert state.accept(token)
    assert state.lexical == INSIDE
