"""A constrained output ends inside its budget, closed and valid, whoever samples it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest

from engine.grammar.closing import Closing, Taken
from engine.grammar.matcher import Compiled, Compiler
from engine.grammar.schema import check, embed
from engine.grammar.state import State
from engine.messages import Grammar
from gateway.events import CallArgs, CallEnd, CallStart, Text
from gateway.tools import Choice, Tool
from gateway.tools.hermes import FORMAT
from tests.hostile import LIKES, Hostile, write
from tests.schemas import FAMILIES, STRING, merged_tokenizer_json, record, whole
from tests.scripted import EOS

WORDS = ['{"', '":', '": ', '"}', '"}}', '"]', '", "', '""', "{}", "[]", "}}", "true", "null",
         " word", '"name', ">\n", "<tool", "_call", "tool_call>", "----", "aaaa"]  # fmt: skip

_LEAF = {"type": "integer"}
_TREE = {"anyOf": [_LEAF, record({"op": {"enum": ["+", "-"]}, "l": {"$ref": "#/$defs/tree"},
                                  "r": {"$ref": "#/$defs/tree"}})]}  # fmt: skip

SCHEMAS: dict[str, Any] = {
    "tree": record({"root": {"$ref": "#/$defs/tree"}}, **{"$defs": {"tree": _TREE}}),
    "list": record(
        {"head": {"$ref": "#/$defs/cell"}},
        **{"$defs": {"cell": {"anyOf": [
            {"type": "null"}, record({"v": _LEAF, "next": {"$ref": "#/$defs/cell"}})]}}},
    ),
    "any-of": record({"shape": {"anyOf": [
        record({"kind": {"const": "circle"}, "radius_in_metres": {"type": "number"}}),
        record({"kind": {"const": "rectangle"}, "w": whole(10, 500), "h": whole(10, 500)})]}}),
    "formats": record({"id": {"type": "string", "format": "uuid"},
                       "on": {"type": "string", "format": "date"}}),
    "long": record({"text": {"type": "string", "minLength": 40}}),
    "items": {"type": "array", "minItems": 3, "items": record({"a": STRING}, [])},
    "numbers": record({"x": {"type": "integer", "multipleOf": 7, "minimum": 100},
                       "y": {"type": "number", "multipleOf": 0.5}}),
    "unicode": record({"größe": {"enum": ["klein", "größer"]}, "名前": STRING}),
    "enum": record({"value": {"enum": ["a rather long value to write", "another such"]}}),
    "open": {"type": "object", "additionalProperties": {"type": "array", "items": _LEAF}},
    "free": {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
    "const": record({"v": {"const": {"deep": [1, {"x": None}]}}}),
    "root": {"anyOf": [whole(3, 99), {"type": "string", "pattern": "^.*needle.*$"}]},
    **{name: FAMILIES[name] for name in ("nested", "pattern", "array-of-objects", "number+opt")},
}  # fmt: skip


RIGID = ("const", "formats", "pattern")  # no token makes the rest longer


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    text, size = merged_tokenizer_json(w.replace(" ", "Ġ").replace("\n", "Ċ") for w in WORDS)
    return Compiler(text, size, [EOS])


@pytest.fixture(scope="module")
def sampler(compiler: Compiler) -> Hostile:
    return Hostile(compiler.vocabulary)


def compiled(compiler: Compiler, schema: Any) -> Compiled:
    enforced = check(schema, strict=False, root="any").schema
    return compiler.compile(Grammar(f"start: %json {embed(enforced)}\n"))


def started(grammar: Compiled, budget: int) -> tuple[Closing, State] | None:
    """A sequence of the grammar; None when it is not admitted with that budget."""
    state = grammar.start()
    closing = Closing(grammar.planner, state)
    return (closing, state) if closing.admit(budget) else None


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_an_output_is_closed_and_valid_or_never_begun(
    compiler: Compiler, sampler: Hostile, name: str
) -> None:
    grammar, validator = compiled(compiler, SCHEMAS[name]), jsonschema.Draft202012Validator(
        SCHEMAS[name]
    )
    rng = random.Random(name)
    shortest = len(grammar.planner.start_plan or ())
    budgets = [1, shortest - 1, *range(shortest, shortest + 12, 2), shortest + 25, shortest + 60]
    substituted = 0
    for budget in budgets:
        for likes in LIKES:
            begun = started(grammar, budget)
            assert (begun is not None) == (budget >= shortest)
            if begun is None:
                continue
            closing, state = begun
            out = write(closing, state, budget, lambda: sampler.draw(likes, state, rng))
            assert state.accepting and len(out) <= budget
            validator.validate(json.loads(compiler.vocabulary.tokenizer.decode_bytes(out)))
            substituted += closing.overridden
    assert substituted > 0 or name in RIGID


def test_white_space_in_a_loose_grammar_drains_the_budget_and_no_more(
    compiler: Compiler, sampler: Hostile
) -> None:
    loose = json.dumps({**SCHEMAS["nested"], "x-guidance": {"whitespace_flexible": True}})
    grammar = compiler.compile(Grammar(f"start: %json {loose}\n"))
    rng, budget = random.Random(1), 150
    begun = started(grammar, budget)
    assert begun is not None
    closing, state = begun
    out = write(closing, state, budget, lambda: sampler.draw("white space", state, rng))
    text = compiler.vocabulary.tokenizer.decode_bytes(out)
    assert len(out) == budget and text.count(b"\n") + text.count(b" ") > 20
    jsonschema.validate(json.loads(text), SCHEMAS["nested"])


TOOLS = [
    Tool("find", "", record({"query": STRING, "limit": whole(1, 50)}, ["query"]), True),
    Tool("move", "", SCHEMAS["any-of"], True),
]


def calls(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The free text and the calls of an output; fails on one that is not closed and valid."""
    scanner = FORMAT.scanner()
    prose, found, open_call = "", [], False
    for event in scanner.push(text) + scanner.close():
        match event:
            case Text(piece):
                prose += piece
            case CallStart(name=name):
                found.append((name, ""))
                open_call = True
            case CallArgs(text=piece):
                found[-1] = (found[-1][0], found[-1][1] + piece)
            case CallEnd():
                open_call = False
    assert not open_call, text
    parsed = [(name, json.loads(arguments)) for name, arguments in found]
    for name, arguments in parsed:
        tool = next(tool for tool in TOOLS if tool.name == name)
        jsonschema.validate(arguments, tool.parameters)
    return prose, parsed


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_whole_or_never_begun(
    compiler: Compiler, sampler: Hostile, choice: Choice, parallel: bool
) -> None:
    tools = TOOLS if choice == "required" else TOOLS[1:]
    grammar = compiler.compile(Grammar(FORMAT.grammar(tools, choice, parallel)))
    rng, most = random.Random(5), 0
    shortest = len(grammar.planner.start_plan or ())
    for budget in range(shortest - 1, 2 * shortest + 20, 3):
        for likes in ("uniform", "openers", "no quote", "white space"):
            begun = started(grammar, budget)
            assert (begun is None) == (budget < shortest)
            if begun is None:
                continue
            closing, state = begun
            out = write(closing, state, budget, lambda: sampler.draw(likes, state, rng))
            _, found = calls(compiler.vocabulary.tokenizer.decode_str(out))
            assert len(found) >= 1 and (parallel or len(found) == 1)
            most = max(most, len(found))
    assert most == (2 if parallel and choice == "required" else 1)


