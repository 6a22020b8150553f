"""The planner: endings from odd places, refusals, plans that forget what was asked before."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from engine.grammar import lexical
from engine.grammar.hints import read
from engine.grammar.matcher import Compiled, Compiler, GrammarRefused
from engine.grammar.planner import ENDLESS, START_ENDLESS, Planner
from engine.grammar.probe import Probe
from engine.grammar.schema import check, embed
from engine.grammar.state import State
from engine.grammar.vocabulary import Vocabulary
from engine.messages import Grammar
from gateway.tools import FORMATS, Tool, load
from tests.engine.test_closing import SCHEMAS, WORDS
from tests.hostile import Hostile
from tests.schemas import STRING, merged_tokenizer_json, record, whole
from tests.scripted import EOS, byte_tokenizer_json

ROOMY = 100_000  # tokens: any plan fits


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(byte_tokenizer_json(), 259, [EOS])


def lark(schema: Any) -> Grammar:
    return Grammar(f"start: %json {embed(check(schema, strict=False, root='any').schema)}\n")


def at(compiled: Compiled, text: bytes) -> State:
    """The state behind a text, of a vocabulary of bytes."""
    state = compiled.start()
    assert state.accept_all(text) == len(text), text
    return state


def ending(compiler: Compiler, schema: Any, text: bytes) -> bytes:
    """How the planner ends a text; the whole is checked against the schema."""
    compiled = compiler.compile(lark(schema))
    state = at(compiled, text)
    plan = compiled.planner.full(state, ROOMY)
    assert plan is not None and state.closes(plan)
    assert state.steps == len(text)
    whole_text = text + compiler.vocabulary.tokenizer.decode_bytes(plan)
    jsonschema.validate(json.loads(whole_text), schema)
    return whole_text[len(text) :]


NOTE = record({"note": STRING, "n": {"type": "integer"}})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"", b'{"note": "", "n": 1}'),
        (b'{"note": "abc', b'", "n": 1}'),
        (b'{"note": "abc\\', b'n", "n": 1}'),
        (b'{"note": "abc\\u', b'0000", "n": 1}'),
        (b'{"note": "abc\\u00', b'00", "n": 1}'),
        (b'{"note": "abc\\u007', b'f", "n": 1}'),
        (b'{"note": "abc\xe2', b'\x80\x80", "n": 1}'),
        (b'{"note": "abc\xf0\x9f', b'\x80\x80", "n": 1}'),
        (b'{"note": "\\"', b'", "n": 1}'),
        (b'{"note": "", "n": -', b"1}"),
        (b'{"note": "", "n": 12', b"}"),
    ],
)
def test_an_ending_from_inside_a_string_or_a_number(
    compiler: Compiler, text: bytes, wanted: bytes
) -> None:
    assert ending(compiler, NOTE, text) == wanted


@pytest.mark.parametrize("number", [b"-", b"0.", b"12.", b"1e", b"1e-", b"-0"])
def test_every_beginning_of_a_number_ends(compiler: Compiler, number: bytes) -> None:
    assert ending(compiler, {"type": "array", "items": {"type": "number"}}, b"[" + number)


@pytest.mark.parametrize("depth", [1, 100])
def test_open_brackets_close(compiler: Compiler, depth: int) -> None:
    nested = {"$ref": "#/$defs/a",
              "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}  # fmt: skip
    assert ending(compiler, nested, b"[" * depth) == b"]" * depth


def test_minimums_are_met(compiler: Compiler) -> None:
    assert len(ending(compiler, {"type": "string", "minLength": 2_000}, b'"')) == 2_001
    three = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3}
    assert ending(compiler, three, b"[") == b'"red", "red", "red"]'
    assert ending(compiler, {"type": "integer", "minimum": 12_345}, b"") == b"99999"
    assert ending(compiler, {"type": "integer", "multipleOf": 97, "minimum": 1}, b"")
    text = {"type": "string", "minLength": 20}
    assert len(ending(compiler, text, b'"\xf0\x9f')) == 2 + 19 + 1  # what is half there counts once


def test_the_shorter_of_two_objects_is_taken_and_the_shorter_key(compiler: Compiler) -> None:
    assert ending(compiler, SCHEMAS["any-of"], b'{"shape": {"kind": "') == (
        b'rectangle", "w": 11, "h": 11}}'
    )
    optional = {"type": "object", "required": ["needed"], "additionalProperties": False,
                "properties": {"a": record({"deep": STRING}), "needed": {"type": "null"},
                               "z": STRING}}  # fmt: skip
    assert ending(compiler, optional, b'{"') == b'needed": null}'
    assert ending(compiler, optional, b'{"needed": null, "') == b'z": ""}'


@pytest.mark.parametrize(
    "pattern", ["1.2", "^.*foo.*bar$", "needle", r"^(a|b)\.c\+$", "^[A-Z]{3}-[0-9]{3}$", "[xX]y+z$"]
)
def test_a_text_that_a_pattern_asks_for_is_found(compiler: Compiler, pattern: str) -> None:
    schema = record({"x": {"type": "string", "pattern": pattern}})
    assert ending(compiler, schema, b"")
    assert ending(compiler, {**schema}, b'{"x": "')
    longer = record({"x": {"type": "string", "pattern": pattern, "minLength": 12}})
    if "^" not in pattern:
        assert ending(compiler, longer, b'{"x": "')
        assert ending(compiler, schema, b'{"x": "\xe2')
        assert ending(compiler, schema, b'{"x": "\\u0')


@pytest.mark.parametrize("kind", ["uuid", "date", "time", "date-time", "email", "ipv4", "ipv6",
                                  "duration", "uri", "hostname"])  # fmt: skip
def test_a_format_is_met_from_anywhere_in_it(compiler: Compiler, kind: str) -> None:
    compiled = compiler.compile(lark({"type": "string", "format": kind}))
    plan = compiled.planner.start_plan
    assert plan is not None
    for size in range(len(plan)):
        state = at(compiled, bytes(plan[:size]))
        found = compiled.planner.full(state, ROOMY)
        assert found is not None and state.closes(found) and len(found) <= len(plan) - size


LOOPS: dict[str, Any] = {
    "object": {"$ref": "#/$defs/n", "$defs": {"n": record({"n": {"$ref": "#/$defs/n"}})}},
    "array": {"$ref": "#/$defs/a", "$defs": {
        "a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_a_schema_that_no_finite_text_satisfies_is_refused_and_stays_refused(
    compiler: Compiler, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Grammar(f"start: %json {embed(LOOPS[name])}\n")  # the schema's check would refuse it
    with pytest.raises(GrammarRefused) as refused:
        compiler.compile(endless)
    assert refused.value.code == "no_finite_instance" and "way to end" in refused.value.message
    monkeypatch.setattr(Planner, "__init__", lambda *args: pytest.fail("planned again"))
    with pytest.raises(GrammarRefused, match="way to end"):
        compiler.compile(endless)


def test_ways_without_an_end_are_counted_as_each_takes_long(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 such tools in one request would take seconds."""
    counted: list[int] = []
    forced = Probe.forced

    def counting(self: Probe) -> bytes:
        before = self.endless
        try:
            return forced(self)
        finally:
            counted[-1] += before - self.endless

    monkeypatch.setattr(Probe, "forced", counting)
    tools = [Tool(f"t{i}", "", LOOPS["object"], True) for i in range(40)]
    counted.append(0)
    with pytest.raises(GrammarRefused, match="way to end"):
        compiler.compile(Grammar(load("hermes").grammar(tools, "required", True)))
    assert 0 < counted[-1] <= START_ENDLESS + 4  # one more in each search
    good = Tool("good", "", NOTE, True)
    lark = load("hermes").grammar([*tools[:3], good], "required", True)
    grammar = compiler.compile(Grammar(lark))
    counted.append(0)
    text = b'<tool_call>\n{"name": "'
    plan = grammar.planner.full(at(grammar, text), ROOMY)
    assert plan is not None and b'good", ' in bytes(plan) and counted[-1] <= ENDLESS + 4


