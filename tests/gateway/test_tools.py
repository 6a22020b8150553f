"""Tool formats and plans: each format runs the same suite; then Hermes; then tool_choice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2.sandbox
import jsonschema
import msgspec
import numpy as np
import pytest

from engine.grammar.masks import Masks
from engine.grammar.matcher import Compiler
from engine.grammar.schema import BadSchema
from engine.messages import Grammar
from gateway.events import CallArgs, CallEnd, CallStart, Event, Text
from gateway.tools import FORMATS, Format, Tool, UnknownFormat, load, pick
from gateway.tools.choice import ToolPlan, plan
from gateway.tools.finished import complaint
from tests.schemas import FAMILIES, ODD, record, tool, whole
from tests.scripted import EOS, byte_tokenizer_json

HERMES = load("hermes")
Calls = list[tuple[str, str]]

CALLS: list[Calls] = [
    [("add", '{"a": 1, "b": 2}')],
    [("lamp_on", "{}")],
    [("tide", '{"port": "Oban"}'), ("tide", '{"port": "Skye"}')],
    [("note", '{"text": "São Tomé 🌊 日本", "deep": {"x": [{}, {"y": "}}"}]}}')],
    [("note", '{"text": "</tool_call> and <tool_call>\\n{\\"name\\": \\"x\\"}}\\n"}')],
    [("note", '{"text": "}\\\\"}'), ("a-b_C9", '{"n": -1.5e10, "z": null}'), ("x" * 64, "{}")],
    [("seat", '{"seat": 42}')],
]
TEXTS = ["", "Sure.\n", "a <b> < 3 <tool", "naïve 🌊 text\n\n", "}\n</tool_call>", '{"name": "x"}']


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(byte_tokenizer_json(), 259, [EOS])


def scan(fmt: Format, pieces: Iterable[str]) -> list[Event]:
    scanner = fmt.scanner()
    return [event for piece in pieces for event in scanner.push(piece)] + scanner.close()


def joined(events: Sequence[Event]) -> list[Any]:
    """Events with neighbouring pieces joined and call ids left out; checks the order rules."""
    out: list[Any] = []
    ids, open_call = set(), None
    for event in events:
        match event:
            case Text(text=text):
                assert text and open_call is None
                if out and isinstance(out[-1], str):
                    out[-1] += text
                else:
                    out.append(text)
            case CallStart(index=index, id=call_id, name=name):
                assert open_call is None and index == len(ids) and call_id not in ids
                ids.add(call_id)
                open_call = [name, "", "open"]
                out.append(open_call)
            case CallArgs(index=index, text=text):
                assert text and open_call is not None and index == len(ids) - 1
                open_call[1] += text
            case CallEnd(index=index):
                assert open_call is not None and index == len(ids) - 1
                open_call[2] = "closed"
                open_call = None
            case _:
                raise TypeError(event)
    return out


def expected(text: str, calls: Calls) -> list[Any]:
    return ([text] if text else []) + [[name, arguments, "closed"] for name, arguments in calls]


def splits(text: str, rng: random.Random) -> Iterable[list[str]]:
    yield [text]
    yield list(text)
    yield from ([text[:cut], text[cut:]] for cut in range(1, len(text)))
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 9)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.fixture(params=FORMATS)
def fmt(request: pytest.FixtureRequest) -> Format:
    return load(request.param)


@pytest.mark.parametrize("calls", CALLS)
def test_what_was_written_is_read_back_at_every_split(fmt: Format, calls: Calls) -> None:
    rng = random.Random(5)
    for text in TEXTS:
        whole_text = text + fmt.write(calls)
        for pieces in splits(whole_text, rng):
            assert joined(scan(fmt, pieces)) == expected(text, calls), pieces


def test_arguments_arrive_as_they_are_written(fmt: Format) -> None:
    """All but the few characters that may begin the closing literal are out at once."""
    text = fmt.write([("note", '{"text": "' + "x" * 200 + '"}')])
    scanner, seen, lag = fmt.scanner(), 0, 0
    for at, letter in enumerate(text):
        seen += sum(len(e.text) for e in scanner.push(letter) if isinstance(e, CallArgs))
        if "x" * 50 in text[:at] and letter == "x":
            lag = max(lag, at + 1 - text.index("{", len(fmt.begin) + 9) - seen)
    assert lag <= 0


def test_text_is_held_back_only_while_it_may_begin_a_call(fmt: Format) -> None:
    scanner = fmt.scanner()
    assert joined(scanner.push("plain words")) == ["plain words"]
    half = fmt.begin[:-1]
    assert scanner.push(half) == []
    assert joined(scanner.push(" no")) == [half + " no"]
    assert scanner.push(half) == []
    assert joined(scanner.close()) == [half]


def test_a_call_that_is_cut_keeps_its_arguments_and_has_no_end(fmt: Format) -> None:
    text = fmt.write([("note", '{"text": "abc"}')])
    body = text.index('"abc')
    for pieces in splits(text[: body + 3], random.Random(2)):
        assert joined(scan(fmt, pieces)) == [["note", '{"text": "ab', "open"]]


def test_ids_are_unique_and_shaped_as_openais(fmt: Format) -> None:
    starts = [e for e in scan(fmt, [fmt.write(CALLS[2] * 50)]) if isinstance(e, CallStart)]
    assert len({e.id for e in starts}) == 100
    assert all(len(e.id) == 29 and e.id.startswith("call_") and e.id[5:].isalnum() for e in starts)


ADD = Tool("add", "", record({"a": whole(0, 9), "b": whole(0, 9)}), True)


def takes(compiler: Compiler, lark: str, text: str) -> bool:
    """Whether the text is a whole output of the grammar."""
    state = compiler.compile(Grammar(lark)).start()
    raw = list(text.encode())
    return state.accept_all(raw) == len(raw) and state.accepting


def test_the_grammar_takes_the_example_and_nothing_near_it(fmt: Format, compiler: Compiler) -> None:
    lark = fmt.grammar([ADD], "named", True)
    assert takes(compiler, lark, fmt.example)
    letters = 'abx0 <>{}"\n,'
    for at in range(len(fmt.example)):
        for letter in letters:
            for mutant in (
                fmt.example[:at] + letter + fmt.example[at + 1 :],
                fmt.example[:at] + letter + fmt.example[at:],
                fmt.example[:at] + fmt.example[at + 1 :],
            ):
                if takes(compiler, lark, mutant) and mutant != fmt.example:
                    name, arguments, end = joined(scan(fmt, [mutant]))[0]
                    assert (name, end) == ("add", "closed")
                    jsonschema.validate(json.loads(arguments), dict(ADD.parameters))


def test_the_example_is_what_the_format_writes(fmt: Format) -> None:
    assert fmt.example == fmt.write([("add", '{"a": 1, "b": 2}')])


def render(template: str, messages: list[dict[str, Any]], tools: Any = (), **more: Any) -> str:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string(template).render(messages=messages, tools=tools, **more)


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1 + 2, and 3 + 4?"},
    {
        "role": "assistant",
        "content": "Let me see.\n",
        "tool_calls": [
            {"name": "add", "arguments": '{"a": 1, "b": 2}'},
            {"name": "add", "arguments": '{"a": 3,"b":4}'},
        ],
    },
    {"role": "tool", "content": "3", "name": "add"},
    {"role": "tool", "content": "7", "name": "add"},
    {"role": "assistant", "content": "3 and 7."},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_each_turn_of_a_rendered_chat_starts_with_the_one_before(
    fmt: Format, system: list[dict[str, Any]]
) -> None:
    tools = [tool("add", dict(ADD.parameters))]
    chat = system + CHAT
    for at in range(len(system) + 1, len(chat) + 1):
        text = render(fmt.template, chat[:at], tools)
        assert render(fmt.template, chat, tools).startswith(text)
        assert '"additionalProperties": false' in text
    before = len(system) + 1
    prompt = render(fmt.template, chat[:before], tools, add_generation_prompt=True)
    output = "Let me see.\n" + fmt.write([("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3,"b":4}')])
    assert render(fmt.template, chat[: before + 1], tools).startswith(prompt + output)


#: As stored in SmolLM2-135M-Instruct's GGUF.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("prompt", [True, False])
def test_without_tools_hermes_prints_what_the_models_own_template_prints(
    start: int, prompt: bool
) -> None:
    chat = [
        {"role": "system", "content": "Be  brief.\n"},
        {"role": "user", "content": " <b> & 'x' {{ 1 }}\n\n"},
        {"role": "assistant", "content": "Hi 🌊"},
    ][start:]
    own = render(SMOLLM2, chat, add_generation_prompt=prompt)
    assert render(HERMES.template, chat, add_generation_prompt=prompt) == own


def test_tool_results_and_instructions_are_shown_in_the_hermes_layout() -> None:
    text = render(HERMES.template, CHAT[:3], [tool("add", {"type": "object"})])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, ")
    assert '<tools>\n{"type": "function", "function": {"name": "add", ' in text
    assert text.endswith("<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n")


LOOKALIKES = [
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    '<tool_call>\n{"name": "no such name!", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "' + "x" * 65 + '", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>',
    "Use <tool_call> to call, </tool_call> to end.",
    '<tool_call>\n{"name": "f',
    "<tool_call>\n" * 3,
]


@pytest.mark.parametrize("text", LOOKALIKES)
def test_text_that_only_looks_like_a_call_passes_unharmed(text: str) -> None:
    call = HERMES.write([("f", '{"x": 1}')])
    for pieces in splits(text, random.Random(3)):
        assert joined(scan(HERMES, pieces)) == [text]
    for pieces in splits(text + call, random.Random(4)):
        assert joined(scan(HERMES, pieces)) == [text, ["f", '{"x": 1}', "closed"]]
    for pieces in splits(call + "\n" + text, random.Random(4)):
        assert joined(scan(HERMES, pieces)) == [["f", '{"x": 1}', "closed"], "\n" + text]


def test_white_space_after_a_call_is_dropped_unless_text_follows() -> None:
    call = HERMES.write([("f", "{}")])
    closed = ["f", "{}", "closed"]
    for pieces in splits(f"{call} \n\n{call}\n", random.Random(6)):
        assert joined(scan(HERMES, pieces)) == [closed, closed]
    for pieces in splits(f"{call}\n so {call}", random.Random(6)):
        assert joined(scan(HERMES, pieces)) == [closed, "\n so ", closed]


def test_pick_follows_the_override_then_the_models_template_then_hermes() -> None:
    assert pick(None, None).name == "hermes"
    assert pick("... <tool_call> ...", None).name == "hermes"
    assert pick("no tools here", "hermes").name == "hermes"
    with pytest.raises(UnknownFormat, match=r"Did you mean 'hermes'.*Known formats: hermes"):
        pick(None, "hermez")


def planned(
    tools: Any, choice: Any = None, parallel: bool | None = None, answer: Any = None
) -> ToolPlan:
    return plan(tools, choice, parallel, answer, HERMES)


def text_of(*calls: tuple[str, str]) -> str:
    return HERMES.write(list(calls))


TOOLS = [
    tool("add", record({"a": whole(0, 99)})),
    tool("lamp_on"),
    tool("spot", record({"p": {"$ref": "#/$defs/P"}}, **{"$defs": {"P": {"enum": ["left"]}}})),
    tool("area", record({"p": {"$ref": "#/$defs/P"}}, **{"$defs": {"P": whole(1, 3)}})),
]
ADD1, LAMP, SPOT, AREA = (
    ("add", '{"a": 1}'),
    ("lamp_on", "{}"),
    ("spot", '{"p": "left"}'),
    ("area", '{"p": 2}'),
)
NAMED = {"type": "function", "function": {"name": "add"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "add"}}],
    },
}

EVERY_CHOICE = [
    # tool_choice, parallel, taken, refused
    (None, None, ["", "hi", "<tool_cal", text_of(ADD1), "hi\n" + text_of(ADD1, LAMP, SPOT, AREA)],
     ["<tool_call>", text_of(ADD1) + "x", text_of(ADD1)[:-1], text_of(("nope", "{}"))]),
    ("auto", False, ["hi", "hi " + text_of(LAMP)], [text_of(ADD1, ADD1), text_of(ADD1) + "\n"]),
    ("required", True, [text_of(ADD1), text_of(ADD1, ADD1, LAMP)],
     ["", "hi", "hi" + text_of(ADD1), text_of(ADD1) + "\n", "\n" + text_of(ADD1)]),
    ("required", False, [text_of(ADD1), text_of(SPOT)], ["", text_of(ADD1, ADD1)]),
    (NAMED, None, [text_of(ADD1)], ["", "hi", text_of(LAMP), text_of(ADD1, ADD1)]),
    (ALLOWED, None, [text_of(ADD1), text_of(ADD1, ADD1)], ["", text_of(LAMP), text_of(ADD1, LAMP)]),
]  # fmt: skip


@pytest.mark.parametrize("case", EVERY_CHOICE)
def test_tool_choice_decides_what_may_be_said(case: Any, compiler: Compiler) -> None:
    choice, parallel, taken, refused = case
    found = planned(TOOLS, choice, parallel)
    assert found.grammar is not None and found.scan and found.grammar.param == "tools"
    assert found.named == (choice is NAMED)
    assert [entry["function"]["name"] for entry in found.tools] == [
        "add",
        "lamp_on",
        "spot",
        "area",
    ]
    for text in taken:
        assert takes(compiler, found.grammar.lark, text), text
    wrong = [
        text_of(("add", '{"a": "1"}')),
        text_of(("add", '{"a":1}')),
        text_of(("add", '{"a": 1 }')),
        text_of(("add", "{}")),
        text_of(("lamp_on", '{"x": 1}')),
        text_of(("spot", '{"p": 2}')),
        text_of(("area", '{"p": "left"}')),
    ]
    for text in refused + wrong:
        assert not takes(compiler, found.grammar.lark, text), text


def test_a_call_inside_free_text_cannot_be_left_open(compiler: Compiler) -> None:
    found = planned(TOOLS)
    assert found.grammar is not None
    state = compiler.compile(found.grammar).start()
    for at, letter in enumerate(text := "well <tool_call>\n" + text_of(LAMP)[12:]):
        assert state.accepting == (at < len("well <tool_call>")), text[:at]
        assert state.accept(ord(letter))
    assert state.accepting


def test_choice_none_shows_no_tools_and_leaves_text_alone() -> None:
    assert planned(TOOLS, "none") == ToolPlan(None, False, False)
    assert planned(None, "none") == planned(None) == planned([]) == ToolPlan(None, False, False)
    assert (
        planned(msgspec.Raw(b"null"), msgspec.Raw(b"null"), None, msgspec.Raw(b"null")).grammar
        is None
    )


COLOURS = {
    "type": "json_schema",
    "json_schema": {"name": "c", "strict": True, "schema": {"enum": ["red", {"no": 1}]}},
}


def test_an_answer_schema_and_tools_make_a_union(compiler: Compiler) -> None:
    both = planned(TOOLS, "auto", None, COLOURS)
    assert both.grammar is not None and both.scan
    for text in ('"red"', '{"no": 1}', text_of(ADD1), text_of(ADD1, LAMP)):
        assert takes(compiler, both.grammar.lark, text), text
    for text in ("", "red", "hi " + text_of(ADD1), '"red"' + text_of(ADD1), '"blue"'):
        assert not takes(compiler, both.grammar.lark, text), text
    alone = planned(None, None, None, COLOURS)
    assert alone.grammar is not None and alone.grammar.param == "response_format" and not alone.scan
    assert takes(compiler, alone.grammar.lark, '"red"')
    assert not takes(compiler, alone.grammar.lark, text_of(ADD1))
    forced = planned(TOOLS, "required", None, COLOURS)
    assert forced.grammar is not None and not takes(compiler, forced.grammar.lark, '"red"')


def test_json_object_means_any_object(compiler: Compiler) -> None:
    found = planned(None, None, None, {"type": "json_object"})
    assert found.grammar is not None
    assert takes(compiler, found.grammar.lark, '{"a": [1, {"b": null}], "c": "x"}')
    for text in ("[1]", "hi", '{"a": 1}\n', ""):
        assert not takes(compiler, found.grammar.lark, text)
    assert planned(None, None, None, {"type": "text"}).grammar is None


DEEP = b'[{"function": {"name": "a", "parameters": ' + b'{"a":' * 9_000 + b"1" + b"}" * 9_003 + b"]"

BAD_REQUESTS = [
    ({"tools": [tool("a"), tool("b", {"type": "array"})]}, "tools[1].function.parameters"),
    ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    ({"tools": "x"}, "tools"),
    ({"tools": b"[" * 100_000}, "tools[0]"),
    ({"tools": DEEP}, "tools"),
    ({"tools": TOOLS, "choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"tools": TOOLS, "choice": {"type": "function"}}, "tool_choice"),
    ({"tools": None, "choice": "required"}, "tool_choice"),
    ({"tools": None, "choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "choice": {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools"),
    ({"tools": TOOLS, "choice": {**ALLOWED, "allowed_tools": {"mode": "x", "tools": []}}},
     "tool_choice.allowed_tools.mode"),
    ({"tools": None, "answer": {"type": "yaml"}}, "response_format.type"),
    ({"tools": None, "answer": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"tools": None, "answer": {}}, "response_format"),
    ({"tools": None, "answer": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
     "response_format.json_schema.schema"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused_by_the_field_at_fault(case: Any) -> None:
    fields, param = case
    with pytest.raises(BadSchema) as caught:
        planned(**fields)
    assert caught.value.param == param
    assert caught.value.message


def test_a_refused_schema_names_function_pointer_and_keyword() -> None:
    with pytest.raises(BadSchema) as caught:
        planned([tool("book", ODD["uniqueItems"][0])])
    bad = caught.value
    assert (bad.code, bad.param) == ("unsupported_schema_keyword", "tools[0].function.parameters")
    assert (bad.pointer, bad.keyword) == ("/properties/x", "uniqueItems")
    assert bad.message.startswith(
        "Invalid schema for function 'book': at /properties/x: keyword 'uniqueItems' is not"
    )


def test_what_is_not_enforced_is_listed_and_checked_after_the_fact() -> None:
    found = planned([tool("ok"), tool("pick", ODD["uniqueItems"][0], strict=False)])
    assert [(param, gone.keyword) for param, gone in found.dropped] == [
        ("tools[1].function.parameters", "uniqueItems")
    ]
    assert found.schema_header == "relaxed; pointer=/properties/x/uniqueItems"
    assert found.complaint("pick", '{"x": [1, 2, 3]}') == ""
    assert found.complaint("pick", '{"x": [1, 1, 2]}') == "/x: uniqueItems"
    assert found.complaint("ok", '{"x": 1}') == ""
    assert planned(TOOLS).schema_header is None


def test_a_header_is_ascii_whatever_the_schema_is_called() -> None:
    odd = record({f"ü\n{i}": {"type": "string", "not": {}} for i in range(12)})
    header = planned([tool("odd", odd, strict=False)]).schema_header
    assert header is not None and header.isascii() and "\n" not in header
    assert header.endswith("; more=4")


def test_a_check_after_the_fact_runs_no_pattern_and_fetches_nothing() -> None:
    evil = {"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False, "not": {}}
    text = json.dumps({"a" * 40 + "b": "a" * 40 + "b"})
    assert complaint({"properties": {"x": {"pattern": "^(a|a)*$"}}, **evil}, text) == ": not"
    assert complaint({"$ref": "http://127.0.0.1:9/x"}, "{}") == ": not judged"
    assert complaint({}, "no json") == ": not judged"


def test_the_same_tools_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = msgspec.json.encode([tool("once", record({"zz": whole(3, 77)}))])
    first = planned(msgspec.Raw(raw))
    monkeypatch.setattr("gateway.tools.choice.check", lambda *_, **__: pytest.fail("again"))
    assert planned(raw) == first
    with pytest.raises(pytest.fail.Exception, match="again"):
        planned(raw.replace(b"77", b"78"))


def test_all_schemas_together_are_bounded() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(890)}}
    with pytest.raises(BadSchema, match="10,000") as caught:
        planned([tool(f"t{i}", wide) for i in range(25)])
    assert caught.value.param == "tools[11].function.parameters"


@pytest.mark.parametrize("name", FAMILIES)
def test_random_output_under_required_is_always_valid_calls(name: str, compiler: Compiler) -> None:
    found = planned([tool("first", FAMILIES[name]), tool("second", FAMILIES["enum"])], "required")
    assert found.grammar is not None
    compiled, masks, rng = compiler.compile(found.grammar), Masks(259, 1), random.Random(name)
    calls = 0
    for _ in range(4):
        state, out = compiled.start(), bytearray()
        while len(out) < 3_000:
            row = masks.fill([(0, state, [])]).numpy().view(np.uint8)
            token = int(rng.choice(np.flatnonzero(np.unpackbits(row[0], bitorder="little"))))
            if token == EOS:
                break
            assert state.accept(token)
            out.append(token)
        else:
            continue
        for tool_name, arguments, end in joined(scan(HERMES, list(out.decode()))):
            assert end == "closed"
            schema = FAMILIES[name if tool_name == "first" else "enum"]
            jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))
            calls += 1
    assert calls >= 3


def test_free_text_stays_free_for_any_string() -> None:
    rng = random.Random(8)
    letters = '<tool_call>\n{}"/ae:, 🌊'
    for _ in range(300):
        text = "".join(rng.choices(letters, k=rng.randrange(60)))
        pieces = next(iter([p for p in splits(text, rng)][::-1]))
        assert joined(scan(HERMES, pieces)) == ([text] if text else [])
