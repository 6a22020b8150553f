"""What a state saw ahead of it, and tokens taken many at once: as if each were taken by itself."""

from __future__ import annotations

from engine.grammar.matcher import Compiler
from engine.grammar.state import State
from engine.messages import Grammar
from tests.scripted import EOS, byte_tokenizer_json


def test_what_a_scout_saw_holds_only_on_the_way_it_went():
    compiler = Compiler(byte_tokenizer_json(), EOS + 1, [EOS])
    state = compiler.compile(Grammar('start: /[ab]{2}/ "xyz"')).start()
    state.scout(list(b"aa"))
    assert state.accept(ord("a"))
    state.rollback(1)
    assert state.accept(ord("a")) and state.forced() == []
    assert state.accept(ord("b")) and bytes(state.forced()) == b"xyz"
    both = Grammar('start: ("aa" | "ab") "xyz" | ("ba" | "bb") "uvw"')
    state = compiler.compile(both).start()
    state.scout(list(b"aa"))
    assert state.accept_all(list(b"ba")) == 2 and bytes(state.forced()) == b"uvw"
    state = compiler.compile(both).start()
    assert state.scout(list(b"aax")) == [None, None, ord("x"), ord("y")]
    assert state.scout(list(b"aay")) == [None, None, ord("x")]
    assert state.clone().accept_all(list(b"aaxyz")) == 5


def test_runs_taken_at_once_are_those_taken_one_by_one_and_are_asked_for_once(monkeypatch):
    compiler = Compiler(byte_tokenizer_json(), EOS + 1, [EOS])
    state = compiler.compile(Grammar('start: /[xy]/ "aab" /[ab]{2}/ "zz" /[pq]+/')).start()
    text = list(b"xaabaazzpq")
    twin, asked = state.clone(), []
    assert all(twin.accept(token) for token in text)
    state.scout(text)
    monkeypatch.setattr(State, "_forced", lambda self: asked.append(self._run) or ask(self))
    assert state.accept_all(text) == len(text)
    assert None not in asked[1:]  # the scout had seen all of it
    monkeypatch.undo()
    assert state.forced() == twin.forced() and state.steps == twin.steps == len(text)
    assert state.accept_all(list(b"z")) == 0


def ask(state: State) -> list[int]:
    if state._run is None:
        state._run = [] if state.finished else state.matcher.compute_ff_tokens()[::-1]
    return state._run