def test_a_branch_without_an_end_is_left_for_one_that_has_one(compiler: Compiler) -> None:
    """The tempting branch comes first and begins with the shorter text."""
    for first, second in (("a", "finite"), ("finite", "a")):
        trap = record({"kind": {"const": "a"}, "next": {"$ref": "#/$defs/t"}})
        exit_ = record({"kind": {"const": "finite"}, "value": STRING})
        branches = [trap, exit_] if first == "a" else [exit_, trap]
        schema = {"$ref": "#/$defs/s", "$defs": {
            "t": record({"t": {"$ref": "#/$defs/t"}}), "s": {"anyOf": branches}}}  # fmt: skip
        assert second and ending(compiler, schema, b"") == b'{"kind": "finite", "value": ""}'


def test_a_memory_that_is_wrong_here_costs_a_second_search_only(compiler: Compiler) -> None:
    trap = record({"kind": {"const": "a"}, "next": {"$ref": "#/$defs/t"}})
    schema = {"$ref": "#/$defs/s", "$defs": {
        "t": record({"t": {"$ref": "#/$defs/t"}}),
        "s": {"anyOf": [trap, record({"kind": {"const": "b"}})]}}}  # fmt: skip
    compiled = compiler.compile(lark(schema))
    compiled.planner._learnt[lexical.INSIDE, b"ab"] = b'a"'
    plan = compiled.planner.full(at(compiled, b'{"kind": "'), ROOMY)
    assert plan is not None and bytes(plan) == b'b"}'


