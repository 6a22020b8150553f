"""Histories as clients send them, good and broken, with every family's template.  No engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.messages import Hello
from gateway.banner import lines
from gateway.config import GatewayConfig
from gateway.errors import BadRequest
from gateway.prompt import Prompts
from gateway.protocol import Function, Message, ToolCall
from gateway.state import Gateway
from gateway.tools import FORMATS, load
from tests.asking import ADD, EOS, USER, post, saying, tokenizer
from tests.families import FAMILIES, open_prompts
from tests.prompting import CHATML, TOOLS, chat, prompts, user

ID = "abcdefgh1"  # Mistral's templates want nine letters and digits
OWN = [name for name in FORMATS if name in FAMILIES]


def called(arguments: str, id: str = ID) -> dict:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None,
            "tool_calls": [{"id": id, "type": "function", "function": function}]}  # fmt: skip


def result(content: object, id: str = ID) -> dict:
    return {"role": "tool", "tool_call_id": id, "content": content}


def gateway_of(name: str) -> Gateway:
    made, _ = open_prompts(FAMILIES[name])
    return Gateway.open(GatewayConfig(), saying("ok"), made, "tiny")


def shown(made: Prompts, ids: list[int]) -> str:
    """A prompt's text, control tokens too."""
    return b"".join(made.vocabulary.spelled(id) for id in ids).decode()


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1', "{}{}", '{"a": 1}{"b": 2}', "[1]", "null", "add", '{"a": NaN}', '{"a": "\\ud800"}',
     '{"a": 01}', "{'a': 1}", '{"a": 1,}', '{"a" 1}', "[" * 9999, '{"a": ' * 999 + "1" + "}" * 999],
)  # fmt: skip
@pytest.mark.parametrize("name", OWN)
def test_broken_arguments_are_refused_by_the_index_of_their_message(name, arguments):
    answer = post(gateway_of(name), messages=[USER, called(arguments), result("3")], tools=[ADD])
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    assert f"`{error['param']}` is not one JSON object" in error["message"]


@pytest.mark.parametrize(
    "arguments",
    ["", "{}", ' {"a": 1} ', '{"a": 99999999999999999999999999}', '{"a": 1e400}', '{"a": -0}',
     '{"a": 1, "a": 2}', '{"a": {"b": [1, {"c": [[]]}]}}', '{"": 1}', '{"a": "\\ud83d\\ude00"}'],
)  # fmt: skip
@pytest.mark.parametrize("name", FAMILIES)
def test_odd_arguments_that_are_one_object_are_served(name, arguments):
    messages = [USER, called(arguments), result("3")]
    assert post(gateway_of(name), messages=messages, tools=[ADD]).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, result("3")], "messages[1].tool_call_id"),
        ([USER, called("{}"), result("3", "abcdefgh2")], "messages[2].tool_call_id"),
        ([USER, called("{}"), {"role": "tool", "content": "3"}], "messages[2].tool_call_id"),
        ([USER, result("3"), called("{}")], "messages[1].tool_call_id"),
        ([USER, called("{}"), result([{"type": "image_url"}])], "messages[2].content[0].type"),
        ([USER, called("{}"), result(None)], "messages[2].content"),
        ([USER, {**called("{}"), "reasoning_content": 5}], "messages[1].reasoning_content"),
        ([USER, {**called("{}"), "reasoning": {}}], "messages[1].reasoning"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "mistral", "harmony", "kimi"])
def test_a_broken_history_is_refused_by_the_index_of_its_message(name, messages, param):
    answer = post(gateway_of(name), messages=messages, tools=[ADD])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    if "content[" not in param:  # its message tells what parts there may be
        assert f"`{param.partition('.')[0]}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", FAMILIES)
def test_content_as_a_list_of_parts_is_the_same_prompt_as_text(name):
    made, _ = open_prompts(FAMILIES[name])
    gateway = Gateway.open(GatewayConfig(), link := saying("ok"), made, "tiny")

    def history(split: bool) -> list[dict]:
        def content(text: str) -> object:
            parts = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]
            return parts if split else text

        said = {"role": "assistant", "content": content("It is nine.")}
        first = {"role": "user", "content": content("How much?")}
        return [first, called('{"a": 1}'), result(content("three")), said, first]

    for split in (False, True):
        assert post(gateway, messages=history(split), tools=[ADD]).status_code == 200
    assert link.submits[0].prompt == link.submits[1].prompt
    assert "three" in shown(made, link.submits[0].prompt)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].several])
