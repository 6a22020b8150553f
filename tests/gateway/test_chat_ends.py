"""How chat requests end that do not end well, and what time does to them.  No sockets."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from engine.messages import (
    Failed,
    Out,
    Refused,
    SessionEnd,
    Submit,
)
from gateway.choices import Choice
from gateway.link import EngineLost
from gateway.sessions import Session
from gateway.sse import ChatFrames
from gateway.stream import frames_of
from gateway.turn import Part, Turn
from tests.asking import (
    ADD,
    USER,
    PlayedLink,
    failing_at,
    open_gateway,
    post,
    saying,
    with_client,
)
from tests.auditor import Auditor
from tests.scripted import Script, ScriptedLink

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "unsupported_schema_keyword", "invalid_request_error"),
        (429, "queue_full", "overloaded_error"),
        (504, "deadline_exceeded", "timeout_error"),
    ],
)
def test_what_the_engine_refuses_is_a_real_status_also_for_streams(status, code, kind, stream):
    said = Refused("x", code, "No, because.", "tools[0]", status)
    gateway = open_gateway(ScriptedLink(lambda _: Script([[1]], refuse=said)))
    answer = post(gateway, stream=stream)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["message"]) == (code, kind, "No, because.")
    assert gateway.admission.open == 0


@pytest.mark.parametrize("batch", [0, 1, 7])
def test_an_engines_failure_is_a_typed_error_and_done(batch):
    heard = Auditor().hear(post(failing_at(batch), stream=True).content)
    assert heard.error["code"] == "internal"
    assert heard.error["message"].startswith("The engine gave up on this")
    answer = post(failing_at(batch))
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal"


def dying(at_s: float) -> ScriptedLink:
    link = saying("some words here", 2, delay_s=0.02)
    submit = link.submit

    def submit_and_die(message: Submit):
        box = submit(message)
        asyncio.get_running_loop().call_later(at_s, link.die)
        return box

    link.submit = submit_and_die
    return link


def test_an_engine_that_dies_in_a_stream_is_a_typed_error_and_done():
    heard = Auditor().hear(post(dying(0.07), stream=True).content)
    assert heard.error["code"] == "engine_restarted"
    assert heard.choices[0].content
    answer = post(dying(0.07))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_restarted"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["refused", "failed", "deadline"])
def test_a_session_ends_once_with_its_last_request_even_if_that_fails(fault, stream):
    link = {
        "refused": lambda: ScriptedLink(
            lambda _: Script([[1]], refuse=Refused("x", "queue_full", "Full.", "", 429))
        ),
        "failed": lambda: saying("some words", 2, fail_after=1),
        "deadline": lambda: saying("abcdefgh", 1, delay_s=0.02),
    }[fault]()
    headers = {"x-session-affinity": "s", "x-session-end": "1"}
    if fault == "deadline":
        headers["x-request-deadline-ms"] = "50"
    post(link, stream=stream, headers=headers)
    assert link.notes == [SessionEnd(link.submits[0].session)]


@pytest.mark.parametrize("seen", [False, True])
def test_without_an_engine_a_request_is_a_503(seen):
    gateway = open_gateway(saying("x"))
    gateway.seen_engine = seen
    gateway.link.hello = None
    answer = post(gateway, stream=True)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == ("engine_unavailable" if seen else "loading")
    assert answer.headers["retry-after"]


def test_an_engine_that_goes_between_the_check_and_the_submit_is_a_503():
    link = saying("x")

    def gone(_: Submit):
        raise EngineLost("no engine")

    link.submit = gone
    gateway = open_gateway(link)
    assert post(gateway, stream=True).status_code == 503
    assert gateway.admission.open == 0


def test_a_full_queue_is_a_429_before_the_200():
    link = saying("x")
    gateway = open_gateway(link, max_open_requests=1)
    with gateway.admission.enter(1):
        answer = post(gateway, stream=True)
    assert answer.status_code == 429 and answer.headers["retry-after-ms"]
    assert answer.json()["error"]["code"] == "queue_full" and link.submits == []
    assert post(gateway).status_code == 200


def test_a_deadline_ends_the_wait_for_admission_and_the_stream():
    headers = {"x-request-deadline-ms": "60"}
    waiting = PlayedLink(lambda _: [], admit_s=5)
    answer = post(waiting, stream=True, headers=headers)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    slow = saying("abcdefgh", 1, delay_s=0.02)
    heard = Auditor().hear(post(slow, stream=True, headers=headers).content)
    assert heard.error["code"] == "deadline_exceeded" and heard.choices[0].content
    assert len(slow.closed) == len(waiting.closed) == 1
    late = post(saying("x"), headers={"x-request-deadline-ms": "0"})
    assert late.status_code == 504


@pytest.mark.parametrize("value", ["soon", "-1", "1.5", "٣"])
def test_a_deadline_that_is_no_number_is_refused(value):
    answer = post(saying("x"), headers={"x-request-deadline-ms": value.encode()})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-deadline-ms"


def test_the_engines_own_deadline_and_abort_are_typed_too():
    def failing(code: str) -> PlayedLink:
        link = PlayedLink(lambda submit: [])
        play = link._play

        async def then_fail(submit: Submit) -> None:
            await play(submit)
            link.boxes.deliver([Failed(submit.id, code, "The deadline passed.")])

        link._play = then_fail
        return link

    assert post(failing("deadline_exceeded")).status_code == 504
    aborted = PlayedLink(lambda submit: [[Out(submit.id, 0, [], "abort")]])
    assert Auditor().hear(post(aborted, stream=True).content).error["code"] == "aborted"


def test_streams_that_outlive_the_drain_are_told():
    link = saying("abcdefgh", 1, delay_s=0.02)
    gateway = open_gateway(link)

    async def use(client):
        asyncio.get_running_loop().call_later(0.07, gateway.drain.expired.set)
        body = {"model": "tiny", "messages": [USER], "stream": True}
        return await client.post(CHAT, json=body)

    heard = Auditor().hear(with_client(gateway, use).content)
    assert heard.error["code"] == "server_draining" and heard.choices[0].content
    assert len(link.closed) == 1


def test_our_own_fault_is_a_typed_error_and_done_and_never_its_text(caplog, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("secret words")

    for stream in (True, False):
        gateway = open_gateway(saying("ok"))
        monkeypatch.setattr(gateway.prompts, "remember", broken)
        with caplog.at_level(logging.ERROR):
            answer = post(gateway, stream=stream, headers={"x-request-id": "req-7"})
        assert "secret" not in answer.text and "secret" not in caplog.text
        assert "req-7" in caplog.text and "RuntimeError" in caplog.text
        error = Auditor().hear(answer.content).error if stream else answer.json()["error"]
        assert error["code"] == "internal"


BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "not": {"pattern": "x"}}}}


def tool(schema: dict, **more: object) -> dict:
    return {"type": "function", "function": {"name": "t", "parameters": schema, **more}}


def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_its_place():
    answer = post(saying("x"), tools=[tool(BAD_SCHEMA, strict=True)], stream=True)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "unsupported_schema_keyword"
    assert error["param"] == "tools[0].function.parameters"
    assert "'not'" in error["message"] and "/properties/a" in error["message"]


def test_a_schema_that_is_enforced_in_part_says_so_in_a_header():
    answer = post(saying("x"), tools=[tool(BAD_SCHEMA)])
    assert answer.status_code == 200
    assert answer.headers["x-slipstream-schema"] == "relaxed; pointer=/properties/a/not"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [ADD, ADD]},
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"tool_choice": "required"},
        {"tools": [tool({"type": "nonsense"})]},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"tools": [{"type": "custom"}]},
        {"model": "", "messages": [USER]},
        {"logit_bias": {"9999": 1}},
    ],
)
def test_bad_plans_and_values_are_400_with_a_param(fields):
    answer = post(saying("x"), stream=True, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split("[")[0].split(".")[0] in fields


def test_another_model_is_a_404():
    answer = post(saying("x"), model="gpt-x")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


# --- time -------------------------------------------------------------------------------------


def test_pings_come_by_the_clock_while_the_engine_is_silent():
    link = saying("ok", before_s=0.3)
    answer = post(open_gateway(link, ping_s=0.06), stream=True)
    assert Auditor().hear(answer.content).pings >= 3
    assert answer.content.startswith(b": ping\n: ping\n")


def ask_slowly(gateway, body: dict) -> list[bytes]:
    """Ask through bare ASGI; the reader takes its time over the first piece."""
    from gateway import app as module

    built = module.build(gateway)
    pieces: list[bytes] = []

    async def run() -> None:
        sent = False
        readers = 0

        async def receive() -> dict:
            nonlocal sent, readers
            if sent:
                readers += 1
                assert readers == 1, "two tasks read one request"
                try:
                    await asyncio.sleep(30)
                finally:
                    readers -= 1
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def send(message: dict) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                pieces.append(message["body"])
                if len(pieces) == 1:
                    await asyncio.sleep(0.15)

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(),
            "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http",
            "client": ("test", 1), "server": ("test", 80), "root_path": "",
        }  # fmt: skip
        await built(scope, receive, send)

    asyncio.run(run())
    return pieces


def test_what_waits_for_a_slow_reader_leaves_in_one_frame():
    text = "abcdefghijklmnopqrstuvwxyz"
    gateway = open_gateway(saying(text, 1, delay_s=0.001))
    body = {"model": "tiny", "messages": [USER], "stream": True}
    pieces = ask_slowly(gateway, body)
    heard = Auditor().hear(b"".join(pieces))
    assert heard.choices[0].content == text
    assert heard.choices[0].frames < 10
    assert all(piece.endswith(b"\n\n") for piece in pieces)


def test_a_stream_that_is_dropped_half_way_closes_its_mailbox():
    link = saying("some words", 1, delay_s=0.001)
    gateway = open_gateway(link)

    async def run() -> None:
        submit = Submit("a", [1], 20)
        session = Session(None, "none", False)
        choice = Choice(0, gateway.prompts.vocabulary)
        prompt = gateway.prompts.given([1])
        turn = Turn(gateway, [Part(prompt, submit)], [choice], session, request_id="r", begin=0.0)
        await turn.admit(asyncio.Event().wait)
        pieces = frames_of(turn, ChatFrames("a", 1, "m", choices=1, include_usage=False))
        assert await anext(pieces)
        await pieces.aclose()
        assert link.closed == ["a"] and gateway.admission.open == 0
        turn.close()

    asyncio.run(run())