def test_a_call_in_free_text_opens_only_where_it_fits(
    compiler: Compiler, sampler: Hostile
) -> None:
    grammar = compiler.compile(Grammar(FORMAT.grammar(TOOLS, "auto", True), "", FORMAT.begin))
    rng = random.Random(7)
    lead = compiler.vocabulary.tokenizer.tokenize_str('Say "hi": <tool_call>\n')
    ended = opened = 0
    for budget in range(1, 110):
        begun = started(grammar, budget)
        assert begun is not None and list(begun[0].plan) == []
        closing, state = begun

        def draw(state: State = state) -> int | None:
            at = state.steps
            return lead[at] if at < len(lead) else sampler.draw("uniform", state, rng)

        out = write(closing, state, budget, draw)
        prose, found = calls(compiler.vocabulary.tokenizer.decode_str(out))
        if budget > len(lead):
            assert bool(found) != ("tool_call" in prose)
            ended += not found
            opened += bool(found)
    assert ended > 10 and opened > 10


def test_the_token_that_opens_a_call_which_does_not_fit_ends_the_output(
    compiler: Compiler,
) -> None:
    grammar = compiler.compile(Grammar(FORMAT.grammar(TOOLS, "auto", True), "", FORMAT.begin))
    lead = compiler.vocabulary.tokenizer.tokenize_str("Hi <tool_call>\n")
    begun = started(grammar, len(lead) + 5)
    assert begun is not None
    closing, state = begun
    taken = closing.take(lead, len(lead) + 5)
    text = compiler.vocabulary.tokenizer.decode_str(lead[: taken.kept])
    assert taken.ended and taken.forced is None and text == "Hi <tool_call"[: len(text)]
    assert 0 < taken.kept < len(lead) and state.steps == taken.kept and state.accepting
    assert closing.overridden == 0


