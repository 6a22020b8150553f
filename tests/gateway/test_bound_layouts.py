"""Layouts with control tokens through the whole gateway: wire, history, next prompt.  No engine."""

from __future__ import annotations

import json
from functools import partial

import pytest

from gateway.config import GatewayConfig
from gateway.events import CallArgs, CallStart
from gateway.prompt import Prompts
from gateway.protocol import Function, Message, ToolCall
from gateway.state import Gateway
from gateway.tools import FORMATS, Tool, load
from tests.asking import ADD, post
from tests.calls import Dialect, dialect, takes, with_controls
from tests.prompting import END, TOOLS, chat, prompts, single_bytes, small_bpe, user
from tests.scripted import EOS, Script, ScriptedLink

BOUND = [name for name in FORMATS if load(name).markers]
ARGUMENTS = '{"a": 1}'


def gateway_saying(said: Dialect, tokens: list[int], group: int) -> Gateway:
    batches = [tokens[at : at + group] for at in range(0, len(tokens), group)]
    link = ScriptedLink(lambda _: Script([*batches, [EOS]]))
    made = Prompts(said.tokenizer_json, None, max_len=4096, format=load(said.fmt.name),
                   stop_ids=[EOS])  # fmt: skip
    return Gateway.open(GatewayConfig(), link, made, "tiny")


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("group", [1, 3, 1000])
def test_a_call_between_control_tokens_is_a_call_on_the_wire(name: str, group: int) -> None:
    said = dialect(name, True)
    text = "" if said.fmt.opening else "Hm é.\n"
    tokens = said.tokens(said.written([("add", ARGUMENTS)] * 2, text))
    ask = partial(post, gateway_saying(said, tokens, group), tools=[ADD])
    whole = ask().json()["choices"][0]
    calls = whole["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}] * 2
    assert whole["message"]["content"] == (text or None)
    assert whole["finish_reason"] == "tool_calls"
    frames = [json.loads(line[6:]) for line in ask(stream=True).text.split("\n\n")
              if line.startswith("data: {")]  # fmt: skip
    deltas = [choice["delta"] for frame in frames for choice in frame["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index, call in enumerate(calls):
        mine = [piece["function"] for piece in pieces if piece["index"] == index]
        assert "".join(piece["arguments"] for piece in mine) == call["function"]["arguments"]
    assert frames[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", [name for name in BOUND if load(name).markers[0][0] == "<"])
@pytest.mark.parametrize("group", [1, 1000])
def test_added_tokens_in_angle_brackets_need_not_be_special_to_be_markers(
    name: str, group: int
) -> None:
    tokenizer_json, ids = with_controls(load(name).markers, special=False)
    made = Prompts(tokenizer_json, None, max_len=4096, format=load(name), stop_ids=[EOS])
    said = Dialect(made.format, tokenizer_json, ids)
    assert set(said.fmt.stand_ins) == set(ids.values())
    for id in (*ids.values(), ord("a")):
        made.vocabulary.quote(id)
    assert list(made.vocabulary.quoted) == [ord("a")], "only a scanner knows what a marker says"
    text = "" if said.fmt.opening or not said.fmt.begin else "Hm. "
    tokens = said.tokens(said.written([("add", ARGUMENTS)] * 2, text))
    tool = Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}}, True)
    assert takes(said.compiler, said.fmt.grammar([tool], "auto", True), tokens)
    ask = partial(post, gateway_saying(said, tokens, group), tools=[ADD])
    message = ask().json()["choices"][0]["message"]
    assert (message["content"] or "", len(message["tool_calls"])) == (text, 2)
    streamed = ask(stream=True).text
    assert not any(marker in streamed for marker in ids)
    assert '"finish_reason":"tool_calls"' in streamed


def test_without_tools_control_tokens_are_no_text() -> None:
    said = dialect("kimi", True)
    tokens = said.tokens(said.seen("a<|tool_call_begin|>b"))
    message = post(gateway_saying(said, tokens, 2)).json()["choices"][0]["message"]
    assert message["content"] == "ab" and not message.get("tool_calls")


@pytest.mark.parametrize("name", BOUND)
def test_the_next_turn_starts_with_the_control_tokens_of_this_one(name: str) -> None:
    tokenizer_json, ids = with_controls(load(name).markers, small_bpe())
    made = prompts(tokenizer_json, format=load(name))
    said = Dialect(made.format, tokenizer_json, ids)
    letters = {letter: id for id, letter in made.format.stand_ins.items()}
    assert letters
    calls = [("add", ARGUMENTS), ("add", '{"a": "é\\n<|tool_call_end|>[ARGS]😀"}')]
    sent = [ToolCall(id=f"call_{i}", function=Function(*call)) for i, call in enumerate(calls)]
    history = [user("one")]
    before: list[int] = []
    for _ in range(3):
        prompt = chat(made, history, TOOLS, scope=b"tenant")
        assert prompt.ids[: len(before)] == before
        sampled = [id for part in said.written(calls) for id in
                   ([letters[part]] if part in letters else single_bytes(part))]  # fmt: skip
        before = [*prompt.ids, *sampled, END]
        made.remember(prompt, sampled)
        history += [Message("assistant", None, tool_calls=sent), user("more")]
    assert chat(made, history, TOOLS, scope=b"tenant").ids[: len(before)] == before


#: How the models' own templates print calls.
OWN = {
    "kimi": "<|tool_calls_section_begin|>{%- for call in calls -%}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>"
    "{%- endfor -%}<|tool_calls_section_end|>",
    "deepseek": "{%- for call in calls -%}{{ '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}"
    "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}"
    "{{ '\\n```json\\n' }}{{- call.function.arguments | tojson }}{{ '\\n```<｜tool▁call▁end｜>' }}"
    "{%- endfor -%}<｜tool▁calls▁end｜>",
    "mistral11": "{%- for call in calls -%}{{ '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + "
    "call.id + '[ARGS]' + call.function.arguments | string }}{%- endfor -%}",
    "mistral13": "{%- for call in calls -%}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + "
    "call.function.arguments | tojson }}{%- endfor -%}",
}


@pytest.mark.parametrize("name", OWN)
def test_a_models_own_template_continues_the_ids_of_calls_with_their_ids(name: str) -> None:
    template = (
        "{%- if tools %}{{ tools | tojson }}{% endif -%}{%- for message in messages -%}<|im_start|>"
        "{{ message.role }}\n{{- message.content or '' }}{%- set calls = message.tool_calls -%}"
        "{%- if calls -%}" + OWN[name] + "{%- endif -%}<|im_end|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    tokenizer_json, ids = with_controls(load(name).markers)
    made = prompts(tokenizer_json, template, format=load(name))
    said = Dialect(made.format, tokenizer_json, ids)
    end = 258
    prompt = chat(made, [user("one")], TOOLS)
    tokens = said.tokens(said.written([("add", ARGUMENTS), ("add", '{"a": "[ARGS]<|im_end|>"}')]))
    made.remember(prompt, tokens)
    scanner = made.format.scanner()
    events = scanner.push(said.text(tokens)) + scanner.close()
    starts = [event for event in events if isinstance(event, CallStart)]
    sent = [
        ToolCall(id=start.id, function=Function(start.name, "".join(
            event.text for event in events
            if isinstance(event, CallArgs) and event.index == start.index)))
        for start in starts
    ]  # fmt: skip
    assert len(sent) == 2
    again = chat(made, [user("one"), Message("assistant", None, tool_calls=sent)], TOOLS)
    expected = [*prompt.ids, *tokens, end]
    assert again.ids[: len(expected)] == expected
