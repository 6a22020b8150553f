"""Single layouts: what is special to each, their templates, and which one a model speaks."""

from __future__ import annotations

import ast
import functools
import json
import random
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest

from gateway import tools
from gateway.events import CallArgs, CallEnd, CallStart, Event
from gateway.render import Marks, pairs
from gateway.tools import FORMATS, Format, Tool, UnknownFormat, load, pick
from gateway.tools.marked import Marked
from tests.calls import HERMES, Dialect, dialect, joined, scan, splits, takes
from tests.schemas import record, tool, whole

ADD = Tool("add", "", record({"a": whole(0, 9), "b": whole(0, 9)}), True)


@pytest.fixture(params=FORMATS)
def fmt(request: pytest.FixtureRequest) -> Format:
    return load(request.param)


def test_the_example_is_what_the_format_writes(fmt: Format) -> None:
    assert fmt.example == fmt.write([("add", '{"a": 1, "b": 2}')])
    assert fmt.write([]) == ""


def test_a_format_is_bound_to_the_markers_that_a_vocabulary_has(fmt: Format) -> None:
    assert fmt.bound({}) is fmt and fmt.bound({"<|other|>": 7}) is fmt and not fmt.stand_ins
    if fmt.markers:
        bound = fmt.bound({fmt.markers[-1]: 7, "<|other|>": 8})
        assert list(bound.stand_ins) == [7] and bound.name == fmt.name
        assert bound.example == fmt.example


def render(template: str, messages: list[dict[str, Any]], tools: Any = (), **more: Any) -> str:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    env.filters["pairs"] = functools.partial(pairs, Marks([]))
    return env.from_string(template).render(messages=messages, tools=tools, **more)


