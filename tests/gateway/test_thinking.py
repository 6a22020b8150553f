"""A leading section of reasoning around layouts: grammar, scanner, wire.  Runs no model."""

from __future__ import annotations

import json
import random
from copy import copy
from typing import Any

import pytest

from engine.grammar.matcher import Compiler
from engine.messages import Grammar
from gateway.config import GatewayConfig
from gateway.events import CallStart, Event, Reasoning, Text
from gateway.prompt import Prompts
from gateway.state import Gateway
from gateway.tools import Format, Tool, load, pick
from gateway.tools.thinking import CLOSE, OPEN, Thinking, behind, scanner_of
from tests.asking import ADD, post
from tests.calls import byte_compiler, splits, takes, with_controls
from tests.schemas import record, whole
from tests.scripted import EOS, Script, ScriptedLink, byte_tokenizer_json

TOOL = Tool("add", "", record({"a": whole(0, 9)}), True)
TEMPLATE = "{{ messages[0].content }}{% if tools %}{{ tools }}{% endif %}<tool_call> </think>"
LAYOUTS = ["hermes", "qwen3_coder", "glm45", "llama3", "deepseek31"]


def told(fmt: Format, text: str, inside: bool = False, tools: Any = (TOOL,)) -> list[Any]:
    """[kind, text] of what a scanner makes of the text, the same at every split."""
    found = []
    fresh = scanner_of(fmt, tools, inside=inside)
    for pieces in splits(text, random.Random(1)):
        scanner = copy(fresh)
        events = [e for piece in pieces for e in scanner.push(piece)] + scanner.close()
        found.append(_joined(events))
    assert all(one == found[0] for one in found)
    return found[0]


def _joined(events: list[Event]) -> list[Any]:
    out: list[Any] = []
    for event in events:
        if isinstance(event, CallStart):
            out.append(["call", event.name])
        elif isinstance(event, Text | Reasoning):
            kind = "text" if isinstance(event, Text) else "thought"
            if out and out[-1][0] == kind:
                out[-1][1] += event.text
            else:
                out.append([kind, event.text])
    return out


@pytest.mark.parametrize("before", ["", "\n"])  # as GLM-4.5 writes it
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_leading_section_is_reasoning_and_what_follows_is_the_layouts(
    name: str, before: str
) -> None:
    fmt = Thinking(load(name))
    call = fmt.write([("add", '{"a": 1}')])
    thought = f"{before}{OPEN}\nHm <b> {call} </thin\n{CLOSE}\n\n"
    said = [["thought", f"Hm <b> {call} </thin\n"]]
    assert told(fmt, thought + "Yes.") == [*said, ["text", "Yes."]]
    assert told(fmt, thought + call) == [*said, ["call", "add"]]
    behind_it = thought.removeprefix(before + OPEN)
    assert told(fmt, behind_it + call, inside=True) == [*said, ["call", "add"]]
    assert told(fmt, call) == [["call", "add"]]
    assert told(fmt, f"Say {OPEN} x {CLOSE}") == [["text", f"Say {OPEN} x {CLOSE}"]]
    assert told(fmt, f"{OPEN}cut </th") == [["thought", "cut </th"]]
    assert told(fmt, f"{before}<thin") == [["text", f"{before}<thin"]]
    assert told(fmt, f"\n{before}{before}{OPEN}a")[0][0] == ("text" if before else "thought")
    assert told(fmt, thought + call, tools=()) == [*said, ["text", call]]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("before", ["", "\n"])
def test_the_grammar_begins_behind_the_section(
    name: str, choice: Any, inside: bool, before: str
) -> None:
    fmt = Thinking(load(name))
    grammar = Grammar(fmt.grammar([TOOL], choice, True), "tools", fmt.begin, fmt.opening)
    lark = (behind(grammar) if inside else grammar).lark
    start = "" if inside else before + OPEN
    call, wrong = (fmt.write([("add", f'{{"a": {n}}}')]) for n in (1, 77))

    def fits(text: str) -> bool:
        return takes(byte_compiler(), lark, text)

    assert fits(f"{start}a {wrong} <{CLOSE}{call}")
    assert fits(f"{start}a{CLOSE}\n\n{call}")
    assert not fits(f"{start}a{CLOSE}{wrong}")
    assert fits(f"{start}a {wrong}") == (choice == "auto"), "only a free output ends within it"
    assert fits(f"{start}a{CLOSE}Text.") == (choice == "auto")
    assert fits(call) == (not inside or choice == "auto")  # inside it is reasoning
    assert fits(wrong) == (inside and choice == "auto")
    if choice == "auto" and not inside:
        assert fits("Text.") and fits("<thin")
        assert fits(f"Text {call}") or not load(name).begin


