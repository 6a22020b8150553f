"""openai-python makes of our chunks what we send in one body.  Judges no content.

Every named case of tests/cases.py and every golden stream: choices with message, calls and
finish_reason, and usage.  Ids of calls are random, so they are only compared by their place.
"""

from __future__ import annotations

import json

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.asking import USER, open_gateway, post
from tests.cases import CASES, MORE, pair
from tests.gateway.test_chat import GOLDEN, STREAMS
from tests.live import running
from tests.sdk import chunks, comparable, rebuilt


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", CASES)
def test_a_named_case_streamed_is_the_same_completion(name, folders):
    plain, stream = pair(CASES[name], folders)
    assert comparable(rebuilt(stream.content)) == comparable(plain.json())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.want is None])
def test_it_is_the_same_by_the_short_way_to_a_socket(name):
    case = CASES[name]
    plain = post(case.scripted(), **case.fields).json()
    start = {"model": "tiny", "messages": [USER]}
    with running(case.scripted()) as live:
        body = json.dumps({**start, **case.fields, **MORE}).encode()
        answer = live.ask("POST", "/v1/chat/completions", body, "Content-Type: application/json")
    assert answer.status == 200
    assert comparable(rebuilt(answer.body)) == comparable(plain)


@pytest.mark.parametrize("name", sorted(set(STREAMS) - {"chat_engine_failed"}))
def test_a_golden_stream_is_the_completion_that_its_engine_gives_in_one_body(name):
    link, fields = STREAMS[name]
    stream = (GOLDEN / f"{name}.sse").read_bytes()
    found, body = comparable(rebuilt(stream)), post(open_gateway(link), **fields).json()
    if "stream_options" not in fields:  # then its engine is asked once more, for the usage
        assert found["usage"] is None
        again = post(open_gateway(link), **fields, **MORE).content
        found = {**found, "usage": comparable(rebuilt(again))["usage"]}
    assert found == comparable(body)


def test_every_golden_stream_is_looked_at():
    assert {file.stem for file in GOLDEN.glob("chat_*.sse")} == set(STREAMS)


def test_a_stream_that_failed_is_no_completion():
    state: ChatCompletionStreamState = ChatCompletionStreamState()
    stream = (GOLDEN / "chat_engine_failed.sse").read_bytes()
    good, _, failed = stream.rpartition(b'data: {"error"')
    assert good and failed
    for chunk in chunks(good):
        state.handle_chunk(chunk)
    assert state.current_completion_snapshot.choices[0].finish_reason is None
