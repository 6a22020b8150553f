"""Known bugs of other servers, asked for on our wire: how a call arrives.  Engines are scripted or
wish (tests/cases.py); grammar and drafts are in test_cases_engine.py.

    1   the last brace, when several closing tokens come at once  test_case_01_...
    2   a whole call in one step                                  test_case_02_...
    3   a call that max_tokens would cut                          test_case_03_...
    4   `required` without a call                                 test_case_04_...
    5   a tool without parameters                                 test_case_05_...
    6   an unknown name among known ones                          test_case_06_...
    7   two calls to one tool                                     test_case_07_...
    8   indices, and two objects in the history                   test_case_08_...
    9   a draft that the grammar cannot take                      test_cases_engine.py
    10  a stop id in a rejected draft                             test_cases_engine.py
    11  `$defs` of one name in two tools                          test_cases_engine.py
    12  a schema for the answer beside tools                      test_cases_engine.py
    13  letters of several bytes                                  test_case_13_...
    14  endless blanks                                            test_cases_engine.py
    15  a lone `<` in a thought                                   test_case_15_...
    a   a schema that breaks at its first mask                    test_cases_engine.py
    b   a matcher whose error stays                               test_cases_engine.py
    c   logits beyond the vocabulary                              test_cases_engine.py
    d   the first chunk of several choices                        test_case_d_...
    C-1 arguments of tokens in groups                             test_case_c1_...
    C-3 a stream that fails in the middle                         here and in test_cases_engine.py
"""

from __future__ import annotations

import json
import logging
import random
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from gateway.prompt import Prompts
from gateway.tools import load
from tests.asking import ADD, USER, open_gateway, post, saying, with_client
from tests.auditor import Auditor, Heard
from tests.cases import BOOK, CASES, MORE, NOTE, SAO, SEAT, Case, call, pair, written
from tests.scripted import EOS, Script, ScriptedLink, byte_tokenizer_json
from tests.sdk import chunks

