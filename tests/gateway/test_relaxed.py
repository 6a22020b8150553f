"""Calls whose schema was only partly enforced: judged beside the event loop, and counted."""

from __future__ import annotations

import json
import threading
import time

import pytest

from gateway.tools.choice import JUDGED_S, ToolPlan, plan
from tests.asking import open_gateway, post, saying
from tests.calls import HERMES
from tests.schemas import UNIQUE, tool

PICK = tool("pick", UNIQUE, strict=False)
CALLS = [("pick", '{"x": [1, 2, 3]}'), ("pick", '{"x": [1, 1, 2]}')]


def planned(*tools: object) -> ToolPlan:
    return plan(json.dumps(tools).encode(), "auto", True, None, HERMES)


@pytest.mark.parametrize("stream", [False, True])
def test_relaxed_calls_are_counted_as_valid_or_not_by_their_whole_schema(stream):
    gateway = open_gateway(saying(HERMES.write(CALLS)))
    answer = post(gateway, tools=[PICK], stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-slipstream-schema"] == "relaxed; pointer=/properties/x/uniqueItems"
    text = gateway.metrics.page().decode()
    for valid in ("true", "false"):
        assert f'valid="{valid}"}} 1.0' in text


def test_they_are_judged_on_another_thread_than_the_answer(monkeypatch):
    threads: set[str] = set()

    def slow(schema: object, text: str) -> str:
        threads.add(threading.current_thread().name)
        return ""

    monkeypatch.setattr("gateway.tools.choice.complaint", slow)
    assert post(open_gateway(saying(HERMES.write(CALLS))), tools=[PICK]).status_code == 200
    assert threads and threading.main_thread().name not in threads


@pytest.mark.timed
def test_the_judging_of_many_calls_is_bounded_as_a_whole(monkeypatch):
    def slow(schema: object, text: str) -> str:
        time.sleep(JUDGED_S / 4)
        return ""

    monkeypatch.setattr("gateway.tools.choice.complaint", slow)
    start = time.monotonic()
    judged = planned(PICK).judged(CALLS * 50)
    assert time.monotonic() - start < 2 * JUDGED_S
    assert judged[0] and not judged[-1] and len(judged) == 100


def test_calls_that_the_grammar_enforced_are_valid_without_a_judge(monkeypatch):
    monkeypatch.setattr("gateway.tools.choice.complaint", lambda *_: pytest.fail("judged"))
    assert planned(tool("pick")).judged(CALLS) == [True, True]
