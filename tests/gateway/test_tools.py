"""Tool formats: each runs the same suite; then Hermes by itself.  Plans no request."""

from __future__ import annotations

import json
import random
from typing import Any

import jinja2.sandbox
import jsonschema
import pytest

from engine.grammar.matcher import Compiler
from gateway.events import CallArgs, CallStart
from gateway.tools import FORMATS, Format, Tool, UnknownFormat, load, pick
from tests.calls import HERMES, byte_compiler, joined, scan, splits, takes
from tests.schemas import record, tool, whole

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
    return byte_compiler()


def expected(text: str, calls: Calls) -> list[Any]:
    return ([text] if text else []) + [[name, arguments, "closed"] for name, arguments in calls]


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


def test_free_text_stays_free_for_any_string() -> None:
    rng = random.Random(8)
    letters = '<tool_call>\n{}"/ae:, 🌊'
    for _ in range(300):
        text = "".join(rng.choices(letters, k=rng.randrange(60)))
        pieces = next(iter([p for p in splits(text, rng)][::-1]))
        assert joined(scan(HERMES, pieces)) == ([text] if text else [])