CALLS = [("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1 + 2, and 3 + 4?"},
    {
        "role": "assistant",
        "content": "Let me see.\n",
        "tool_calls": [{"name": name, "arguments": text} for name, text in CALLS],
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
    output = "Let me see.\n" + fmt.write(CALLS)
    assert render(fmt.template, chat[: before + 1], tools).startswith(prompt + output)
    assert f"assistant\n{fmt.write([('add', json.dumps({'a': 1, 'b': 1}))])}<|im_end|>" in prompt


def test_an_id_that_the_model_wrote_is_written_again_in_the_history() -> None:
    for name, id, shown in (
        ("kimi", "functions.add:7", "<|tool_call_begin|>functions.add:7<|tool_call_arg"),
        ("kimi", "call_abc", "<|tool_call_begin|>functions.add:0<|tool_call_arg"),
        ("mistral11", "a1B2c3D4e", "[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]"),
        ("mistral11", "call_abc", "[TOOL_CALLS]add[CALL_ID]000000000[ARGS]"),
    ):
        call = {"id": id, "name": "add", "arguments": "{}"}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert shown in render(load(name).template, [turn])


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
def test_without_tools_a_layout_prints_what_smollm2s_own_template_prints(
    fmt: Format, start: int, prompt: bool
) -> None:
    chat = [
        {"role": "system", "content": "Be  brief.\n"},
        {"role": "user", "content": " <b> & 'x' {{ 1 }}\n\n"},
        {"role": "assistant", "content": "Hi 🌊"},
    ][start:]
    own = render(SMOLLM2, chat, add_generation_prompt=prompt)
    assert render(fmt.template, chat, add_generation_prompt=prompt) == own


def test_tool_results_and_instructions_are_shown_in_the_hermes_layout() -> None:
    text = render(HERMES.template, CHAT[:3], [tool("add", {"type": "object"})])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, ")
    assert '<tools>\n{"type": "function", "function": {"name": "add", ' in text
    assert 'this:\n<tool_call>\n{"name": "tool_name", "arguments": {"key": "value"}}\n</' in text
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


def test_free_text_stays_free_for_any_string(fmt: Format) -> None:
    rng = random.Random(8)
    letters = fmt.example + '<{}"/ae:, 🌊\n'
    for _ in range(300):
        text = "".join(rng.choices(letters, k=rng.randrange(60)))
        pieces = next(iter([p for p in splits(text, rng)][::-1]))
        assert joined(scan(fmt, pieces, [ADD])) == ([text] if text else [])


def started(said: Dialect, seen: str) -> list[tuple[str, str]]:
    """(name, id) of the calls in a text, the same at every split."""
    found = [
        [(e.name, e.id) for e in scan(said.fmt, pieces) if isinstance(e, CallStart)]
        for pieces in splits(seen, random.Random(1))
    ]
    return found[0] if all(one == found[0] for one in found) else []


@pytest.mark.parametrize("bound", [False, True])
def test_the_id_that_kimi_wrote_is_the_calls_id_and_never_used_twice(bound: bool) -> None:
    said = dialect("kimi", bound)
    begin, call = "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.add:%s"
    body = "<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = begin + "".join(call % index + body for index in ("12", "12", "0", "0"))
    ids = [id for _, id in started(said, said.seen(text))]
    assert ids == [f"functions.add:{index}" for index in (12, 13, 0, 1)]


@pytest.mark.parametrize("bound", [False, True])
def test_mistrals_ids_have_nine_letters_and_are_the_models_own_where_they_come_in_time(
    bound: bool
) -> None:
    said = dialect("mistral11", bound)
    one, two = "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}", "[TOOL_CALLS]f[CALL_ID]000000009[ARGS]{}"
    found = [e.id for e in scan(said.fmt, [said.seen(one + one + two + two)])
             if isinstance(e, CallStart)]  # fmt: skip
    assert (found[0], *found[2:]) == ("abcDEF123", "000000009", "000000010")
    assert found[1] != found[0]
    for name in ("mistral", "mistral13"):
        said = dialect(name, bound)
        found += [e.id for e in scan(said.fmt, [said.written([("f", "{}"), ("f", "{}")])])
                  if isinstance(e, CallStart)]  # fmt: skip
    assert all(len(id) == 9 and id.isalnum() for id in found) and len(set(found)) == 8


@pytest.mark.parametrize("name", ["hermes", "llama3", "deepseek", "deepseek31"])
def test_ids_that_the_model_does_not_write_are_shaped_as_openais(name: str) -> None:
    said = dialect(name, False)
    ids = [e.id for e in scan(said.fmt, [said.written([("f", "{}")] * 50)])
           if isinstance(e, CallStart)]  # fmt: skip
    assert len(set(ids)) == 50
    assert all(len(id) == 29 and id.startswith("call_") and id[5:].isalnum() for id in ids)


@pytest.mark.parametrize("bound", [False, True])
def test_an_id_at_the_end_of_a_mistral_call_is_read_and_left_out(bound: bool) -> None:
    said = dialect("mistral", bound)
    lark = said.fmt.grammar([ADD], "required", True)
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}%s}'
    for first, second in (("", ', "id": "abcdefgh9"'), (', "id": "123456789"', "")):
        space = " " if first else ""
        seen = said.seen(f"[TOOL_CALLS]{space}[{call % first}, {call % second}]")
        assert takes(said.compiler, lark, said.tokens(seen))
        for pieces in splits(seen, random.Random(1)):
            assert joined(scan(said.fmt, pieces)) == [["add", '{"a": 1, "b": 2}', "closed"]] * 2
    for id in ("abcdefgh", "abcdefghij", "abc-efghi"):
        seen = said.seen(f"[TOOL_CALLS][{call}]" % f', "id": "{id}"')
        assert not takes(said.compiler, lark, said.tokens(seen))


