"""Outputs that end, or change their rules, amid accepted drafts: what the wire says of them.

Known bugs 13, 25, 26 and 27 of tests/speculative/test_known_bugs.py.  The engine is the product's
own over a model that only wishes (tests/wishing.py), so that each end is put at each place of a
draft; what is said is held against the same request without drafts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.loop import Engine
from gateway.tools.thinking import CLOSE, OPEN
from tests.auditor import Auditor
from tests.cases import AGE, CALLED, MORE, Case, call, wished, written
from tests.scripted import EOS
from tests.wishing import Drafts, Pieces, Room, right, wanting

K = 5  # draft tokens a step


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


class Drafted:
    """The drafts that an engine verified: each one's tokens, how many stood, and behind what."""

    def __init__(self) -> None:
        self.rows: list[tuple[tuple[int, ...], int]] = []
        self.begins: list[int] = []  # output tokens before each

    def place_of(self, token: int) -> set[int]:
        """Where in drafts the output token of this number stood; one behind a draft counts, too."""
        return {
            token - begin for (_, stood), begin in zip(self.rows, self.begins, strict=True)
            if begin <= token <= begin + stood
        }  # fmt: skip

    def __call__(self, engine: Engine) -> None:
        booked = engine.guessing.booked

        def book(row, accepted) -> None:
            self.rows.append((row.draft, accepted.matched))
            self.begins.append(row.position - row.seq.prompt_len)
            booked(row, accepted)

        engine.guessing.booked = book


def told(case: Case, folders, **more: Any) -> dict[str, Any]:
    """What the request is answered, the same in one body and streamed."""

    async def use(room: Room):
        plain = await room.ask(**case.fields, **more)
        stream = await room.ask(**case.fields, **more, **MORE)
        return plain, stream

    plain, stream = case.within(folders, use)
    assert plain.status_code == 200, plain.text
    body = plain.json()
    heard = Auditor(include_usage=True).hear(stream.content)
    for choice in body["choices"]:
        one, said = heard.choices[choice["index"]], choice["message"]
        calls = [entry["function"] for entry in said.pop("tool_calls", [])]
        assert (one.content, one.finish) == (said["content"], choice["finish_reason"])
        assert one.thoughts == said.get("reasoning_content", "")
        assert [(c["name"], c["arguments"]) for c in one.calls] == [
            (c["name"], c["arguments"]) for c in calls
        ]
        said["calls"] = calls
        assert one.logprobs == (choice["logprobs"] or {"content": []})["content"]
        for entry in one.logprobs:  # of rows computed beside others: not to the last bit
            for part in (entry, *entry["top_logprobs"]):
                part["logprob"] = round(part["logprob"], 6)
        choice["logprobs"] = one.logprobs
    assert heard.usage == body["usage"]
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] <= body["usage"]["completion_tokens"]
    return {"choices": body["choices"], "usage": body["usage"]}


def drafting(case: Case, drafts: Any, seen: Drafted) -> Case:
    settings = {"max_drafts": K, "max_batch_tokens": 64}
    return replace(case, drafts=drafts, prepare=seen, settings=settings)


def same(case: Case, folders, drafts: Any, **more: Any) -> tuple[dict[str, Any], Drafted]:
    """What is said with drafts, which is what is said without; and the drafts."""
    seen = Drafted()
    plain = told(case, folders, **more)
    assert told(drafting(case, drafts, seen), folders, **more) == plain
    return plain, seen


# ---- 13: the rules change where the reasoning ends ----------------------------------------------

SEVEN = written(call("add", a=7))
RULES: dict[str, tuple[Mapping[str, Any], str, str]] = {
    # request, what the model would say behind its thought, what the grammar makes it say
    "required": (CALLED, "No, I will not.", SEVEN),
    "auto": ({}, written(("add", '{"a": "no"}')), SEVEN),
    "answer": ({"response_format": AGE, "tools": []}, "Forty-two.", '{"years": 42}'),
}