Call = tuple[str, str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def heard(name: str, folders) -> tuple[Heard, dict[str, Any]]:
    """A case's stream as an audited client hears it, equal to its body, which comes beside it."""
    plain, stream = pair(CASES[name], folders)
    told = Auditor(include_usage=True).hear(stream.content)
    (choice,) = plain.json()["choices"]
    message = choice["message"]
    assert told.choices[0].content == message["content"]
    assert told.choices[0].finish == choice["finish_reason"]
    assert calls(told.choices[0]) == [
        (one["function"]["name"], one["function"]["arguments"])
        for one in message.get("tool_calls", [])
    ]
    assert told.usage == plain.json()["usage"]
    return told.choices[0], plain.json()


def calls(said: Heard) -> list[Call]:
    return [(one["name"], one["arguments"]) for one in said.calls]


def pieces(name: str, folders) -> list[str]:
    """The pieces in which arguments were sent, call after call."""
    _, stream = pair(CASES[name], folders)
    return [
        part.function.arguments
        for chunk in chunks(stream.content) for one in chunk.choices
        for part in one.delta.tool_calls or () if part.function.arguments
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["step", "run"])
def test_case_01_the_last_brace_is_there_when_two_come_at_once(how, folders):
    said, _ = heard(f"01 two braces in one {how}", folders)
    assert calls(said) == [("book", '{"seat": 42}')]
    assert said.finish == "tool_calls"


@pytest.mark.parametrize("how", ["step", "run"])
def test_case_02_a_call_that_comes_whole_is_the_one_that_comes_token_by_token(how, folders):
    said, body = heard(f"02 a whole call in one {how}", folders)
    assert pieces(f"02 a whole call in one {how}", folders) == ['{"seat": 42}']
    slow = post(saying("Look:\n" + SEAT, 1), tools=[BOOK])
    (choice,) = slow.json()["choices"]
    (one,) = choice["message"]["tool_calls"]
    assert calls(said) == [(one["function"]["name"], one["function"]["arguments"])]
    assert said.content == choice["message"]["content"] == "Look:\n"
    assert body["usage"]["completion_tokens"] == slow.json()["usage"]["completion_tokens"]


def test_case_03_a_call_that_max_tokens_would_cut_is_closed_or_not_opened_or_told_as_cut(folders):
    short, _ = heard("03 too short for a call", folders)
    assert (short.content, short.calls, short.finish) == ("", [], "length")
    closed, _ = heard("03 closed by the plan", folders)
    ((name, arguments),) = calls(closed)
    jsonschema.validate(json.loads(arguments), NOTE["function"]["parameters"])
    assert (name, closed.finish) == ("write_note", "length")
    cut, _ = heard("03 cut", folders)
    ((_, rest),) = calls(cut)
    assert cut.finish == "length" and rest.startswith('{"text": "dear')
    with pytest.raises(json.JSONDecodeError):
        json.loads(rest)


def test_case_04_a_model_that_wants_no_call_makes_one_where_it_must(folders):
    said, _ = heard("04 no call wanted", folders)
    assert calls(said) == [("lamp_on", "{}")] and said.content is None
    assert said.finish == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("text", ["", "Words.", written(call("add", a=1))[:-1], "<tool_call>"])
def test_case_04_an_end_without_the_call_that_must_be_is_an_error_and_no_finish(text, choice):
    fields = {"tools": [ADD], "tool_choice": choice}
    answer = post(saying(text), **fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "no_call")
    told = Auditor(True).hear(post(saying(text), **fields, **MORE).content)
    assert told.error["code"] == "no_call"
    assert not any(choice.finish for choice in told.choices.values())


def test_case_05_a_tool_without_parameters_gets_an_empty_object_once(folders):
    said, _ = heard("05 no parameters", folders)
    assert calls(said) == [("lamp_on", "{}")]
    assert pieces("05 no parameters, in one run", folders) == ["{}"]


@pytest.mark.parametrize("how", ["", ", in one step"])
def test_case_06_the_neighbours_of_an_unknown_name_arrive_with_dense_indices(how, folders, caplog):
    said, _ = heard(f"06 an unknown name{how}", folders)
    assert calls(said) == [("add", '{"a": 1}'), ("add", '{"a": 2}')]
    assert said.finish == "tool_calls" and said.content is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2  # asked twice
    assert "nope" not in caplog.text


def test_case_06_the_grammar_lets_no_model_write_an_unknown_name(folders):
    said, _ = heard("06 an unknown name, constrained", folders)
    assert {name for name, _ in calls(said)} == {"add"}
    for _, arguments in calls(said):
        jsonschema.validate(json.loads(arguments), ADD["function"]["parameters"])


def test_case_07_two_calls_to_one_tool_are_two(folders):
    said, body = heard("07 one tool twice", folders)
    assert calls(said) == [("tide", '{"port": "Oban"}'), ("tide", '{"port": "Skye"}')]
    ids = [one["id"] for one in body["choices"][0]["message"]["tool_calls"]]
    assert len({*ids, *(one["id"] for one in said.calls)}) == 4


def test_case_08_indices_are_dense_when_calls_come_in_one_step(folders):
    said, _ = heard("08 one tool twice, in one run", folders)  # the auditor counts them
    assert len(said.calls) == 2


@pytest.mark.parametrize(
    "arguments", ['{"port": "Oban"}{"port": "Skye"}', '{"port": "Oban"', "[]", "1", '{"a":NaN}']
)
def test_case_08_arguments_that_are_not_one_object_are_refused_by_their_message(arguments):
    broken = {"id": "c", "type": "function", "function": {"name": "tide", "arguments": arguments}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [broken]}]
    answer = post(saying("x"), messages=history)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    assert "not one JSON object" in error["message"]


@pytest.mark.parametrize("name", ["13 letters of several bytes", "13 in three pieces"])
def test_case_13_letters_of_several_bytes_are_sent_as_they_are_and_once(name, folders):
    said, _ = heard(name, folders)
    assert calls(said) == [("weather", '{"city": "São Tomé"}')]
    assert "".join(pieces(name, folders)) in SAO