def test_where_a_template_shows_one_call_no_answer_has_two(name):
    gateway = gateway_of(name)
    link = gateway.link
    assert "parallel calls are off" in gateway.prompts.note
    for wish in ({}, {"parallel_tool_calls": True}, {"parallel_tool_calls": False}):
        answer = post(gateway, tools=[ADD], **wish)
        said = answer.headers.get("x-slipstream-parallel")
        asked_off = wish.get("parallel_tool_calls") is False
        assert said == (None if asked_off else "off; reason=chat-template")
    assert len({submit.grammar.lark for submit in link.submits}) == 1
    assert "x-slipstream-parallel" not in post(gateway).headers
    two = called("{}")
    two["tool_calls"] *= 2
    answer = post(gateway, messages=[USER, called("{}"), two], tools=[ADD])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[2].tool_calls"
    assert "`messages[2]` has 2 calls" in answer.json()["error"]["message"]


def test_where_a_template_shows_several_calls_the_caller_decides():
    gateway = gateway_of("hermes")
    link = gateway.link
    assert "x-slipstream-parallel" not in post(gateway, tools=[ADD]).headers
    post(gateway, tools=[ADD], parallel_tool_calls=False)
    assert link.submits[0].grammar != link.submits[1].grammar


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_in_history_never_makes_a_request_fail(name):
    made, _ = open_prompts(FAMILIES[name])
    gateway = Gateway.open(GatewayConfig(), link := saying("ok"), made, "tiny")
    thought = {"reasoning_content": "Deep thoughts."}
    spoken = {**called('{"a": 1}'), **thought, "content": "A word."}  # harmony's refuses both
    messages = [USER, {"role": "assistant", "content": "Hm.", **thought}, USER, spoken, result("3")]
    assert post(gateway, messages=messages, tools=[ADD]).status_code == 200
    if name != "llama3":
        assert "A word." in shown(made, link.submits[0].prompt)


def test_reasoning_is_no_field_of_other_roles():
    made, _ = open_prompts(FAMILIES["qwen3"])
    plain = [user("x"), Message("assistant", "a", reasoning="w"), user("y")]
    odd = [*plain[:2], Message("user", "y", reasoning_content="hidden words")]
    assert chat(made, odd).ids == chat(made, plain).ids


# --- templates that cannot take tools ---------------------------------------------------------

TAKES_NONE = {
    "never": CHATML,
    "only in a comment": "{# no tools here #}" + CHATML,
    "only asks": "{% if tools %}You have tools.{% endif %}" + CHATML,
    "only counts": "{{ tools | length if tools else '' }}" + CHATML,
}


@pytest.mark.parametrize("name", TAKES_NONE)
def test_a_template_that_shows_no_tools_is_replaced_by_the_layouts_and_the_server_says_so(name):
    made = prompts(template=TAKES_NONE[name])
    assert made.note == (
        "the model's chat template takes no tools: requests with tools use the layout of hermes"
    )
    call = ToolCall(id="c", function=Function("add", '{"a": 1}'))
    history = [user("x"), Message("assistant", None, tool_calls=[call]),
               Message("tool", "three", tool_call_id="c")]  # fmt: skip
    text = shown(made, chat(made, history, TOOLS).ids)
    assert '"name": "add"' in text and '"arguments": {"a": 1}' in text and "three" in text
    plain = shown(made, chat(made, [user("x")]).ids)
    assert "<tools>" not in plain and plain.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ tools }}" + CHATML, "which leaves out calls in history"),
        ("{{ tools }}{% for m in messages %}{{ m.role }}{{ m.tool_calls }}"
         "{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}", "tools' results"),
        ("{{ tools }}{% for m in messages %}{{ m.role }}{{ m.tool_calls[:1] if m.tool_calls }}"
         "{{ m.content }}{% endfor %}", "one call a message: parallel calls are off"),
    ],
)  # fmt: skip
def test_a_server_says_what_a_template_leaves_out(template, said):
    made = prompts(template=template)
    assert made.note.startswith("tools are shown by the model's own chat template")
    assert said in made.note


def test_every_layouts_own_template_shows_all_of_a_history():
    for name in FORMATS:
        made = Prompts(tokenizer(), None, max_len=4096, format=load(name), stop_ids=[EOS])
        assert not made.one_call
        assert made.note.endswith(f"use the layout of {name}")


def test_the_banner_tells_which_template_shows_tools():
    hello = Hello(1, "tiny", 259, 4096, 64, 1024, [EOS], "cpu")
    model, engine = SimpleNamespace(architecture="Llama"), SimpleNamespace(dtype="float32")
    for made in (prompts(), prompts(template="{{ tools }}" + CHATML)):
        gateway = Gateway.open(GatewayConfig(), saying("x"), made, "tiny")
        told = lines("up", hello, model, engine, ("127.0.0.1", 8000), gateway)
        assert f"tools  {made.note}" in told


def test_a_refusal_of_the_template_still_refuses_without_reasoning():
    made = prompts(template="{{ raise_exception('Never.') }}")
    with pytest.raises(BadRequest, match="Never"):
        chat(made, [user("x"), Message("assistant", "y", reasoning_content="z")])
