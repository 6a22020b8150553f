"""usage tells how many of an answer's tokens were reasoning, however they come.  Runs no model."""

from __future__ import annotations

import random

import pytest

from engine.messages import Out
from gateway.choices import Choice
from gateway.config import GatewayConfig
from gateway.ordinary import Ordinary
from gateway.prompt import Prompts
from gateway.state import Gateway
from gateway.text import Vocabulary
from gateway.tools import load, pick
from gateway.tools.thinking import OPEN
from tests.asking import ADD, post
from tests.auditor import Auditor
from tests.cases import FENCE, HARMONY, MORE, THINKING, call, sections, vocabulary, written
from tests.scripted import EOS, Script, ScriptedLink, byte_tokenizer_json

ONE = written(call("add", a=1))
HEAD = "<|channel|>analysis<|message|>"
FINAL = "final<|message|>It is 3."
AGAIN = "<|end|><|start|>assistant"


def asked(text: str, kind: str, group: int, ends: bool = True, **fields: object) -> list[dict]:
    """The usage of an answer of `group` tokens a step: in one body, and streamed."""
    json = vocabulary() if kind == "control" else byte_tokenizer_json()
    template = {"harmony": None, "opened": THINKING + OPEN}.get(kind, THINKING)
    layout = load("harmony") if kind == "harmony" else pick(template, "hermes")
    ids = [id for part in sections(text)[:-1] for id in part]
    if kind != "control":
        ids = list(text.encode())
    ids += [EOS] * ends

    def script(_: object) -> Script:
        groups = [ids[at : at + group] for at in range(0, len(ids), group)]
        return Script(groups, "stop" if ends else "length", ends)

    found = []
    for more in ({}, MORE):
        prompts = Prompts(json, template, max_len=4096, format=layout, stop_ids=[EOS])
        gateway = Gateway.open(GatewayConfig(), ScriptedLink(script), prompts, "tiny")
        answer = post(gateway, **fields, **more)
        assert answer.status_code == 200, answer.text
        if more:
            found.append(Auditor(include_usage=True).hear(answer.content).usage)
        else:
            found.append(answer.json()["usage"])
    return found


CASES = [
    # text, kind, fields, reasoning tokens
    ("<think>Think.</think>\n\nYes.", "text", {}, 7 + 6),
    ("<think>Think.</think>\n\nYes.", "control", {}, 1 + 6),
    ("Think.</think>\n\nYes.", "opened", {}, 6),
    ("<think>a <b> </thin k></think>" + ONE, "text", {"tools": [ADD]}, 7 + 15),
    (FENCE, "control", {"tools": [ADD]}, 1 + 5),
    ("<think></think>Yes.", "text", {}, 0),
    ("Yes <think>no.", "text", {}, 0),
    ("<thin", "text", {}, 0),
    ("", "text", {}, 0),
    ("<think>é</think>Yes.", "text", {}, 7 + 2),
    ("<think>Think.</think>\n\nOne two.", "text", {"stop": "two"}, 7 + 6),
    ("<think>Think.</think>\n\nYes.", "text", {"n": 3}, 3 * (7 + 6)),
    (HARMONY + FINAL, "harmony", {}, len(HEAD) + 6),
    (HARMONY + FINAL + AGAIN + HARMONY + FINAL, "harmony", {},
     2 * (len(HEAD) + 6) + len(AGAIN)),
    (f"{HEAD}Hm{AGAIN}" + load("harmony").write([call("add", a=1)]), "harmony",
     {"tools": [ADD]}, len(HEAD) + 2),
    ("Bare words.", "harmony", {}, 0),
]  # fmt: skip


@pytest.mark.parametrize("text, kind, fields, wanted", CASES)
def test_reasoning_tokens_are_counted_the_same_in_any_groups_streamed_and_not(
    text, kind, fields, wanted
):
    for group in (1, 2, 3, 7, 1000):
        plain, streamed = asked(text, kind, group, **fields)
        assert plain == streamed
        details = plain["completion_tokens_details"]
        assert details["reasoning_tokens"] == wanted <= plain["completion_tokens"], group


@pytest.mark.parametrize("group", [1, 4, 1000])
def test_an_answer_that_is_cut_in_its_thought_is_all_reasoning(group):
    for text in ("<think>cut </th", f"<think>cut {ONE}"):
        (plain, streamed) = asked(text, "text", group, ends=False, tools=[ADD])
        assert plain == streamed
        assert plain["completion_tokens_details"]["reasoning_tokens"] == len(text)
        assert plain["completion_tokens"] == len(text)


class Socket:
    def room(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        assert data


@pytest.mark.parametrize("seed", range(20))
def test_the_short_way_of_a_stream_counts_as_the_long_way_does(seed):
    chance = random.Random(seed)
    text = HARMONY + FINAL + AGAIN + HARMONY + "commentary<|message|>Now then."
    ids = list((text + AGAIN + HARMONY + FINAL).encode())
    choices, short = [], []
    for _ in range(2):
        scanner = load("harmony").scanner()
        choices.append(Choice(0, Vocabulary(byte_tokenizer_json()), scanner=scanner, framed=True))
    long, other = choices

    def past(out: Out) -> bool:
        other.take(out)
        short[-1] = 0
        return True

    sink = Ordinary(other, lambda _: (b"<", b">"), Socket(), tick=lambda: None, stop=pytest.fail,
                    otherwise=past)  # fmt: skip
    at = 0
    while at < len(ids):
        end = at + chance.randint(1, 3)
        long.take(Out("r", 0, ids[at:end]))
        short.append(1)
        assert sink(Out("r", 0, ids[at:end]))
        assert other.reasoning == long.reasoning
        at = end
    assert sum(short) > 3 and long.reasoning > 100
