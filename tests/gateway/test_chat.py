"""POST /v1/chat/completions in process: what leaves for what an engine said.  No sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from pathlib import Path

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.messages import (
    Abort,
    Failed,
    Out,
    Refused,
    SessionEnd,
    Submit,
    TokenLogprobs,
    TurnEnd,
)
from gateway.choices import Choice
from gateway.link import EngineLost
from gateway.sessions import Session
from gateway.sse import ChatFrames
from gateway.stream import frames_of
from gateway.turn import Part, Turn
from tests.asking import (
    ADD,
    HERMES,
    USER,
    PlayedLink,
    cut,
    open_gateway,
    post,
    saying,
    with_client,
)
from tests.auditor import Auditor
from tests.scripted import EOS, Script, ScriptedLink

CHAT = "/v1/chat/completions"
ONE = HERMES.write([("add", '{"a": 1}')])
TWO = HERMES.write([("add", '{"a": 1}'), ("add", '{"a": 22}')])
PIECE = ONE[: ONE.index("1}") + 1]
GOLDEN = Path(__file__).parent.parent / "golden"

SAID = {  # name: (engine by group size, request fields)
    "text": (lambda g: saying("Plain words, twice: words.", g), {}),
    "multibyte": (lambda g: saying("é € 😀 <tool", g), {"tools": [ADD]}),
    "nothing": (lambda g: saying("", g), {}),
    "call": (lambda g: saying(ONE, g), {"tools": [ADD]}),
    "two calls": (lambda g: saying(TWO, g), {"tools": [ADD]}),
    "text and call": (lambda g: saying("Look:\n" + ONE, g), {"tools": [ADD]}),
    "cut text": (lambda g: cut("Plain words", g), {}),
    "cut code point": (lambda g: cut("é€".encode()[:-1], g), {}),
    "cut call": (lambda g: cut(PIECE, g), {"tools": [ADD]}),
    "closed call": (lambda g: cut(ONE, g), {"tools": [ADD]}),
    "stop string": (lambda g: saying("one two three", g), {"stop": ["two", "t"]}),
    "stop in arguments": (lambda g: saying(TWO, g), {"tools": [ADD], "stop": ['"a"', "}"]}),
    "no scan without tools": (lambda g: saying(ONE, g), {}),
    "two choices": (lambda g: saying("Both.", g), {"n": 2}),
}  # fmt: skip


def comparable(body: dict) -> dict:
    """A body without what is random."""
    choices = json.loads(json.dumps(body["choices"]))
    for choice in choices:
        choice["message"].pop("parsed", None)
        if not choice["message"].get("tool_calls"):
            choice["message"].pop("tool_calls", None)
        for number, call in enumerate(choice["message"].get("tool_calls", [])):
            call["id"] = f"call_{number}"
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
    details = {
        name: {key: value for key, value in body["usage"][name].items() if value is not None}
        for name in ("prompt_tokens_details", "completion_tokens_details")
    }
    return {"choices": choices, "usage": {**body["usage"], **details}}


def rebuilt(stream: bytes) -> dict:
    """The stream as openai-python adds it up."""
    state = ChatCompletionStreamState()
    for block in stream.decode().split("\n\n"):
        data = block.rpartition("data: ")[2]
        if data and data != "[DONE]":
            state.handle_chunk(ChatCompletionChunk.model_validate_json(data))
    return state.current_completion_snapshot.model_dump(
        exclude={"choices": {"__all__": {"message": {"annotations", "audio", "function_call"}}}}
    )


@pytest.mark.parametrize("name", SAID)
def test_every_grouping_streamed_or_not_gives_the_same_answer(name):
    make, fields = SAID[name]
    whole = post(make(1), **fields)
    assert whole.status_code == 200
    expected = comparable(whole.json())
    ChatCompletion.model_validate(whole.json(), strict=True)
    for group in (1, 2, 3, 7, 1000):
        body = post(make(group), **fields).json()
        assert comparable(body) == expected
        streamed = post(make(group), stream=True, stream_options={"include_usage": True}, **fields)
        heard = Auditor(include_usage=True).hear(streamed.content)
        assert comparable(rebuilt(streamed.content)) == expected
        for choice in body["choices"]:
            told = heard.choices[choice["index"]]
            assert told.content == choice["message"]["content"]
            assert told.finish == choice["finish_reason"]


@pytest.mark.parametrize(
    ("name", "content", "calls", "finish", "tokens"),
    [
        ("text", "Plain words, twice: words.", [], "stop", 27),
        ("nothing", "", [], "stop", 1),
        ("multibyte", "é € 😀 <tool", [], "stop", 18),
        ("two calls", None, ['{"a": 1}', '{"a": 22}'], "tool_calls", len(TWO) + 1),
        ("text and call", "Look:\n", ['{"a": 1}'], "tool_calls", len(ONE) + 7),
        ("cut text", "Plain words", [], "length", 11),
        ("cut code point", "é\ufffd", [], "length", 4),
        ("closed call", None, ['{"a": 1}'], "length", len(ONE)),
        ("stop string", "one ", [], "stop", 5),
        ("stop in arguments", None, ['{"a": 1}', '{"a": 22}'], "tool_calls", len(TWO) + 1),
        ("no scan without tools", ONE, [], "stop", len(ONE) + 1),
    ],
)
def test_what_an_answer_says_and_how_it_ended(name, content, calls, finish, tokens):
    make, fields = SAID[name]
    body = post(make(4), **fields).json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == content
    found = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])]
    assert found == calls
    assert choice["finish_reason"] == finish
    assert body["usage"]["completion_tokens"] == tokens


def test_a_cut_call_keeps_its_piece_and_ends_with_length():
    choice = post(cut(PIECE), tools=[ADD]).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1'


def test_a_named_tool_ends_with_stop_as_openai_does():
    named = {"type": "function", "function": {"name": "add"}}
    assert post(saying(ONE), tools=[ADD], tool_choice=named).json()["choices"][0][
        "finish_reason"
    ] == "stop"  # fmt: skip


def test_a_call_closed_by_the_plan_is_marked_in_header_and_stream():
    assert post(cut(ONE), tools=[ADD]).headers["x-slipstream-call"] == "closed-early"
    assert "x-slipstream-call" not in post(saying(ONE), tools=[ADD]).headers
    streamed = post(cut(ONE), tools=[ADD], stream=True).text
    assert streamed.count('"x-slipstream-call":"closed-early"') == 1


def test_a_stop_string_aborts_that_choice_in_the_engine():
    link = saying("one two three four", 2)
    post(link, stop="two", n=2)
    (submit,) = link.submits
    assert link.notes == [Abort(submit.id, 0), Abort(submit.id, 1)]
    assert link.closed == [submit.id]


def test_the_first_chunk_is_of_choice_0_even_if_the_engine_begins_with_another():
    def outs(submit: Submit) -> list[list[Out]]:
        return [
            [Out(submit.id, 1, [ord("b")])],
            [Out(submit.id, 1, [EOS], "stop", True)],
            [Out(submit.id, 0, [ord("a"), EOS], "stop", True)],
        ]

    heard = Auditor().hear(post(PlayedLink(outs), n=2, stream=True).content)
    assert {index: one.content for index, one in heard.choices.items()} == {0: "a", 1: "b"}


def with_logprobs(submit: Submit) -> list[list[Out]]:
    ids = [*"hé".encode(), EOS]
    best = [TokenLogprobs(-0.1 * id, [(id, -0.1 * id), (258, -3.0)]) for id in ids]
    return [
        [Out(submit.id, 0, ids[:2], logprobs=best[:2])],
        [Out(submit.id, 0, ids[2:], "stop", True, logprobs=best[2:])],
    ]


def test_logprobs_are_the_same_streamed_or_not():
    fields = {"logprobs": True, "top_logprobs": 2}
    link = PlayedLink(with_logprobs)
    found = post(link, **fields).json()["choices"][0]["logprobs"]["content"]
    assert link.submits[0].sampling.logprobs == 2
    assert [entry["bytes"] for entry in found] == [[104], [0xC3], [0xA9]]
    assert found[0]["top_logprobs"][1] == {
        "token": "<|im_end|>", "logprob": -3.0, "bytes": list(b"<|im_end|>"),
    }  # fmt: skip
    streamed = post(PlayedLink(with_logprobs), stream=True, **fields)
    assert Auditor().hear(streamed.content).choices[0].logprobs == found


def test_the_engine_is_asked_what_the_request_says():
    link = saying("ok")
    post(
        link, temperature=0, seed=5, max_completion_tokens=7, n=2, priority=3, ignore_eos=True,
        headers={"x-request-deadline-ms": "60000", "x-session-affinity": "s"},
    )  # fmt: skip
    (submit,) = link.submits
    assert (submit.sampling.temperature, submit.sampling.seed) == (0, 5)
    assert (submit.max_tokens, submit.n, submit.priority) == (7, 2, 3)
    assert submit.stop_ids == [] and submit.grammar is None
    assert 59 < submit.deadline_s <= 60
    assert len(submit.session) == 16 and len(submit.namespace) == 16


def test_max_tokens_is_what_the_context_leaves_when_it_is_absent():
    link = saying("ok")
    post(link)
    (submit,) = link.submits
    assert submit.max_tokens == 4096 - len(submit.prompt)
    assert submit.stop_ids == [EOS]


def test_a_prompt_that_leaves_no_room_is_refused_before_the_stream():
    link = saying("ok")
    gateway = open_gateway(link, max_len=120)
    for fields in ({"max_tokens": 119}, {"messages": [{"role": "user", "content": "x" * 200}]}):
        answer = post(gateway, stream=True, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert link.submits == [] and gateway.admission.open == 0


def test_usage_and_headers_tell_what_the_cache_did():
    answer = post(saying("ok", cached=64))
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 64, "cache_write_tokens": 0}
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert answer.headers["x-slipstream-cache"] == f"hit=64; prompt={usage['prompt_tokens']}"
    assert answer.headers["cache-control"] == "no-store"
    streamed = post(saying("ok", cached=64), stream=True)
    assert streamed.headers["x-slipstream-cache"].startswith("hit=64; ")
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.headers["cache-control"] == "no-store"
    assert streamed.headers["x-accel-buffering"] == "no"
    assert streamed.headers["x-request-id"]


def test_usage_counts_the_blocks_that_were_written():
    def outs(submit: Submit) -> list[list[Out]]:
        return [
            [Out(submit.id, 0, [97], cached=64, written=128)],
            [Out(submit.id, 0, [EOS], "stop", True, cached=64, written=128)],
        ]

    details = post(PlayedLink(outs)).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 64, "cache_write_tokens": 128}


def test_the_grammar_follows_tools_choice_and_parallel_calls():
    link = saying("x")
    gateway = open_gateway(link)
    wishes = [
        {},
        {"tools": [ADD]},
        {"tools": [ADD], "parallel_tool_calls": False},
        {"tools": [ADD], "tool_choice": "required"},
        {"tools": [ADD], "tool_choice": "none"},
        {"tools": [ADD], "response_format": {"type": "json_object"}},
    ]
    for fields in wishes + wishes:  # planned once, then remembered
        assert post(gateway, **fields).status_code == 200
    grammars = [submit.grammar and submit.grammar.lark for submit in link.submits]
    assert grammars[: len(wishes)] == grammars[len(wishes) :]
    assert grammars[0] is grammars[4] is None
    assert len(set(grammars[: len(wishes)])) == len(wishes) - 1
    assert link.submits[4].prompt == link.submits[0].prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "called"), [("ok", False), (ONE, True)])
def test_the_engine_is_told_how_a_sessions_turn_ended(stream, text, called):
    link = saying(text)
    answer = post(link, tools=[ADD], stream=stream, headers={"x-session-affinity": "s1"})
    (submit,) = link.submits
    assert link.notes == [TurnEnd(submit.session, called)]
    assert answer.headers["x-slipstream-session"] == "active; source=x-session-affinity"


def test_the_last_turn_of_a_session_ends_it():
    link = saying("ok")
    headers = {"x-session-affinity": "s1", "x-session-end": "1"}
    answer = post(link, headers=headers)
    assert link.notes == [SessionEnd(link.submits[0].session)]
    assert answer.headers["x-slipstream-session"].startswith("ended")


@pytest.mark.parametrize("text", ["words é", ONE, TWO, "Look:\n" + ONE])
@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turns_prompt_starts_with_this_turns_tokens(text, stream):
    link = saying(text)
    gateway = open_gateway(link)
    history = [USER]
    before: list[int] = []
    for _ in range(3):
        message = post(gateway, messages=history, tools=[ADD]).json()["choices"][0]["message"]
        if stream:
            usage = {"include_usage": True}
            sent = post(
                gateway, messages=history, tools=[ADD], stream=True, stream_options=usage
            ).content
            message = comparable(rebuilt(sent))["choices"][0]["message"]
        assert link.submits[-1].prompt[: len(before)] == before
        before = [*link.submits[-1].prompt, *text.encode(), EOS]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            for call in message.get("tool_calls", [])
        ]
        history += [message, *results, USER]
    post(gateway, messages=history, tools=[ADD])
    assert link.submits[-1].prompt[: len(before)] == before


# --- ends that are errors ---------------------------------------------------------------------


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


def failing_at(batch: int) -> ScriptedLink:
    return saying("some words here", 2, fail_after=batch)


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


BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}


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


# --- golden streams ---------------------------------------------------------------------------

STREAMS = {
    "chat_text": (saying("Hé, words.", 3), {"stream_options": {"include_usage": True}}),
    "chat_two_calls": (saying("Look:\n" + TWO, 16), {"tools": [ADD]}),
    "chat_two_choices": (saying("Both.", 4), {"n": 2}),
    "chat_length": (cut("Plain words", 4), {}),
    "chat_closed_early": (cut(ONE, 16), {"tools": [ADD]}),
    "chat_engine_failed": (failing_at(1), {}),
    "chat_logprobs": (PlayedLink(with_logprobs), {"logprobs": True, "top_logprobs": 1}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_the_wire_is_as_written_in_tests_golden(name, monkeypatch):
    """SLIPSTREAM_GOLDEN=write rewrites the files; review the diff."""
    monkeypatch.setattr("gateway.chat.new_id", lambda: "chatcmpl-golden")
    monkeypatch.setattr("gateway.chat.time.time", lambda: 1_700_000_000.0)
    monkeypatch.setattr("gateway.chat.time.monotonic", lambda: 0.0)
    letters = itertools.cycle("abcdefghijklmnopqrstuvwxy")
    monkeypatch.setattr("gateway.tools.marked.secrets.choice", lambda _: next(letters))
    link, fields = STREAMS[name]
    found = post(link, stream=True, **fields).content
    Auditor("stream_options" in fields).hear(found)
    file = GOLDEN / f"{name}.sse"
    if os.environ.get("SLIPSTREAM_GOLDEN") == "write":
        file.write_bytes(found)
    assert found == file.read_bytes()
