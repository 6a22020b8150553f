"""Known bugs of other servers, asked for on our wire: grammars, drafts, matchers that break.

The numbers and the other half are in test_cases.py.  The engine is the product's own; its model
only wishes (tests/wishing.py), so what it says in spite of its wish the grammar made it say.

    9   a draft that the grammar cannot take             test_case_09_...
    10  a stop id in a rejected draft                    test_case_10_...
    11  `$defs` of one name in two tools                 test_case_11_...
    12  a schema for the answer beside tools             test_case_12_...
    14  endless blanks                                   test_case_14_...
    a   a schema that breaks at its first mask           test_case_a_...
    b   a matcher whose error stays                      test_case_b_...
    c   logits beyond the vocabulary                     test_case_c_...
    C-3 a grammar that refuses token 20 of a call        test_case_c3_...
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from itertools import count

import jsonschema
import numpy as np
import pytest

from engine.grammar.masks import Masks
from engine.grammar.state import State
from engine.loop import Engine
from engine.messages import Grammar
from tests.auditor import Auditor
from tests.calls import byte_compiler
from tests.cases import AGE, BLANKS, CASES, FLAT, MORE, NAMED, SEAT, Case, pair, wished
from tests.schemas import record, tool
from tests.scripted import EOS
from tests.wishing import Room


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def message(name: str, folders) -> dict:
    """What a case's answer says, the same streamed and not."""
    plain, stream = pair(CASES[name], folders)
    (choice,) = plain.json()["choices"]
    found = choice["message"]
    heard = Auditor(include_usage=True).hear(stream.content).choices[0]
    assert (heard.content, heard.finish) == (found["content"], choice["finish_reason"])
    assert [one["arguments"] for one in heard.calls] == [
        one["function"]["arguments"] for one in found.get("tool_calls", [])
    ]
    return {**found, "finish": choice["finish_reason"]}