@pytest.mark.parametrize("name, thought, content", [
    ("15 a lone bracket in a thought", "a <b> </thin k>", "So <tool."),
    ("15 between control tokens", "a <b>", None),
    ("15 in a channel", "a <b>|", "It is 3."),
])  # fmt: skip
def test_case_15_a_lone_bracket_in_a_thought_is_held_back_and_sent_as_it_is(
    name, thought, content, folders
):
    plain, stream = pair(CASES[name], folders)
    message = plain.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, content)
    told = Auditor(include_usage=True).hear(stream.content).choices[0]
    assert (told.thoughts, told.content) == (thought, content)
    assert told.frames > 5  # it came as it was said


def test_case_d_the_first_chunk_is_of_choice_0_whoever_began(folders):
    plain, stream = pair(CASES["d a later choice begins"], folders)
    first = next(chunks(stream.content))
    assert first.choices[0].index == 0
    told = Auditor(include_usage=True).hear(stream.content).choices
    assert [told[index].content for index in range(3)] == ["a", "b", "c"]
    assert [one["message"]["content"] for one in plain.json()["choices"]] == ["a", "b", "c"]


LAYOUTS = ["hermes", "kimi", "qwen3_coder", "glm45", "pythonic", "harmony", "llama3"]
LEADS = {"harmony": "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant", "llama3": ""}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_c1_arguments_are_whole_however_the_tokens_are_cut(layout):
    """Every cut into two deltas, and random groups, streamed: what the whole text says."""
    text = load(layout).write([call("add", a=12), call("weather", city="São")])
    ids = [*(LEADS.get(layout, "Hm. ") + text).encode(), EOS]
    chance = random.Random(layout)
    groups = [[ids[:cut], ids[cut:]] for cut in range(1, len(ids))]
    for _ in range(30):
        cuts = sorted({0, len(ids), *(chance.randrange(len(ids)) for _ in range(len(ids) // 3))})
        groups.append([ids[a:b] for a, b in pairwise(cuts)])
    turn = iter([[ids], *groups])
    gateway = open_gateway(ScriptedLink(lambda _: Script(next(turn))))
    gateway.prompts = Prompts(
        byte_tokenizer_json(), None, max_len=4096, format=load(layout), stop_ids=[EOS]
    )
    weather = CASES["13 in three pieces"].fields["tools"]
    body = {"model": "tiny", "messages": [USER], "tools": [ADD, *weather]}

    async def use(client) -> None:
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        message = whole["choices"][0]["message"]
        functions = [one["function"] for one in message["tool_calls"]]
        wanted = [(one["name"], json.loads(one["arguments"])) for one in functions]
        assert wanted == [("add", {"a": 12}), ("weather", {"city": "São"})]
        for group in groups:
            stream = await client.post("/v1/chat/completions", json={**body, **MORE})
            (told,) = Auditor(True).hear(stream.content).choices.values()
            assert calls(told) == [(one["name"], one["arguments"]) for one in functions], group
            assert (told.content, told.thoughts) == (
                message["content"], message.get("reasoning_content", "")
            )  # fmt: skip
            assert told.finish == "tool_calls"

    with_client(gateway, use)


@pytest.mark.parametrize("at", [1, 7, 20])
def test_case_c3_a_fault_in_the_middle_of_a_call_is_one_error_one_done_and_one_line(
    at, monkeypatch, caplog
):
    """Raised where tokens become events, at the `at`-th step of a stream."""
    from gateway.choices import Choice

    take, steps = Choice.take, iter(range(1, 99))

    def fail(self, out):
        if next(steps) == at:
            raise RuntimeError("secret")
        return take(self, out)

    monkeypatch.setattr(Choice, "take", fail)
    case = Case({"tools": [ADD]}, lambda _: Script.say(written(call("add", a=5)), 2))
    (stream,) = case.answers(None, MORE)
    told = Auditor(True).hear(stream.content)
    assert told.error["code"] == "internal" and "secret" not in stream.text
    assert not any(choice.finish for choice in told.choices.values())
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert stream.headers["x-request-id"] in line.getMessage()