def test_a_plan_counts_only_once_the_matcher_took_it_whole(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiler.compile(lark(NOTE))
    state = at(compiled, b'{"note": "')
    monkeypatch.setattr(type(compiler.vocabulary.letters), "cut", lambda self, text: list(text[1:]))
    assert compiled.planner.full(state, ROOMY) is None


def test_a_plan_longer_than_the_cap_is_no_plan_and_an_end_needs_none(compiler: Compiler) -> None:
    compiled = compiler.compile(lark(NOTE))
    plan = compiled.planner.start_plan
    assert plan is not None
    start = compiled.start()
    assert compiled.planner.full(start, len(plan)) == list(plan)
    assert compiled.planner.full(start, len(plan) - 1) is None
    assert compiled.planner.full(at(compiled, bytes(plan)), 0) == []


@pytest.mark.parametrize("name", ["tree", "any-of", "open", "numbers", "free", "array-of-objects"])
def test_a_plan_depends_on_nothing_that_was_asked_before(name: str) -> None:
    """A planner that made plans for 500 places gives the plans of one that made none."""
    text, size = merged_tokenizer_json(w.replace(" ", "Ġ").replace("\n", "Ċ") for w in WORDS)
    warm, cold = (Compiler(text, size, [EOS]).compile(lark(SCHEMAS[name])) for _ in range(2))
    sampler, rng = Hostile(Compiler(text, size, [EOS]).vocabulary), random.Random(name)
    places: list[list[int]] = []
    while len(places) < 60:
        state, tokens = warm.start(), list[int]()
        for _ in range(rng.randrange(1, 30)):
            token = sampler.draw(rng.choice(["structure", "uniform", "digits"]), state, rng)
            if token is None:
                break
            state.accept(token)
            tokens.append(token)
            warm.planner.full(state, ROOMY)
        places.append(tokens)
    learnt = dict(cold.planner._learnt)
    for tokens in places[::3]:
        one, two = warm.start(), cold.start()
        assert one.accept_all(tokens) == two.accept_all(tokens) == len(tokens)
        plan = cold.planner.full(two, ROOMY)
        assert plan is not None and warm.planner.full(one, ROOMY) == plan
    assert warm.planner._learnt == cold.planner._learnt == learnt


def test_a_search_is_bounded_and_what_it_finds_nothing_in_stays_as_it_was(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiler.compile(lark(SCHEMAS["array-of-objects"]))
    state = at(compiled, b'{"items": [{"')
    assert compiled.planner.full(state, ROOMY) is not None
    monkeypatch.setattr("engine.grammar.planner.STEPS", 20)
    assert compiled.planner.full(state, ROOMY) is None
    assert state.steps == 13 and state.accept_all(b'sku": "ab1234"') == 14


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_calls_of_every_layout_have_an_ending(compiler: Compiler, name: str) -> None:
    tools = [Tool("look", "", record({"text": STRING, "limit": whole(1, 50)}, ["text"]), True),
             Tool("move", "", SCHEMAS["any-of"], True)]  # fmt: skip
    fmt = load(name)
    for bound in (fmt, fmt.bound({marker: 256 for marker in list(fmt.markers)[:1]})):
        for choice in ("required", "named"):
            some = tools if choice == "required" else tools[:1]
            compiled = compiler.compile(Grammar(bound.grammar(some, choice, True)))
            plan = compiled.planner.start_plan
            assert plan and compiled.start().closes(plan)


def test_free_text_up_to_a_literal_or_a_control_token_ends(compiler: Compiler) -> None:
    by_text = Grammar('start: body\nbody[lazy]: /(?s:.*)/ "</value>"\n')
    compiled = compiler.compile(by_text)
    for text, rest in ((b"", b"</value>"), (b'say "hi', b"</value>"), (b"x}],</va", b"lue>")):
        plan = compiled.planner.full(at(compiled, text), ROOMY)
        assert plan is not None and bytes(plan) in (rest, b'"' + rest)
    by_token = Grammar("start: TEXT <[256]>\nTEXT: /(?s:.*)/\n")
    compiled = compiler.compile(by_token)
    assert compiled.planner.full(at(compiled, b"any {text"), ROOMY) == [256]


def test_a_vocabulary_without_the_letters_of_json_plans_nothing() -> None:
    parsed = json.loads(byte_tokenizer_json())
    parsed["model"]["vocab"] = {"a": 0, "b": 1}
    parsed["added_tokens"] = [{**parsed["added_tokens"][0], "id": 2}]
    tiny = Compiler(json.dumps(parsed), 3, [2])
    assert tiny.compile(Grammar("start: /[ab]*/")).planner.start_plan == ()
    with pytest.raises(GrammarRefused):
        tiny.compile(Grammar('start: "ab"'))


def test_where_a_json_text_stands() -> None:
    outside, inside, escaped = lexical.OUTSIDE, lexical.INSIDE, lexical.ESCAPED
    for text, wanted in ((b"", outside), (b'{"a', inside), (b'{"a"', outside), (b'"\\', escaped),
                         (b'"\\"', inside), (b'"\\\\"', outside), (b'"a": "b\\n', inside),
                         (b"\\", outside), (b'"\\u0022', inside)):  # fmt: skip
        assert lexical.after(outside, text) == wanted, text
        for cut in range(len(text) + 1):
            assert lexical.after(lexical.after(outside, text[:cut]), text[cut:]) == wanted, text


def test_a_state_knows_whether_it_is_in_a_string_through_rollbacks_and_free_text(
    compiler: Compiler,
) -> None:
    state = at(compiler.compile(lark(NOTE)), b'{"note": "a\\')
    assert state.lexical == lexical.ESCAPED
    state.rollback(1)
    assert state.lexical == lexical.INSIDE
    other = state.clone()
    state.accept_all(b'", "')
    other.rollback(2)
    assert state.lexical == lexical.INSIDE and other.lexical == lexical.OUTSIDE
    fmt = load("hermes")
    auto = Grammar(fmt.grammar([Tool("f", "", NOTE, True)], "auto", True), "", fmt.begin)
    state = at(compiler.compile(auto), b'an odd " quote <tool_call>\n{"na')
    assert state.lexical == lexical.INSIDE
    state.rollback(10)
    assert state.lexical == lexical.OUTSIDE


@pytest.mark.parametrize("pattern", ["^[0-9]{{4}}-{}x$", "{}[ab]+y", "^[A-Z]{{3}}-{}[0-9]{{4}}$"])
def test_of_many_patterns_each_property_is_ended_by_its_own(
    compiler: Compiler, pattern: str
) -> None:
    def level(most: int, **more: Any) -> dict[str, Any]:
        texts = {f"p{i}": {"type": "string", "pattern": pattern.format(i + most)}
                 for i in range(most)}  # fmt: skip
        return record({**texts, **more}, [*texts, *more])

    schema = level(200, inner=level(150))  # names come twice, with other patterns
    plan = compiler.compile(lark(schema)).planner.start_plan
    assert plan is not None
    whole_text = compiler.vocabulary.tokenizer.decode_bytes(list(plan))
    jsonschema.validate(json.loads(whole_text), schema)
    middle = len(whole_text) * 4 // 5  # from where the rest is within the steps
    assert ending(compiler, schema, whole_text[:middle]) == whole_text[middle:]


def test_texts_are_read_off_patterns() -> None:
    def of(pattern: str) -> list[bytes]:
        return list(read(f"start: %json {json.dumps({'pattern': pattern})}").hints)

    for pattern, text in (("^[a-z]{2}[0-9]{4}$", b"aa0000"), ("1.2", b"1a2"), (r"\$up", b"$up"),
                          ("^mqtt:on$|^mqtt:off$", b"mqtt:on"), ("(ab){3}", b"ababab"),
                          (r"^(?:\S+\s+){0,9}\S+$", b"a"), ("x+?[^a]\\.", b"x0."),
                          ("[]a]", b"]"),
                          ('a"b', b'a\\"b'), (r"\\", b"\\\\"),
                          ("(?P<x>é)", "é".encode())):  # fmt: skip
        assert of(pattern) == [text], pattern
    for odd in ("((((", "\\", "[", "a{", "*", "(?", "a{9999999}", "(" * 5_000):
        of(odd)
    text = 'start: "<a>" x\nx: "<b>" %json {"const": "no"} "</b>\\n"\n'
    assert sorted(read(text).literals) == [b"</b>\n", b"<a>", b"<b>"]


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ('start: "<a>" ("yes" | "no" | /[0-9]{3,9}/)+ "</a>"', b"<a>no</a>"),
        ('start: "<a>" (/[0-9]{3,9}/)+ "</a>"', b"<a>000</a>"),
        ('start: "<a>" (/[a-z]{3,9}/)+ "</a>"', b"<a>aaa</a>"),
        ('start: /[0-9]+/ "x9"', b"0x0"),
    ],
)
def test_a_run_that_only_another_letter_ends_is_no_trap(
    compiler: Compiler, text: str, shortest: bytes
) -> None:
    plan = bytes(compiler.compile(Grammar(text)).planner.start_plan or ())
    assert bytes(48 if 48 <= byte <= 57 else byte for byte in plan) == shortest  # any digits


def test_every_word_of_the_vocabulary_of_these_tests_is_a_token() -> None:
    text, size = merged_tokenizer_json(w.replace(" ", "Ġ").replace("\n", "Ċ") for w in WORDS)
    vocabulary = Vocabulary(text, size, [EOS])
    pieces = [vocabulary.piece(token) for token in range(size)]
    assert len(set(pieces) - {b""}) == size - 1  # no text holds the byte 0xff
    assert {word.encode() for word in WORDS} < set(pieces)
    special = json.loads(byte_tokenizer_json())["added_tokens"]
    known = Tokenizer.from_str(text)
    assert [known.token_to_id(one["content"]) for one in special] == [one["id"] for one in special]
