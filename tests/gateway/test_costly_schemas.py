"""Schemas that are not plain are checked in a process that can be killed; what a client hears."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from engine.grammar import schema as schemas
from engine.grammar.trial import Busy, CheckJob, Died, Limits, Passed, Setup, Trial, plain
from tests.asking import open_gateway, post, saying
from tests.calls import HERMES
from tests.schemas import record, tool

DAYS = [f"d{i}" for i in range(20)]
CALL = HERMES.write([("plan", '{"d0": "2024-02-29"}')])


def costly(why: str) -> dict[str, object]:
    """A tool that no other test has sent, for plans are remembered."""
    dates = {day: {"type": "string", "format": "date"} for day in DAYS}
    return tool("plan", record(dates, [], title=why))


@pytest.fixture
def trial(monkeypatch) -> Iterator[Trial]:
    """The gateway's, with limits of its own."""
    made = Trial(Setup(), Limits(0.5))
    monkeypatch.setattr(schemas, "_trial", lambda: made)
    yield made
    made.close()


def test_one_that_is_not_plain_is_checked_apart_and_served(trial) -> None:
    answer = post(open_gateway(saying(CALL)), tools=[costly("fine")])
    assert trial.pid is not None
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"d0": "2024-02-29"}'


def test_one_that_is_plain_starts_no_process(trial) -> None:
    small = tool("plan", record({"d0": {"type": "string", "format": "date"}}, []))
    assert post(open_gateway(saying(CALL)), tools=[small]).status_code == 200
    assert trial.pid is None


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("time", "grammar_too_complex", "more than 0.5 s of CPU time"),
        ("memory", "grammar_too_complex", "more than 512 MiB"),
        ("crash", "grammar_failed", "Simplify it"),
    ],
)
def test_a_limit_is_a_400_that_names_the_tool(
    trial, monkeypatch, how: str, code: str, words: str
) -> None:
    tried: list[CheckJob] = []

    def ended(job: CheckJob, cpu_s: float) -> Died:
        tried.append(job)
        return Died(how)

    monkeypatch.setattr(trial, "_tried", ended)
    for _ in range(2):  # the verdict is remembered
        answer = post(open_gateway(saying(CALL)), tools=[costly(how)])
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, code)
        assert error["param"] == "tools[0].function.parameters"
        assert "function 'plan'" in error["message"] and words in error["message"]
        assert "--engine" not in error["message"]  # whose limits these are not
    assert len(tried) <= 2


def test_a_machine_without_room_is_a_503_and_the_next_one_is_tried_again(
    trial, monkeypatch
) -> None:
    said = [Passed(), Died("room", "no fork: [Errno 28]")]
    monkeypatch.setattr(trial, "_tried", lambda job, cpu_s: said.pop())
    answer = post(open_gateway(saying(CALL)), tools=[costly("room")])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "engine_unavailable")
    assert "Send the request again" in error["message"] and "Errno" not in error["message"]
    assert "retry-after" in answer.headers and "x-should-retry" not in answer.headers
    assert said == [Passed()]


def test_too_many_at_once_are_told_to_come_again(trial, monkeypatch) -> None:
    def busy(job: CheckJob) -> Passed:
        raise Busy

    monkeypatch.setattr(trial, "ask", busy)
    answer = post(open_gateway(saying(CALL)), tools=[costly("busy")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1


def test_the_costly_one_is_not_plain() -> None:
    assert not plain(json.dumps(costly("")))