@pytest.mark.parametrize("marks", ["control", "text"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafted", ["right", "wrong"])
def test_the_rules_behind_a_thought_hold_wherever_in_a_draft_it_ends(
    folders, marks, rule, drafted
):
    """The draft goes on behind the end of the thought: legally, or as the model would like to."""
    fields, wish, enforced = RULES[rule]
    behind, places = set(), set()
    for length in range(K + 2):
        thought = f"{OPEN}{'abcdefgh'[:length]}{CLOSE}"
        want = wanting(thought + wish, thought + enforced)
        guess = {"right": wanting(thought + enforced), "wrong": want}[drafted]
        case = replace(
            wished("", fields={"temperature": 0, **fields}, thinks=marks), want=want
        )
        answer, seen = same(case, folders, lambda pieces, guess=guess: right(pieces, guess))
        (choice,) = answer["choices"]
        assert choice["message"].get("reasoning_content", "") == "abcdefgh"[:length]
        if rule == "answer":
            assert json.loads(choice["message"]["content"]) == {"years": 42}
        else:
            assert choice["message"]["calls"] == [{"name": "add", "arguments": '{"a": 7}'}]
        last = 260 if marks == "control" else ord(">")
        for draft, _ in seen.rows:
            if last in draft:
                places.add(draft.index(last))
                behind.add(len(draft) - draft.index(last) - 1)
    assert places >= set(range(K)) and (max(behind) > 0 or drafted == "wrong")


# ---- 25, 26: ends ------------------------------------------------------------------------------

TEXT = "abcdefghijklmnopqrstuvwxyz"


def past_the_end(text: str):
    """Drafts that know the text, and go on behind its end: the end again, and more text."""

    def made(pieces: Pieces) -> Drafts:
        whole = [*text.encode(), EOS, EOS, *b"more", EOS]
        return Drafts(pieces, lambda said: whole[len(said) :])

    return made


@pytest.mark.parametrize("length", range(K + 3))
@pytest.mark.parametrize("overflow", ["close", "cut"])  # with a plan, and without one
def test_a_grammar_that_is_complete_ends_the_answer_wherever_in_a_draft(folders, length, overflow):
    value = 10 ** length if length else 0
    schema = {"type": "object", "properties": {"n": {"enum": [value]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    fields = {"tools": [], "temperature": 0, "tool_overflow": overflow, "response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}}
    text = f'{{"n": {value}}}'
    answer, seen = same(wished(text, fields=fields), folders, past_the_end(text))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(text)
    assert sum(stood for _, stood in seen.rows) > 5


ENDS: dict[str, Mapping[str, Any]] = {
    "end of text": {},
    "stop string": {"stop": ["k"]},
    "stop string of two": {"stop": ["jk", "zz"]},
    "a stop string inside another": {"stop": ["ijkl", "jk"]},
    "a stop string that only begins": {"stop": ["kx", "k"]},
    "max_tokens": {"max_tokens": 10},
    "max_tokens at the stop": {"max_tokens": 11, "stop": ["k"]},
    "max_tokens before the stop": {"max_tokens": 10, "stop": ["k"]},
    "ignored": {"ignore_eos": True, "max_tokens": 40},
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("scores", [False, True])
def test_an_end_of_any_kind_wherever_in_a_draft_is_the_end(folders, end, scores):
    """Nothing behind it is said, scored or counted."""
    fields = {"tools": [], "temperature": 0, "max_tokens": 60, **ENDS[end]}
    if scores:
        fields |= {"logprobs": True, "top_logprobs": 2}
    places = set()
    for begin in range(K + 1):  # the end comes so many tokens later, at another place of a draft
        text = TEXT[:11] + TEXT[11 : 11 + begin] if end == "end of text" else TEXT
        text = "0" * (begin if end != "end of text" else 0) + text
        more = {"max_tokens": fields["max_tokens"] + begin}
        case = wished(text, fields={**fields, **more})
        answer, seen = same(case, folders, past_the_end(text))
        (choice,) = answer["choices"]
        content = choice["message"]["content"]
        wanted = {"end of text": text, "ignored": text}.get(end, "0" * begin + TEXT[:10])
        if end in ("stop string of two", "a stop string inside another"):
            wanted = wanted[:-1]
        assert content.startswith(wanted) if end == "ignored" else content == wanted
        how = "length" if end in ("max_tokens", "max_tokens before the stop", "ignored") else "stop"
        assert choice["finish_reason"] == how
        places |= seen.place_of(answer["usage"]["completion_tokens"] - 1)
        assert sum(stood for _, stood in seen.rows) > 5
        if scores:
            assert 0 < len(choice["logprobs"]) <= answer["usage"]["completion_tokens"]
    # A draft is never longer than what max_tokens leaves behind the row's own token.
    assert end == "ignored" or len(places) >= (4 if "max_tokens" in end else K + 1), places
