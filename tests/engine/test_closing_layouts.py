"""Endings of values that are hard to end, in every layout; the planner's own are elsewhere."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from engine.grammar.hints import Texts, read
from engine.grammar.matcher import Compiled, Compiler
from engine.grammar.planner import START_STEPS
from engine.grammar.probe import Probe
from engine.grammar.spelling import Speller
from engine.messages import Grammar
from gateway.events import CallArgs
from gateway.tools import FORMATS, Tool, load
from tests.schemas import record
from tests.scripted import EOS, byte_tokenizer_json

ROOMY = 100_000  # tokens: any plan fits
MARKER = 256  # the control token of a bound layout

HARD: dict[str, Any] = {
    **{kind: {"format": kind} for kind in ("email", "uri", "hostname", "uuid", "date-time",
                                           "duration", "ipv6")},
    "long": {"minLength": 200}, "very long": {"minLength": 2_000},
    "of about one length": {"minLength": 100, "maxLength": 120},
    "needle": {"pattern": "needle"}, "many letters": {"pattern": "^[a-z]{100,}$"},
    "commas": {"pattern": "^[a-c,]{9}$"}, "digits and commas": {"pattern": "^[0-9,]{9,}x$"},
    "words": {"pattern": "^([a-z]+ ){30}[a-z]+$"},
    "long or address": {"anyOf": [{"minLength": 50}, {"format": "email"}]},
    "a multiple": {"type": "integer", "multipleOf": 97, "minimum": 100_000},
    "a fraction": {"type": "number", "multipleOf": 0.25, "exclusiveMaximum": -7.5},
    "a choice": {"type": ["number", "null", "boolean"], "maximum": -1000},
}  # fmt: skip
PARAMETERS = {name: record({"x": {"type": "string", **more}, "n": {"type": "integer"}})
              for name, more in HARD.items()}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(byte_tokenizer_json(), 259, [EOS])


def compiled(compiler: Compiler, layout: str, bound: bool, name: str) -> Compiled:
    one = load(layout)
    fmt = one.bound({marker: MARKER for marker in list(one.markers)[:1]}) if bound else one
    tool = Tool("look", "", PARAMETERS[name], True)
    return compiler.compile(Grammar(fmt.grammar([tool], "named", True)))


@pytest.mark.parametrize("layout", sorted(FORMATS))
@pytest.mark.parametrize("name", sorted(HARD))
def test_a_value_that_is_hard_to_end_has_an_ending_in_every_layout(
    compiler: Compiler, layout: str, name: str
) -> None:
    plan = compiled(compiler, layout, False, name).planner.start_plan
    assert plan is not None
    tool = Tool("look", "", PARAMETERS[name], True)
    scanner = load(layout).scanner([tool])
    events = scanner.push(bytes(plan).decode()) + scanner.close()
    arguments = "".join(event.text for event in events if isinstance(event, CallArgs))
    jsonschema.validate(json.loads(arguments), tool.parameters)
    plan = compiled(compiler, layout, True, name).planner.start_plan
    assert plan is not None


@pytest.mark.parametrize("layout", ["minimax_m2", "qwen3_coder", "glm45", "harmony", "pythonic"])
@pytest.mark.parametrize("name", ["email", "long", "needle", "many letters", "uri", "a multiple"])
@pytest.mark.parametrize("bound", [False, True])
def test_and_from_anywhere_in_it(
    compiler: Compiler, layout: str, name: str, bound: bool
) -> None:
    grammar = compiled(compiler, layout, bound, name)
    plan = grammar.planner.start_plan or ()
    for size in range(0, len(plan), 1 + len(plan) // 30):
        state = grammar.start()
        assert state.accept_all(plan[:size]) == size
        found = grammar.planner.full(state, ROOMY)
        assert found is not None and state.closes(found)
        assert len(found) <= len(plan) - size + 3  # what is remembered may fit less well here


def test_the_ways_to_an_ending_are_counted(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the steps is enough for the start of each."""
    used: list[int] = []
    spend = Probe._spend

    def counted(self: Probe, steps: int) -> None:
        used[-1] += steps
        spend(self, steps)

    monkeypatch.setattr(Probe, "_spend", counted)
    for layout in ("minimax_m2", "qwen3_coder", "glm45", "harmony"):
        for name in HARD:
            used.append(0)
            grammar = load(layout).grammar([Tool("see", "", PARAMETERS[name], True)], "named", True)
            assert compiler.compile(Grammar(grammar)).planner.start_plan
            assert used[-1] < START_STEPS // 3, (layout, name, used[-1])


def test_a_long_minimum_does_not_take_all_the_steps(compiler: Compiler) -> None:
    state = compiler.compile(Grammar('start: %json {"type": "string", "minLength": 300}')).start()
    assert state.accept(ord('"'))
    letters = compiler.vocabulary.letters
    probe = Probe(state.matcher, letters, 10_000, 1)
    (way,) = Speller(Texts(), letters).string(probe, probe.row(), 8)
    assert len(way) == 301 and probe.steps > 5_000


def test_what_ends_a_text_is_read_off_its_rule() -> None:
    lark = (
        'start: "<v>" a b c\n'
        'a[lazy]: (/(?s:.*)foo\\/(?s:.*)/ & ~/(?s:.*)never/) "</v>"\n'
        "b: TEXT <[256]>\nTEXT: /(?s:.*)/\n"
        'c: %json {"type": "string", "pattern": "bar", "const": "</no>"} "</w>"\n'
    )
    found = read(lark)
    assert found.stops == (b"</v>", b"\xff[256]")
    assert found.hints == (b"foo/", b"bar")
    assert found.followers == (b"</w>",)
    assert sorted(found.literals) == [b"</v>", b"</w>", b"<v>"]
