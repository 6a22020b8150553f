"""What ended answers delivered: relaxed schemas counted as their header says.  Runs no model."""

from __future__ import annotations

import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Out, Submit
from gateway.state import Gateway
from tests.asking import ADD, PlayedLink, cut, open_gateway, post, saying
from tests.cases import AGE, MORE, call, written
from tests.schemas import UNIQUE, record, tool, whole

PICK = tool("pick", UNIQUE, strict=False)
FREE = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}}
POINTER = "pointer=/properties/x/uniqueItems"
RIGHT, WRONG = '{"x": [1, 2, 3]}', '{"x": [1, 1, 2]}'
CALL = written(("pick", RIGHT))


def counted(gateway: Gateway, name: str) -> dict[str, int]:
    """The non-zero samples of a counter by its own label."""
    found = {}
    for family in text_string_to_metric_families(gateway.metrics.page().decode()):
        for sample in family.samples:
            if sample.name == f"slipstream:{name}_total" and sample.value:
                labels = dict(sample.labels)
                del labels["model_name"], labels["engine"]
                found[" ".join(labels.values())] = int(sample.value)
    return found


@pytest.mark.parametrize("more", [{}, MORE], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("text", "fields", "header", "relaxed"),
    [
        (CALL, {"tools": [PICK]}, f"relaxed; {POINTER}", {"tools": 1}),
        (RIGHT, {"response_format": FREE}, f"relaxed; {POINTER}", {"response_format": 1}),
        (RIGHT, {"tools": [PICK, ADD], "response_format": FREE}, f"relaxed; {POINTER}; {POINTER}",
         {"tools": 1, "response_format": 1}),
        (RIGHT, {"tools": [PICK], "response_format": AGE}, f"relaxed; {POINTER}", {"tools": 1}),
        ('{"years": 4}', {"response_format": AGE}, None, {}),
        (written(call("add", a=1)), {"tools": [ADD]}, None, {}),
        ("Hi.", {"tools": [PICK], "tool_choice": "none"}, None, {}),
        ("Hi.", {}, None, {}),
    ],
)  # fmt: skip
def test_a_response_is_counted_as_relaxed_where_its_header_says_so(
    text, fields, header, relaxed, more
):
    gateway = open_gateway(saying(text))
    answer = post(gateway, **fields, **more)
    assert answer.status_code == 200
    assert answer.headers.get("x-slipstream-schema") == header
    assert counted(gateway, "relaxed_schemas") == relaxed


def test_a_request_that_is_refused_is_not_counted():
    gateway = open_gateway(saying("x"))
    assert post(gateway, tools=[PICK], max_tokens=0).status_code == 400
    strict = tool("pick", UNIQUE, strict=True)
    assert post(gateway, tools=[strict]).status_code == 400
    assert counted(gateway, "relaxed_schemas") == {}


def judged(gateway: Gateway) -> dict[str, int]:
    """The verdicts, once the thread has given one."""
    end = time.monotonic() + 20
    while not (found := counted(gateway, "relaxed_answers")):
        assert time.monotonic() < end, "nothing was judged"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("more", [{}, MORE, {"stop": ["zzz"]}], ids=["plain", "stream", "stop"])
@pytest.mark.parametrize("text, verdict", [(RIGHT, "true"), (WRONG, "false"), ("Hi.", "false")])
def test_an_answer_by_a_relaxed_schema_is_judged_by_all_of_it(text, verdict, more):
    gateway = open_gateway(saying(text))
    assert post(gateway, response_format=FREE, **more).status_code == 200
    assert judged(gateway) == {verdict: 1}
    assert counted(gateway, "tool_calls") == {}


def test_each_choice_is_judged_and_one_that_is_cut_satisfies_nothing():
    gateway = open_gateway(saying(RIGHT))
    post(gateway, response_format=FREE, n=2)
    assert judged(gateway)["true"] >= 1
    gateway = open_gateway(cut(RIGHT[:-2]))
    post(gateway, response_format=FREE)
    assert judged(gateway) == {"false": 1}
    gateway = open_gateway(
        PlayedLink(lambda submit: [[Out(submit.id, 0, [], "length", overflow="unopened")]])
    )
    post(gateway, response_format=FREE)
    assert counted(gateway, "relaxed_answers") == {}


def test_answers_that_the_grammar_enforced_are_not_judged(monkeypatch):
    monkeypatch.setattr("gateway.tools.choice.complaint", lambda *_: pytest.fail("judged"))
    fields = {"type": "json_schema", "json_schema": {"name": "a", "schema": record({
        "a": whole(0, 9)})}}  # fmt: skip
    gateway = open_gateway(saying(json.dumps({"a": 1})))
    assert post(gateway, response_format=fields).status_code == 200
    assert counted(gateway, "relaxed_answers") == counted(gateway, "relaxed_schemas") == {}


def test_an_answer_can_be_relaxed_and_closed_early_and_says_both():
    def outs(submit: Submit) -> list[list[Out]]:
        return [[Out(submit.id, 0, [*CALL.encode()], "length", overflow="closed")]]

    answer = post(PlayedLink(outs), tools=[PICK])
    assert answer.headers["x-slipstream-schema"] == f"relaxed; {POINTER}"
    assert answer.headers["x-slipstream-call"] == "closed-early"
    stream = post(PlayedLink(outs), tools=[PICK], **MORE)
    assert stream.headers["x-slipstream-schema"] == f"relaxed; {POINTER}"
    assert stream.text.count('"x-slipstream-call":"closed-early"') == 2  # its finish, and the usage