def functions(said: dict) -> list[tuple[str, object]]:
    return [
        (one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in said["tool_calls"]
    ]


@pytest.mark.parametrize("name", ["a fence", "blank lines"])
def test_case_09_a_draft_is_cut_where_the_grammar_ends_it(name, folders, caplog):
    case = CASES[f"09 {name} behind the thought"]

    async def use(room: Room):
        answer = await room.ask(**case.fields)
        return answer.json(), room.engine.stats()

    with caplog.at_level(logging.INFO, "engine"):
        body, stats = case.within(folders, use)
    assert stats.accepted_tokens == {"a fence": 1, "blank lines": 1}[name]
    assert stats.drafted_tokens == {"a fence": 1, "blank lines": 5}[name]  # four blanks are legal
    assert not [line for line in caplog.records if line.name.startswith("engine")]
    plain = replace(case, drafts=None).answers(folders, {})[0].json()
    body["choices"][0]["message"]["tool_calls"][0].pop("id")
    plain["choices"][0]["message"]["tool_calls"][0].pop("id")
    assert body["choices"] == plain["choices"]
    assert functions(plain["choices"][0]["message"]) == [("add", {"a": 7})]


def test_case_10_a_stop_id_in_a_rejected_draft_leaves_no_trace_in_masks_or_state():
    grammar = Grammar(f"start: %json {json.dumps(record({'years': {'type': 'integer'}}))}", "x")
    state = byte_compiler().compile(grammar).start()
    assert state.accept_all(b'{"years": 4') == 11
    masks = Masks(259, 8)
    before = masks.fill([(0, state, [])], 1).numpy().copy()
    rows = masks.fill([(0, state, [ord("}"), EOS])], 3).numpy()
    assert np.array_equal(rows[:1], before)
    assert rows[1, EOS // 32] >> (EOS % 32) & 1 and not rows[2].any()  # the end may follow, once
    assert state.accept(ord("}")) and state.finished  # accepted, and taken back
    state.rollback(1)
    assert np.array_equal(masks.fill([(0, state, [])], 1).numpy(), before)
    assert not state.accept(EOS)  # it is never fed
    assert np.array_equal(masks.fill([(0, state, [])], 1).numpy(), before)
    assert state.accept_all(b"2}") == 2 and state.finished


def test_case_10_an_answer_is_the_same_when_every_draft_wrongly_ends_it(folders):
    case = CASES["10 a wrong end in every draft"]

    async def use(room: Room):
        return (await room.ask(**case.fields)).json(), room.engine.stats()

    body, stats = case.within(folders, use)
    assert body["choices"][0]["message"]["content"] == '{"years": 42}'
    assert stats.drafted_tokens > stats.accepted_tokens == 1  # behind the last digit it is right


def test_case_11_each_tool_resolves_the_definitions_of_its_own(folders):
    said = message("11 two shapes of one name", folders)
    assert functions(said) == [
        ("side", {"at": "left"}), ("dot", {"at": {"x": 1, "y": 2}}), ("side", {"at": "right"})
    ]  # fmt: skip
    wrong = message("11 each in the other's shape", folders)
    for name, arguments in functions(wrong):
        jsonschema.validate(arguments, {"side": NAMED, "dot": FLAT}[name])


def test_case_12_a_schema_for_the_answer_leaves_calls_possible_and_the_other_way_round(folders):
    said = message("12 a call beside a schema", folders)
    assert functions(said) == [("book", {"seat": 42})] and said["content"] is None
    assert said["finish"] == "tool_calls"
    other = message("12 the schema beside calls", folders)
    assert (other["content"], other["finish"]) == ('{"years": 42}', "stop")
    talk = wished("Just text, no JSON.", fields={"response_format": AGE, "temperature": 0})
    (choice,) = talk.answers(folders, {})[0].json()["choices"]
    if content := choice["message"]["content"]:
        jsonschema.validate(json.loads(content), AGE["json_schema"]["schema"])
    else:
        assert choice["message"]["tool_calls"]


def test_case_14_a_model_that_only_wants_line_breaks_gives_two_blanks_at_most_and_ends(folders):
    said = message("14 endless line breaks in a call", folders)
    ((_, arguments),) = functions(said)
    texts = [said["tool_calls"][0]["function"]["arguments"]]
    jsonschema.validate(arguments, BLANKS)
    assert said["finish"] == "tool_calls"
    answer = message("14 endless line breaks in an answer", folders)
    jsonschema.validate(json.loads(answer["content"]), BLANKS)
    assert answer["finish"] == "stop"
    for text in [*texts, answer["content"]]:
        assert not re.search(r"\s{3}", text), text


#: Schemas that a grammar can be made of, and that nothing satisfies, or nothing of finite size.
SELF = {
    "itself": {"$ref": "#"},
    "a property that is itself": record({"a": {"$ref": "#/properties/a"}}),
    "two that are each other": record(
        {"a": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}
    ),
    "endless": record({"a": {"$ref": "#"}}),
}


@pytest.mark.parametrize("name", SELF)
@pytest.mark.parametrize("strict", [True, False])
def test_case_a_a_schema_that_refers_to_itself_alone_is_refused_before_the_stream(
    name, strict, folders
):
    fields = {"tools": [tool("f", SELF[name], strict=strict)], "tool_choice": "required"}
    case = Case({**fields, "max_tokens": 50}, want=lambda *_: [])
    for answer in case.answers(folders, {}, MORE):
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"].startswith("tools") and len(error["message"]) > 40


def breaking(at: int, monkeypatch) -> None:
    """The first matcher that is asked for its `at`-th token refuses it, and stays in its error."""
    accept, broken = State.accept, []

    def refuse(self, token):
        if self.steps == at - 1 and len(broken) < 1:
            broken.append(self)
            assert not self.matcher.consume_token(0) and self.matcher.is_error()
        return accept(self, token)

    monkeypatch.setattr(State, "accept", refuse)


@pytest.mark.parametrize("more", [{}, MORE], ids=["plain", "stream"])
def test_case_b_an_error_that_stays_in_a_matcher_ends_its_own_request_only(
    more, folders, monkeypatch
):
    case = wished(SEAT, fields={"tool_choice": "required", "temperature": 0})

    async def use(room: Room):
        breaking(20, monkeypatch)
        first = await room.ask(**case.fields, **more)
        return first, await room.ask(**case.fields)

    first, second = case.within(folders, use)
    if more:
        told = Auditor(True).hear(first.content)
        assert told.error["code"] == "grammar_failed"
    else:
        assert first.status_code == 500 and first.json()["error"]["code"] == "grammar_failed"
    (choice,) = second.json()["choices"]
    assert functions(choice["message"]) == [("book", {"seat": 42})]


@pytest.mark.parametrize("at", [1, 20, 50, 68])
def test_case_c3_a_grammar_that_refuses_a_token_of_a_call_is_one_error_one_done_and_one_line(
    at, folders, monkeypatch, caplog
):
    case = wished(SEAT, fields={"tool_choice": "required", "temperature": 0})

    async def use(room: Room):
        breaking(at, monkeypatch)
        return await room.ask(**case.fields, **MORE)

    with caplog.at_level(logging.WARNING):
        stream = case.within(folders, use)
    told = Auditor(True).hear(stream.content)  # it ends with [DONE], and once
    assert told.error is not None
    assert not any(choice.finish for choice in told.choices.values())
    name = json.loads(stream.text.partition("data: ")[2].partition("\n")[0]).get("id", "")
    lines = {"engine": [], "slipstream": []}  # the engine is another process
    for line in caplog.records:
        if line.levelno >= logging.WARNING:
            lines[line.name.partition(".")[0]].append(line.getMessage())
    (engines,), (ours,) = lines.values()
    assert stream.headers["x-request-id"] in ours and name in ours and name in engines


def test_case_c_rows_of_the_head_that_are_no_tokens_are_never_drawn_under_a_grammar(folders):
    """Their logits are the highest of all at every place."""
    highest = count()

    def prepare(engine: Engine) -> None:
        logits = engine.runner.model.logits

        def padded(hidden):
            found = logits(hidden)
            next(highest)
            found[:, 259:] += 1e6
            return found

        engine.runner.model.logits = padded

    case = replace(CASES["c rows that are no tokens"], prepare=prepare)
    fields = {**case.fields, "tool_choice": "required", "temperature": 0}
    plain, stream = replace(case, fields=fields).answers(folders, {}, MORE)
    assert next(highest) > 100
    (choice,) = plain.json()["choices"]
    assert functions(choice["message"]) == [("book", {"seat": 42})]
    told = Auditor(True).hear(stream.content).choices[0]
    assert [one["arguments"] for one in told.calls] == ['{"seat": 42}']