def test_marks_that_are_control_tokens_are_bound() -> None:
    tokenizer_json, ids = with_controls([OPEN, CLOSE])
    fmt = Thinking(load("hermes")).bound(ids)
    seen = {mark: fmt.stand_ins[id] for mark, id in ids.items()}
    call = fmt.write([("add", '{"a": 1}')])
    text = f"{seen[OPEN]}see {CLOSE} {call}{seen[CLOSE]}\n\n"
    said = [["thought", f"see {CLOSE} {call}"], ["call", "add"]]
    assert told(fmt, text + call) == told(fmt, "\n" + text + call) == said
    assert told(fmt, text + f"a{seen[OPEN]}b", tools=()) == [
        ["thought", f"see {CLOSE} {call}"], ["text", "ab"]
    ]  # fmt: skip
    for choice in ("auto", "required"):
        lark = fmt.grammar([TOOL], choice, True)
        compiler = Compiler(tokenizer_json, 261, [EOS])
        inner = [*f"see {CLOSE} {call}".encode()]
        tokens = [ids[OPEN], *inner, ids[CLOSE], *call.encode()]
        for before in ("", "\n"):
            assert takes(compiler, lark, [*before.encode(), *tokens])
            assert not takes(compiler, lark, [*before.encode(), *tokens[:-1]])
        assert takes(compiler, lark, f"{OPEN}a") == (choice == "auto")


def test_pick_wraps_the_layout_of_a_model_whose_template_tells_of_sections() -> None:
    found = pick(TEMPLATE, None)
    assert isinstance(found, Thinking) and found.name == "hermes"
    assert isinstance(pick(TEMPLATE, "llama3"), Thinking)
    assert pick("<tool_call>", None) is load("hermes")
    assert pick(f"<|channel|><|message|>{CLOSE}", None) is load("harmony")


def speaking(text: str, template: str) -> Gateway:
    prompts = Prompts(
        byte_tokenizer_json(), template, max_len=4096, format=pick(template, None), stop_ids=[EOS]
    )
    link = ScriptedLink(lambda _: Script.say(text, 3))
    return Gateway.open(GatewayConfig(), link, prompts, "tiny")


@pytest.mark.parametrize(("opened", "before"), [(False, ""), (False, "\n"), (True, "")])
def test_reasoning_is_told_from_the_content_whoever_opened_the_section(
    opened: bool, before: str
) -> None:
    template = TEMPLATE + (f"{OPEN}\n" if opened else "")
    call = load("hermes").write([("add", '{"a": 1}')])
    said = f"{before}{'' if opened else OPEN}Think.{CLOSE}\n\n"
    for fields, rest, content in (({}, "Yes.", "Yes."), ({"tools": [ADD]}, call, None)):
        gateway = speaking(said + rest, template)
        (choice,) = post(gateway, **fields).json()["choices"]
        assert choice["message"]["reasoning_content"] == "Think."
        assert choice["message"]["content"] == content
        assert len(choice["message"].get("tool_calls", [])) == ("tools" in fields)
        (submit,) = gateway.link.submits
        if fields:
            assert ("start: thought | inner" in submit.grammar.lark) == (not opened)
            assert submit.grammar.trigger == (CLOSE if opened else "<tool_call>")
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL.parameters}}
    gateway = speaking(said + '{"a": 1}', template)
    (choice,) = post(gateway, response_format=wanted).json()["choices"]
    assert json.loads(choice["message"]["content"]) == {"a": 1}
    assert takes(byte_compiler(), gateway.link.submits[0].grammar.lark, said + '{"a": 1}')
