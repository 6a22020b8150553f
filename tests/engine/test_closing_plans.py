"""Endings that were found before: searched for once, and the same as if they were again."""

from __future__ import annotations

import random

import pytest

from engine.grammar.closing import Closing
from engine.grammar.hints import read
from engine.grammar.matcher import Compiled, Compiler
from engine.grammar.planner import LONGEST, Planner, Plans
from engine.grammar.schema import check, embed
from engine.messages import Grammar
from tests.schemas import STRING, record
from tests.scripted import EOS, byte_tokenizer_json

ROOMY = 10_000
NOTE = record(
    {"note": STRING, "tags": {"type": "array", "items": STRING}, "n": {"type": "integer"}})


def lark(schema) -> Grammar:
    return Grammar(f"start: %json {embed(check(schema, strict=False, root='any').schema)}\n")


@pytest.fixture
def compiler() -> Compiler:
    return Compiler(byte_tokenizer_json(), 259, [EOS])


@pytest.fixture
def searched(monkeypatch) -> list[int]:
    """Grows with every search."""
    found, find = [], Planner._find
    monkeypatch.setattr(Planner, "_find",
                        lambda self, *given: found.append(1) or find(self, *given))
    return found


def said(compiled: Compiled, text: bytes, budget: int = ROOMY) -> Closing:
    """A sequence that said this text, a byte a token."""
    closing = Closing(compiled.planner, compiled.start())
    assert closing.admit(budget)
    for place in range(len(text)):
        closing.take(text[place : place + 1], budget - place)
    return closing


def test_what_begins_alike_is_searched_for_once(compiler, searched):
    compiled = compiler.compile(lark(NOTE))
    text = b'{"note": "ab", "tags": ["x", "y"]'
    first = said(compiled, text)
    count = len(searched)
    again = said(compiled, text)
    assert len(searched) == count > 1 and again.plan == first.plan
    said(compiled, text.replace(b"ab", b"ac"))
    assert len(searched) > count, "another text may have another ending"


def test_grammars_know_nothing_of_each_other(compiler, searched):
    text = b'{"a": "x", '
    for name in ("b", "longer"):
        schema = record({"a": STRING, name: {"type": "integer"}})
        compiled = compiler.compile(lark(schema))
        state = compiled.start()
        assert state.accept_all(text) == len(text)
        plan = compiled.planner.full(state, ROOMY, list(text))
        assert plan is not None and name.encode() in bytes(plan)
    # One that is compiled anew may have had its lexer broken before.
    grammar = lark(NOTE)
    said(compiler.compile(grammar), b'{"note": "ab", "tags": ["x", "y"]')
    compiler.forget(grammar)
    count = len(searched)
    said(compiler.compile(grammar), b'{"note": "ab", "tags": ["x", "y"]')
    assert len(searched) > count + 1


def test_so_many_are_kept_and_none_that_is_long(searched):
    plans, compiler = Plans(2), Compiler(byte_tokenizer_json(), 259, [EOS])
    compiler._plans = plans
    compiled = compiler.compile(lark(NOTE))

    def find(text: bytes) -> int:
        state, before = compiled.start(), len(searched)
        assert state.accept_all(text) == len(text)
        assert compiled.planner.full(state, ROOMY, list(text)) is not None
        return len(searched) - before

    texts = [b'{"note": "' + letter for letter in (b"a", b"b", b"c")]
    assert [find(text) for text in (*texts[:2], *texts[:2], texts[2], texts[1], texts[0])] == [
        1, 1, 0, 0, 1, 0, 1]
    assert len(plans._found) == 2
    long = compiler.compile(lark(record({"x" * LONGEST: STRING})))
    state = long.start()
    assert state.accept_all(b"{") == 1
    for _ in range(2):
        before = len(searched)
        assert len(long.planner.full(state, ROOMY, [123])) > LONGEST
        assert len(searched) == before + 1


def test_what_was_not_found_is_searched_for_again(compiler, searched, monkeypatch):
    """A lexer that was full then may have room now."""
    compiled = compiler.compile(lark(NOTE))
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "_cut", lambda *given: None)
        state = compiled.start()
        assert state.accept_all(b'{"no') == 4
        assert compiled.planner.full(state, ROOMY, list(b'{"no')) is None
    assert compiled.planner.full(state, ROOMY, list(b'{"no')) is not None


def test_what_was_said_is_what_the_state_moved_over(compiler):
    """Along the plan in one run, by other tokens, in place of one, and behind a refused one."""
    compiled = compiler.compile(lark(NOTE))
    budget = len(compiled.planner.start_plan) + 2
    closing = Closing(compiled.planner, compiled.start())
    assert closing.admit(budget)
    begin = b'{"note": "a'
    for run in (begin[:6], begin[6:], b"bcdefgh"):
        closing.take(list(run), budget - closing._state.steps)
        assert len(closing._said) == closing._state.steps
    assert closing.overridden and bytes(closing._said).startswith(begin + b"b")
    copy = closing.clone(closing._state.clone())
    copy._said.append(1)
    assert len(closing._said) == closing._state.steps


@pytest.mark.parametrize("spare", [3, 12, 300])
def test_nothing_that_is_said_depends_on_what_was_kept(compiler, spare):
    """Random texts, many of which begin alike; as if nothing were kept, token for token."""
    compiled = compiler.compile(lark(NOTE))
    fresh = Compiled(compiled.lark, compiled._start, compiled.first_mask, Planner(
        compiled._start, compiler.vocabulary, read(compiled.lark), Plans(0)))
    overridden, budget = 0, len(compiled.planner.start_plan) + spare
    for seed in range(30):
        both = [Closing(one.planner, one.start()) for one in (compiled, fresh)]
        assert all(one.admit(budget) for one in both)
        chance, left = random.Random(seed // 3), budget
        while left and not both[0]._state.finished:
            letters = chance.sample(range(32, 126), 94)
            token = next((one for one in (*chance.sample(b'"],ab0', 6), *letters)
                          if both[0]._state.valid_prefix([one]) == 1), None)
            assert token is not None
            taken = [one.take([token], left) for one in both]
            assert all(len(one._said) == one._state.steps for one in both)
            if left % 7 == 0:
                both = [one.clone(one._state.clone()) for one in both]
            assert taken[0] == taken[1] and both[0].plan == both[1].plan
            if taken[0].ended:
                break
            left -= 1
        overridden += both[0].overridden
    assert overridden or spare == 300, "texts that ran out of room"
