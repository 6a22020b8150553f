"""A turn's prompt continues the ids of the one before, for every family's own chat template.

A scripted engine says ids that no tokenizer would choose; the history comes back as openai-python's
clients send it.  Runs no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import pytest
from openai.types.chat import ChatCompletion

from engine.messages import Hello
from gateway.config import GatewayConfig
from gateway.state import Gateway
from gateway.tools import FORMATS
from tests.asking import post
from tests.families import FAMILIES, Family, open_prompts
from tests.prompting import single_bytes
from tests.scripted import Script, ScriptedLink

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Writes a note.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "number"},
                    "more": {"type": ["array", "boolean", "null"]},
                },
                "required": ["text", "count"],
            },
        },
    }
    for name in ("note", "mark")
]
#: Numbers that Python and JavaScript would write in another way.
CALL = ("note", '{"text": "é \\"x\\"  y 😀", "count": 1.50, "more": true}')
OTHER = ("mark", '{"text": "b", "count": 1e3, "more": [1.0, null, {"a": "\\u00e9"}]}')


class Talk:
    """A conversation with a gateway whose engine says what it is told to."""

    def __init__(self, family: Family) -> None:
        self.family = family
        prompts, self.ids = open_prompts(family)
        self.layout = prompts.format
        stops = [self.ids[stop] for stop in (family.stop, family.final) if stop]
        self.link = ScriptedLink(lambda _: Script([self.said[at : at + 5] for at in range(
            0, len(self.said), 5)]))  # fmt: skip
        vocab = len(prompts.vocabulary)
        self.link.hello = Hello(1, "scripted", vocab, 1 << 16, 64, 1024, stops, "test")
        self.gateway = Gateway.open(GatewayConfig(), self.link, prompts, "tiny")
        self.history: list[dict] = [{"role": "user", "content": "Go."}]
        self.said: list[int] = []

    def tokens(self, text: str) -> list[int]:
        """Markers as tokens of their own, the rest byte by byte; "\ue000" breaks a marker."""
        known = sorted(self.family.markers + self.family.added, key=len, reverse=True)
        cut = re.split(f"({'|'.join(map(re.escape, known))})", text)
        ids: list[int] = []
        for part in filter(None, cut):
            text = part.replace("\ue000", "")
            ids += [self.ids[part]] if part in known else single_bytes(text)
        return ids

    def says(self, text: str, stop: str = "") -> tuple[dict, list[int]]:
        """Ask; the message as a client keeps it, and all ids up to the stop token."""
        self.said = [*self.tokens(text), self.ids[stop or self.family.stop]]
        answer = post(self.gateway, messages=self.history, tools=TOOLS)
        assert answer.status_code == 200, answer.text
        message = ChatCompletion.model_validate(answer.json()).choices[0].message.model_dump()
        return message, [*self.prompt, *self.said]

    @property
    def prompt(self) -> list[int]:
        """The last one's ids."""
        return self.link.submits[-1].prompt

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them."""
        return self.layout.write(calls)

    def answered(self, message: dict) -> None:
        """The message and a result for each of its calls join the history."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {at}"}
            for at, call in enumerate(message["tool_calls"])
        ]
        self.history += [message, *results]


def same(found: Sequence[int], expected: Sequence[int]) -> int:
    """How many ids are the same, from the start on."""
    pairs = zip(found, expected, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))


CLIENTS: dict[str, Callable[[str], str]] = {
    "verbatim": lambda text: text,
    "compact": lambda text: json.dumps(json.loads(text), separators=(",", ":")),
    "sorted": lambda text: json.dumps(json.loads(text), sort_keys=True),
    "indented": lambda text: json.dumps(json.loads(text), indent=2, ensure_ascii=False),
    "JavaScript": lambda text: json.dumps(json.loads(text), separators=(",", ":"),
                                          ensure_ascii=False).replace(".0", ""),
}  # fmt: skip


def spelled_by(client: str, message: dict) -> dict:
    for call in message["tool_calls"] or ():
        call["function"]["arguments"] = CLIENTS[client](call["function"]["arguments"])
    return message


#: What the template prints otherwise by nature: the model did not write it.
BY_NATURE = ("mistral", "harmony")
CONTINUED = [name for name in FAMILIES if name not in BY_NATURE]


def test_every_layout_has_a_family():
    assert set(FORMATS) <= set(FAMILIES)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", CONTINUED)
def test_the_turn_after_a_call_starts_with_the_ids_of_the_call(name, client):
    family = FAMILIES[name]
    talk = Talk(family)
    calls = [CALL, OTHER] if family.several else [CALL]
    opened = family.think.format("x") if family.always else ""
    message, before = talk.says(opened + talk.written(calls))
    assert [call["function"]["name"] for call in message["tool_calls"]] == [n for n, _ in calls]
    talk.answered(spelled_by(client, message))
    message, later = talk.says(opened + "Done.", family.final)
    assert same(talk.prompt, before) == len(before)
    if family.always:
        return  # a new question ends what was thought before it
    talk.history += [message, {"role": "user", "content": "More."}]
    talk.says("Yes.", family.final)
    assert same(talk.prompt, later) == len(later)


