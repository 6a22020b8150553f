"""Tool formats: each runs the same suite, its markers plain text or control tokens.  No request."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.grammar.masks import Masks
from engine.messages import Grammar
from gateway.events import CallArgs, CallStart
from gateway.tools import FORMATS, Tool
from tests.calls import SIZE, Calls, Dialect, dialect, joined, scan, splits, takes, tools_of
from tests.instances import NASTY, instance
from tests.schemas import FAMILIES, STRING, record, whole
from tests.scripted import EOS

CALLS: list[Calls] = [
    [("add", '{"a": 1, "b": 2}')],
    [("lamp_on", "{}")],
    [("tide", '{"port": "Oban"}'), ("tide", '{"port": "Skye"}')],
    [("note", '{"text": "São Tomé 🌊 日本", "deep": {"x": [{}, {"y": "}}"}]}}')],
    [("note", '{"text": "</tool_call> and <tool_call>\\n{\\"name\\": \\"x\\"}}\\n"}')],
    [("note", '{"text": "}\\\\"}'), ("a-b_C9", '{"n": -1.5e10, "z": null}'), ("x" * 64, "{}")],
    [("seat", '{"seat": 42}'), ("lamp_on", "{}"), ("add", '{"a": 1, "b": 2}')],
]
TEXTS = ["", "Sure.\n", "a <b> < 3 <tool", "naïve 🌊 text\n\n", "}\n</tool_call>", '{"name": "x"}']


@pytest.fixture(params=[(name, bound) for name in FORMATS for bound in (False, True)],
                ids=lambda param: f"{param[0]}-{'bound' if param[1] else 'text'}")  # fmt: skip
def said(request: pytest.FixtureRequest) -> Dialect:
    return dialect(*request.param)


def expected(text: str, calls: Calls) -> list[Any]:
    return ([text] if text else []) + [[name, arguments, "closed"] for name, arguments in calls]


def read(said: Dialect, pieces: list[str], tools: list[Tool]) -> list[Any]:
    """What a scanner made of the pieces; arguments that it wrote itself are spaced anew."""
    found = joined(scan(said.fmt, pieces, tools))
    if not said.verbatim:
        for call in found:
            if isinstance(call, list) and call[2] == "closed":
                call[1] = json.dumps(json.loads(call[1]), ensure_ascii=False)
    return found


def respaced(said: Dialect, calls: Calls) -> Calls:
    if said.verbatim:
        return calls
    return [(name, json.dumps(json.loads(text), ensure_ascii=False)) for name, text in calls]


def texts(said: Dialect) -> list[str]:
    """Texts that calls of this format may follow."""
    return TEXTS if said.fmt.begin else [""]


@pytest.mark.parametrize("calls", CALLS)
def test_what_was_written_is_read_back_at_every_split(said: Dialect, calls: Calls) -> None:
    rng, tools = random.Random(5), tools_of(calls)
    for text in texts(said):
        for pieces in splits(said.written(calls, text), rng):
            assert read(said, pieces, tools) == expected(text, respaced(said, calls)), pieces


def test_random_calls_are_taken_by_the_grammar_and_read_back(said: Dialect) -> None:
    rng = random.Random(said.fmt.name)
    pieces = [*NASTY, *said.fmt.markers] if said.verbatim else NASTY
    schemas = {**FAMILIES, "note": record({"text": STRING, "more": STRING})}
    tools = [Tool(name.replace("+", "-"), "", schema, True) for name, schema in schemas.items()]
    lark = said.fmt.grammar(tools, "auto", True)
    for _ in range(500):
        calls = []
        for one in rng.choices(tools, k=rng.choice([1, 1, 1, 2, 3])):
            value = instance(dict(one.parameters), rng, pieces)
            calls.append((one.name, json.dumps(value, ensure_ascii=False)))
        text = rng.choice(texts(said)[:4])
        seen = said.written(calls, text)
        assert takes(said.compiler, lark, said.tokens(seen)), seen
        want = expected(text, respaced(said, calls))
        for way in ([seen], list(seen)):
            assert read(said, way, tools) == want, way


def test_arguments_arrive_as_they_are_written(said: Dialect) -> None:
    """All but the few characters that may begin the closing literal are out at once."""
    text = said.written([("note", '{"text": "' + "x" * 200 + '"}')])
    tools = tools_of([("note", '{"text": ""}')])
    scanner, seen = said.fmt.scanner(tools), ""
    for letter in text[: text.index("x" * 200) + 200]:
        seen += "".join(e.text for e in scanner.push(letter) if isinstance(e, CallArgs))
        if seen.endswith("x"):
            assert letter == "x"
    assert seen.removeprefix('{"text": "') == "x" * 200


def test_a_text_of_arguments_needs_no_scanner_until_it_holds_what_is_watched(said: Dialect) -> None:
    tools = tools_of([("note", '{"text": ""}')])
    seen = said.written([("note", '{"text": "' + "x" * 20 + '"}')])
    scanner = said.fmt.scanner(tools)
    scanner.push(seen[: seen.index("xxx")])
    if said.verbatim or scanner.watched is not None:
        assert scanner.call == 0 and scanner.watched and scanner.watched not in b"plain: 1"


def test_text_is_held_back_only_while_it_may_begin_a_call(said: Dialect) -> None:
    scanner = said.fmt.scanner()
    assert joined(scanner.push("plain words")) == ["plain words"]
    for half in [said.seen(said.fmt.begin)[:-1]] * bool(said.fmt.begin):
        if half:
            assert scanner.push(half) == []
            assert joined(scanner.push(" no")) == [half + " no"]
            assert scanner.push(half) == []
        assert joined(scanner.close()) == [half] * bool(half)


def test_markers_that_are_control_tokens_cannot_be_forged_by_text(said: Dialect) -> None:
    text = "x" + said.fmt.write(CALLS[2])
    if said.fmt.begin in said.ids and not said.fmt.opening:
        for pieces in splits(text, random.Random(3)):
            assert joined(scan(said.fmt, pieces)) == [text]
        lark = said.fmt.grammar([ADD], "auto", True)
        assert takes(said.compiler, lark, text)
        assert not takes(said.compiler, said.fmt.grammar([ADD], "named", True), said.fmt.example)


def test_stray_control_tokens_are_in_no_event(said: Dialect) -> None:
    rng = random.Random(4)
    for _ in range(300):
        text = "".join(rng.choices([*said.fmt.stand_ins.values(), "!", '{"x": "', " ", "\n"], k=9))
        shown = "".join(letter for letter in text if letter not in said.fmt.stand_ins.values())
        found = joined(scan(said.fmt, list(text)))
        assert found == ([shown] if shown else []), text
        call = said.written(CALLS[0])
        if said.fmt.begin and said.fmt.begin in said.ids:
            *before, last = joined(scan(said.fmt, [text + said.written(CALLS[0], "x")]))
            assert (before, last[0]) == ([shown + "x"], "add"), text
        assert joined(scan(said.fmt, [call + text]))[0] == expected("", CALLS[0])[0]


def test_a_call_that_is_cut_keeps_its_arguments_and_has_no_end(said: Dialect) -> None:
    text = said.written([("note", '{"text": "abc"}')])
    tools = tools_of([("note", '{"text": "abc"}')])
    for pieces in splits(text[: text.index("abc") + 2], random.Random(2)):
        (found,) = joined(scan(said.fmt, pieces, tools))
        assert found[0] == "note" and found[2] == "open"
        assert found[1].replace(" ", "") == '{"text":"ab'


def test_ids_are_unique(said: Dialect) -> None:
    tools = tools_of(CALLS[2])
    starts = [e for e in scan(said.fmt, [said.written(CALLS[2] * 50)], tools)
              if isinstance(e, CallStart)]  # fmt: skip
    assert len({e.id for e in starts}) == 100


ADD = Tool("add", "", record({"a": whole(0, 9), "b": whole(0, 9)}), True)
OFF = Tool("off", "", record({}), True)
ONE, TWO = ("add", '{"a": 1, "b": 2}'), ("off", "{}")


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        ("named", True, [[ONE]], [[], [ONE, ONE]]),
        ("required", True, [[ONE], [TWO], [TWO, ONE, TWO]], [[]]),
        ("required", False, [[ONE], [TWO]], [[], [ONE, TWO]]),
        ("auto", True, [[], [ONE], [TWO, ONE]], []),
        ("auto", False, [[], [TWO]], [[ONE, TWO]]),
    ],
)
def test_the_grammar_takes_as_many_calls_as_were_asked_for(
    said: Dialect, choice: Any, parallel: bool, good: list[Calls], bad: list[Calls]
) -> None:
    lark = said.fmt.grammar([ADD] if choice == "named" else [ADD, OFF], choice, parallel)

    def fits(seen: str) -> bool:
        return takes(said.compiler, lark, said.tokens(seen))

    for calls in good:
        seen = said.written(calls)
        assert fits(seen), calls
        if calls:
            assert not fits(seen[:-1]), "half a call"
            assert not fits(seen + "x"), "text behind a call"
    assert not any(fits(said.written(calls)) for calls in bad)
    for calls in ([("nope", "{}")], [("add", '{"a": 1}')], [("off", '{"a": 1}')]):
        text = choice == "auto" and not (said.fmt.begin or said.fmt.opening)
        assert fits(said.written(calls)) == (text and calls[0][0] == "nope")
    for text in ("Sure. ", "< [ { <|", said.fmt.begin[:-1] * (not said.ids)):
        assert fits(text) == (choice == "auto" or not (text or bad))
        if said.fmt.begin:
            assert fits(said.written([ONE], text)) == (choice == "auto" or not text)


def test_with_a_schema_for_the_answer_it_is_that_or_calls(said: Dialect) -> None:
    lark = said.fmt.grammar([ADD], "auto", True, record({"x": whole(0, 9)}))
    assert takes(said.compiler, lark, '{"x": 1}')
    assert takes(said.compiler, lark, said.tokens(said.written([ONE])))
    assert not takes(said.compiler, lark, "Sure.")
    assert not takes(said.compiler, lark, said.tokens('{"x": 1}' + said.written([ONE])))
    assert joined(scan(said.fmt, list('{"x": 1}'))) == ['{"x": 1}']


def test_the_grammar_takes_the_example_and_nothing_near_it(said: Dialect) -> None:
    lark = said.fmt.grammar([ADD], "named", True)
    seen = said.seen(said.fmt.example)
    assert takes(said.compiler, lark, said.tokens(seen))
    letters = [*'abx0 <>{}"\n,', *said.fmt.stand_ins.values()]
    for at in range(len(seen)):
        before, here, after = seen[:at], seen[at], seen[at + 1 :]
        for new in ("", *letters, *(letter + here for letter in letters)):
            mutant = before + new + after
            if mutant != seen and takes(said.compiler, lark, said.tokens(mutant)):
                (name, arguments, end), *others = joined(scan(said.fmt, [mutant], [ADD]))
                assert (name, end, others) == ("add", "closed", [])
                jsonschema.validate(json.loads(arguments), dict(ADD.parameters))


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_whatever_the_grammar_allows_is_text_and_then_valid_calls(
    said: Dialect, choice: Any
) -> None:
    schemas = {"first": FAMILIES["enum"], "second": FAMILIES["anyOf+const"], "off": record({})}
    tools = [Tool(name, "", schema, True) for name, schema in schemas.items()]
    lark = said.fmt.grammar(tools, choice, True)
    free = (said.fmt.begin, said.fmt.opening) if choice == "auto" else ()
    compiled = said.compiler.compile(Grammar(lark, "tools", *free))
    masks, rng, calls = Masks(SIZE + len(said.ids), 1), random.Random(choice), 0
    lead = "Hm. " + said.seen(said.fmt.begin) if said.fmt.begin else said.fmt.opening
    lead = lead or said.fmt.write([("off", "{}")])[:-2]  # up to what only a call may follow
    for _ in range(12):
        state = compiled.start()
        out = said.tokens(lead) if choice == "auto" else []
        assert state.accept_all(out) == len(out)
        while EOS not in out and len(out) < 2_000:
            row = masks.fill([(0, state, [])]).numpy().view(np.uint8)[0]
            legal = np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()
            out.append(EOS if EOS in legal and rng.random() < 0.3 else rng.choice(legal))
            assert out[-1] == EOS or state.accept(out[-1])
        found = joined(scan(said.fmt, list(said.text(out[:-1])), tools))
        for name, arguments, end in [one for one in found if isinstance(one, list)]:
            assert end == "closed"
            jsonschema.Draft202012Validator(schemas[name]).validate(json.loads(arguments))
            calls += 1
        spoken = [one for one in found if isinstance(one, str)]
        if not said.framed:
            assert spoken == (["Hm. "] if choice == "auto" and said.fmt.begin else [])
    assert calls >= (1 if said.framed else 12)