def run_of(sampler: Hostile, state: State, most: int, rng: random.Random) -> list[int]:
    """Legal tokens in a row, as drafts and samples would be."""
    ahead, run = state.clone(), []
    while len(run) < most and not ahead.finished:
        token = sampler.draw(rng.choice(["uniform", "structure", "digits"]), ahead, rng)
        if token is None:
            break
        run.append(token)
        ahead.accept(token)
    return run


@pytest.mark.parametrize("name", ["tree", "free", "any-of", "numbers", "open"])
def test_a_run_ends_as_its_tokens_one_by_one(
    compiler: Compiler, sampler: Hostile, name: str
) -> None:
    grammar = compiled(compiler, SCHEMAS[name])
    rng, cut = random.Random(name), 0
    shortest = len(grammar.planner.start_plan or ())
    for slack in range(24):
        begun = started(grammar, budget := shortest + slack)
        assert begun is not None
        closing, state = begun
        while budget and not state.finished:
            run = run_of(sampler, state, min(budget, rng.randrange(1, 10)), rng)
            if not run:
                break
            other = state.clone()
            single = closing.clone(other)
            kept, last = 0, Taken(0)
            for place, token in enumerate(run):
                last = single.take([token], budget - place)
                if last != Taken(1):
                    break
                kept += 1
            whole_run = closing.take(run, budget)
            assert whole_run == Taken(kept, last.forced, last.ended)
            assert list(single.plan) == list(closing.plan) and other.steps == state.steps
            assert single.overridden == closing.overridden
            assert state.closes(closing.plan) and other.closes(closing.plan)
            cut += kept < len(run)
            if whole_run.ended:
                break
            budget -= kept + (whole_run.forced is not None)
        assert state.accepting
    assert cut > 3


def test_a_clone_keeps_the_promise_on_its_own(compiler: Compiler, sampler: Hostile) -> None:
    grammar, rng = compiled(compiler, SCHEMAS["nested"]), random.Random(2)
    shortest = len(grammar.planner.start_plan or ())
    begun = started(grammar, budget := shortest + 10)
    assert begun is not None
    closing, state = begun
    closing.take(run_of(sampler, state, 4, rng), budget)
    used, plan = state.steps, list(closing.plan)
    fork = state.clone()
    copy = closing.clone(fork)
    write_rest: Callable[[Closing, State], list[int]] = lambda c, s: [  # noqa: E731
        c.take([token], budget - s.steps).kept
        for _ in range(budget - used)
        if not s.finished and (token := sampler.draw("openers", s, rng)) is not None
    ]
    write_rest(copy, fork)
    assert fork.accepting and fork.steps <= budget
    assert state.steps == used and list(closing.plan) == plan and state.closes(plan)
    write_rest(closing, state)
    assert state.accepting and state.steps <= budget


def test_a_refused_token_leaves_no_trace(compiler: Compiler) -> None:
    grammar = compiled(compiler, SCHEMAS["items"])
    begun = started(grammar, budget := len(grammar.planner.start_plan or ()))
    assert begun is not None
    closing, state = begun
    plain = grammar.start()
    for left in range(budget, 0, -1):
        head = closing.plan[0]
        others = [token for token in range(compiler.vocabulary.size)
                  if token != head and state.valid_prefix([token])]  # fmt: skip
        taken = closing.take(others[-1:] or [head], left)
        written = head if taken.forced is None and not others else taken.forced
        plain.accept(others[-1] if written is None else written)
        probes = range(compiler.vocabulary.size)
        assert [t for t in probes if state.valid_prefix([t])] == [
            t for t in probes if plain.valid_prefix([t])
        ]
        if state.finished:
            break
    assert state.finished and closing.overridden > 0


def test_a_run_longer_than_its_budget_is_our_own_mistake(compiler: Compiler) -> None:
    begun = started(compiled(compiler, SCHEMAS["open"]), 5)
    assert begun is not None
    with pytest.raises(AssertionError, match="budget of 1"):
        begun[0].take([1, 2], 1)


class Exhausted:
    """A state whose matcher reaches one of its limits behind so many tokens."""

    accepting = False

    def __init__(self, left: int) -> None:
        self.left = left

    def accept_all(self, tokens: Sequence[int]) -> int:
        taken, self.left = min(len(tokens), self.left), 0
        return taken

    def accept(self, token: int) -> bool:
        return False


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_matcher_that_breaks_within_the_plan_ends_the_run_there(left: int) -> None:
    closing = Closing(None, Exhausted(left))
    closing._plan = [4, 5, 6]
    assert closing.take([4, 5, 6, 7], 9) == Taken(left, ended=True)
    assert closing.overridden == 0