@pytest.mark.parametrize("between", ["", "\n", "\n\n", " \n"])
@pytest.mark.parametrize("name", [name for name in CONTINUED if name != "llama3"])
def test_white_space_between_a_text_and_its_calls_may_be_the_models(name, between):
    family = FAMILIES[name]
    talk = Talk(family)
    opened = family.think.format("x") if family.always else ""
    message, before = talk.says(f"{opened}Hm, é.{between}{talk.written([CALL])}")
    assert message["content"].strip() == "Hm, é." and message["tool_calls"]
    talk.answered(message)
    talk.says("Done.")
    assert same(talk.prompt, before) == len(before)


@pytest.mark.parametrize("text", ["Hm.", " Hm.", "Hm.\n", "\n\nHm. \n", "Hm.  x\n\ny"])
@pytest.mark.parametrize("name", [*CONTINUED, "mistral"])
def test_a_text_is_continued_with_the_white_space_that_the_model_gave_it(name, text):
    family = FAMILIES[name]
    talk = Talk(family)
    opened = family.think.format("x") if family.always else ""
    message, before = talk.says(opened + text, family.final)
    assert message["content"].strip() == text.strip()
    talk.history += [message, {"role": "user", "content": "More."}]
    talk.says("Done.")
    held = same(talk.prompt, before)
    if family.always:  # the template shows no reasoning once there is a new question
        assert held < len(before)
    else:
        assert held == len(before)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].kept])
def test_reasoning_is_continued_until_there_is_a_new_question(name):
    family = FAMILIES[name]
    talk = Talk(family)
    asked = 0
    for thought in ("First\nthis é.", "Then that."):
        message, before = talk.says(family.think.format(thought) + talk.written([CALL]))
        asked = asked or len(talk.prompt)
        assert message["reasoning_content"].strip() == thought
        talk.answered(message)
        talk.says(family.think.format("Well.") + "Done.", family.final)
        assert same(talk.prompt, before) == len(before)
    talk.history += [message, {"role": "user", "content": "More."}]
    talk.says(family.think.format("Well.") + "Done.", family.final)
    # The template leaves out what was thought before; until there all is as it was.
    shown = len(talk.tokens("<think>\n"))
    assert asked - shown <= same(talk.prompt, before) < len(before)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].kept])
def test_reasoning_reaches_the_template_under_either_name(name, field):
    talk = Talk(FAMILIES[name])
    message, _ = talk.says(talk.family.think.format("Deep thoughts.") + talk.written([CALL]))
    said = message.pop("reasoning_content")
    talk.answered({**message, field: said})
    talk.says(talk.family.think.format("Well.") + "Done.", talk.family.final)
    table = talk.gateway.prompts.vocabulary.bytes
    assert b"Deep thoughts." in b"".join(table[id] for id in talk.prompt)


def test_mistrals_array_is_continued_up_to_the_id_that_its_template_adds():
    talk = Talk(FAMILIES["mistral"])
    written = talk.written([CALL]).replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
    message, before = talk.says(written)
    talk.answered(message)
    talk.says("Done.")
    behind = talk.tokens("}]</s>")
    assert same(talk.prompt, before) == len(before) - len(behind)


def test_harmonys_call_is_continued_up_to_the_recipient_that_its_template_moves():
    talk = Talk(FAMILIES["harmony"])
    thought = "<|channel|>analysis<|message|>Think é.<|end|><|start|>assistant"
    message, before = talk.says(thought + talk.written([CALL]))
    assert message["reasoning_content"] == "Think é."
    asked = len(talk.prompt)
    talk.answered(message)
    message, _ = talk.says("<|channel|>final<|message|>Done.", "<|return|>")
    assert same(talk.prompt, before) == asked + len(talk.tokens(thought))
    # With a final answer the template leaves out the reasoning before it.
    talk.history += [message, {"role": "user", "content": "More."}]
    talk.says("<|channel|>final<|message|>Done.", "<|return|>")
    assert asked <= same(talk.prompt, before) < asked + len(talk.tokens(thought))


def test_harmonys_answer_is_continued_up_to_its_end():
    talk = Talk(FAMILIES["harmony"])
    message, before = talk.says("<|channel|>final<|message|>Done é.", "<|return|>")
    talk.history += [message, {"role": "user", "content": "More."}]
    talk.says("<|channel|>final<|message|>Done.", "<|return|>")
    assert same(talk.prompt, before) == len(before) - 1  # the template ends it with <|end|>


def test_a_call_that_a_client_changed_is_shown_as_it_is_now():
    talk = Talk(FAMILIES["hermes"])
    message, before = talk.says(talk.written([CALL]))
    message["tool_calls"][0]["function"]["arguments"] = '{"text": "other", "count": 2}'
    talk.answered(message)
    talk.says("Done.")
    table = talk.gateway.prompts.vocabulary.bytes
    shown = b"".join(table[id] for id in talk.prompt)
    assert b'{"text": "other", "count": 2}' in shown and "😀".encode() not in shown
    assert same(talk.prompt, before) < len(before)
