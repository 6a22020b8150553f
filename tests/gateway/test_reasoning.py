"""Reasoning and layouts of their own kind on the wire: harmony and tags, asked in process."""

from __future__ import annotations

import json

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from gateway.config import GatewayConfig
from gateway.events import CallArgs, CallEnd, CallStart, Finish, Reasoning, Text
from gateway.inside import events
from gateway.prompt import Prompts
from gateway.state import Gateway
from gateway.tools import load
from tests.asking import ADD, post, tokenizer
from tests.scripted import EOS, Script, ScriptedLink

HARMONY = load("harmony")
THOUGHT = "<|channel|>analysis<|message|>Add <them>.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is 3."
CALL = HARMONY.write([("add", '{"a": 1}')])


def speaking(name: str, text: str, group: int, **more: object) -> Gateway:
    """A gateway of this layout over an engine that says this."""
    prompts = Prompts(tokenizer(), None, max_len=4096, format=load(name), stop_ids=[EOS])
    link = ScriptedLink(lambda _: Script.say(text, group, **more))
    return Gateway.open(GatewayConfig(), link, prompts, "tiny")


def streamed(gateway: Gateway, **fields: object) -> list[dict]:
    body = post(gateway, stream=True, **fields).content.decode()
    lines = [line[6:] for line in body.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("group", [1, 3, 1000])
@pytest.mark.parametrize(
    ("said", "fields", "thought", "content", "calls", "finish"),
    [
        (THOUGHT + FINAL, {}, "Add <them>.", "It is 3.", 0, "stop"),
        (THOUGHT + FINAL, {"tools": [ADD]}, "Add <them>.", "It is 3.", 0, "stop"),
        (THOUGHT + CALL, {"tools": [ADD]}, "Add <them>.", None, 1, "tool_calls"),
        (THOUGHT + PREAMBLE + CALL, {"tools": [ADD]}, "Add <them>.", "One moment.", 1,
         "tool_calls"),
        ("Bare words.", {}, None, "Bare words.", 0, "stop"),
        (THOUGHT + FINAL, {"stop": ["Add"]}, "Add <them>.", "It is 3.", 0, "stop"),
        (THOUGHT[:40], {}, THOUGHT[30:40], None, 0, "stop"),
    ],
)  # fmt: skip
def test_reasoning_is_beside_the_content_and_the_same_streamed_and_not(
    group, said, fields, thought, content, calls, finish
):
    (choice,) = post(speaking("harmony", said, group), **fields).json()["choices"]
    message = choice["message"]
    assert message.get("reasoning_content") == thought
    assert message["content"] == content
    assert len(message.get("tool_calls", [])) == calls
    assert choice["finish_reason"] == finish

    state = ChatCompletionStreamState()
    thoughts = ""
    for chunk in streamed(speaking("harmony", said, group), **fields):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        for one in chunk["choices"]:
            thoughts += one["delta"].get("reasoning_content", "")
    again = state.get_final_completion().choices[0]
    assert thoughts == (thought or "")
    assert (again.message.content, again.finish_reason) == (content, finish)
    assert len(again.message.tool_calls or []) == calls


def test_an_answer_by_schema_comes_in_the_final_channel():
    schema = {"name": "x", "schema": ADD["function"]["parameters"]}
    wanted = {"type": "json_schema", "json_schema": schema}
    gateway = speaking("harmony", THOUGHT + '<|channel|>final<|message|>{"a": 1}', 5)
    (choice,) = post(gateway, response_format=wanted).json()["choices"]
    assert choice["message"]["content"] == '{"a": 1}'
    (submit,) = gateway.link.submits
    assert '"final' in submit.grammar.lark and "to=functions" not in submit.grammar.lark


def test_streamed_reasoning_is_an_event_of_its_own():
    chunks = streamed(speaking("harmony", THOUGHT + CALL, 1000), tools=[ADD])
    found = list(events(iter(chunks)))
    assert found[0] == Reasoning("Add <them>.")
    assert [type(one) for one in found[1:]] == [CallStart, CallArgs, CallEnd, Finish]
    plain = list(events(iter(streamed(speaking("harmony", FINAL, 1000)))))
    assert plain == [Text("It is 3."), Finish("stop")]


@pytest.mark.parametrize("group", [1, 3, 1000])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47", "minimax_m2", "pythonic"])
def test_arguments_that_we_write_are_streamed_as_one_json_text(name, group):
    text = 'a "b" \\ <c>\n</d> é🌊'
    note = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "number"}}}
    tools = [{"type": "function", "function": {"name": "note", "parameters": note}}]
    wanted = {"text": text, "n": 1.5}
    said = "Hm.\n" + load(name).write([("note", json.dumps(wanted))])
    (choice,) = post(speaking(name, said, group), tools=tools).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == wanted
    assert choice["message"]["content"] == "Hm.\n"
    pieces = [
        part["function"]["arguments"]
        for chunk in streamed(speaking(name, said, group), tools=tools)
        for one in chunk["choices"] for part in one["delta"].get("tool_calls", [])
    ]  # fmt: skip
    assert "".join(pieces) == call["function"]["arguments"]
    assert group > 1 or len(pieces) > 20
