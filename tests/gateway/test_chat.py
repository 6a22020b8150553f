"""POST /v1/chat/completions in process: what leaves for what an engine said.  No sockets."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.messages import (
    Abort,
    Out,
    SessionEnd,
    Submit,
    TokenLogprobs,
    TurnEnd,
)
from tests.asking import (
    ADD,
    HERMES,
    USER,
    PlayedLink,
    cut,
    failing_at,
    open_gateway,
    post,
    saying,
)
from tests.auditor import Auditor
from tests.scripted import EOS

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


@pytest.mark.parametrize("engine", [cut, saying])
def test_a_call_is_not_marked_as_closed_early_only_because_tokens_ran_out_after_it(engine):
    assert "x-slipstream-call" not in post(engine(ONE), tools=[ADD]).headers
    assert "x-slipstream-call" not in post(engine(ONE), tools=[ADD], stream=True).text


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
    link = saying(ONE)
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


# --- golden streams ---------------------------------------------------------------------------

STREAMS = {
    "chat_text": (saying("Hé, words.", 3), {"stream_options": {"include_usage": True}}),
    "chat_two_calls": (saying("Look:\n" + TWO, 16), {"tools": [ADD]}),
    "chat_two_choices": (saying("Both.", 4), {"n": 2}),
    "chat_length": (cut("Plain words", 4), {}),
    "chat_engine_failed": (failing_at(1), {}),
    "chat_logprobs": (PlayedLink(with_logprobs), {"logprobs": True, "top_logprobs": 1}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_the_wire_is_as_written_in_tests_golden(name, monkeypatch):
    """GOLDEN=write (make golden) rewrites the files; review the diff."""
    monkeypatch.setattr("gateway.chat.new_id", lambda: "chatcmpl-golden")
    monkeypatch.setattr("gateway.chat.time.time", lambda: 1_700_000_000.0)
    monkeypatch.setattr("gateway.chat.time.monotonic", lambda: 0.0)
    letters = itertools.cycle("abcdefghijklmnopqrstuvwxy")
    monkeypatch.setattr(
        "gateway.tools.marked._letters", lambda count: "".join(itertools.islice(letters, count))
    )
    link, fields = STREAMS[name]
    found = post(link, stream=True, **fields).content
    Auditor("stream_options" in fields).hear(found)
    file = GOLDEN / f"{name}.sse"
    if os.environ.get("GOLDEN") == "write":
        file.write_bytes(found)
    assert found == file.read_bytes()