def test_a_llama_message_is_a_call_only_if_it_starts_with_the_whole_head() -> None:
    said = dialect("llama3", False)
    lark = said.fmt.grammar([ADD], "auto", True)
    call = said.fmt.example
    for text in ('{"name" : "add"}', "{}", '{"named": 1}', '{"name": 1}', f"So: {call}", f" {call}",
                 '{"name": '):  # fmt: skip
        assert takes(said.compiler, lark, text)
        for pieces in splits(text, random.Random(1)):
            assert joined(scan(said.fmt, pieces)) == [text]
    for text in ('{"name": "nope"', '{"name": "add", "age": 3}', call + " "):
        assert not takes(said.compiler, lark, text)
    bound = dialect("llama3", True)
    lark = bound.fmt.grammar([ADD], "required", True)
    for seen in (call, bound.seen(f"<|python_tag|>{call}; {call}")):
        assert takes(bound.compiler, lark, bound.tokens(seen))
        assert joined(scan(bound.fmt, list(seen)))[0] == ["add", '{"a": 1, "b": 2}', "closed"]


def test_a_llama_answer_by_a_schema_may_look_like_a_call_at_first() -> None:
    said = dialect("llama3", False)
    answer = record({"name": {"type": "string"}, "x": whole(0, 9)})
    lark = said.fmt.grammar([ADD], "auto", True, answer)
    for text in ('{"name": "add", "x": 1}', '{"name": "ad", "x": 1}', said.fmt.example,
                 f"{said.fmt.example}; {said.fmt.example}"):  # fmt: skip
        assert takes(said.compiler, lark, text), text
    assert not takes(said.compiler, lark, '{"name": "ad", "parameters": {"a": 1, "b": 2}}')


def test_arguments_end_with_their_object_where_no_literal_can_say_so() -> None:
    said = dialect("mistral13", True)
    for arguments in ('{"a": "}"}', '{"a": "\\"}"}', '{"a": "\\\\"}', '{"a": {"b": [{}]}}', "{}"):
        seen = said.written([("f", arguments)])
        scanner, found = said.fmt.scanner(), list[Event]()
        for letter in seen:
            assert not any(isinstance(event, CallEnd) for event in found)
            found += scanner.push(letter)
        assert isinstance(found[-1], CallEnd), "at the last brace, not at the end of the message"
        assert "".join(e.text for e in found if isinstance(e, CallArgs)) == arguments


def test_pick_follows_the_override_then_the_models_template_then_hermes() -> None:
    assert pick(None, None).name == "hermes"
    assert pick("... <tool_call> ...", None).name == "hermes"
    assert pick("no tools here", "hermes").name == "hermes"
    with pytest.raises(UnknownFormat, match=r"Did you mean 'hermes'.*Known formats: deepseek, "):
        pick(None, "hermez")


#: The lines of the models' own chat templates that tell their layouts.
SPEAK = {
    "hermes": "{{- '<tool_call>\\n{\"name\": \"' }}",
    "llama3": """{{- 'Respond in the format {"name": function name, "parameters": dictionary of """
    """argument name and its value}.' }}{{- "<|python_tag|>" + tool_call.name }}""",
    "mistral": "{{- '[TOOL_CALLS][' }}{{- ', \"id\": \"' + tool_call.id + '\"}' }}",
    "mistral11": "{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + call.id + '[ARGS]' + arguments }}",
    "mistral13": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + "
    "'<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + arguments }}",
    "deepseek31": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + "
    "'<｜tool▁sep｜>' + arguments}}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
}  # fmt: skip


@pytest.mark.parametrize("name", SPEAK)
def test_a_model_speaks_the_layout_that_its_own_template_prints(name: str) -> None:
    assert pick(SPEAK[name], None).name == name
    assert pick(load(name).template, None).name == name or name == "llama3"


def test_no_layout_reads_with_regular_expressions_or_evaluates() -> None:
    """What a model wrote is looked at letter by letter: no text of its makes that slow."""
    for path in Path(tools.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    found = {name.name for name in names}
                case ast.ImportFrom(module=module):
                    found = {module}
                case ast.Name(id=id):
                    found = {id}
                case _:
                    continue
            assert found.isdisjoint({"re", "ast", "eval", "exec", "compile"}), path.name


def test_every_json_layout_is_data() -> None:
    assert all(isinstance(load(name), Marked) for name in SPEAK)
