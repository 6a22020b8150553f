"""Frames: what bytes leave for which events.  No HTTP, no engine."""

from __future__ import annotations

import json

import pytest

from gateway.choices import Said
from gateway.errors import EngineRestarted
from gateway.events import CallArgs, CallEnd, CallStart, Finish, Text
from gateway.protocol import TokenLogprob, Usage
from gateway.sse import PING, ChatFrames, TextFrames, error_frames
from tests.auditor import Auditor

USAGE = Usage(3, 4, 7)
FINISH = Said(0, [Finish("stop")])


def frames(choices: int = 1, include_usage: bool = False) -> ChatFrames:
    return ChatFrames("chatcmpl-1", 7, "tiny", choices=choices, include_usage=include_usage)


def spoken(*batches: list[Said], choices: int = 1, include_usage: bool = False) -> Auditor:
    made = frames(choices, include_usage)
    stream = b"".join(made.batch(batch) for batch in batches) + made.end(USAGE)
    return Auditor(include_usage).hear(stream)


def parsed(raw: bytes) -> list[dict]:
    return [json.loads(block[6:]) for block in raw.decode().split("\n\n") if block]


def test_a_step_of_text_is_one_frame_and_its_json_is_exact():
    made = frames()
    made.batch([Said(0, [Text("a")])])
    assert parsed(made.batch([Said(0, [Text("b")])])) == [
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 7,
            "model": "tiny",
            "system_fingerprint": None,
            "choices": [
                {"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": None}
            ],
        }
    ]


@pytest.mark.parametrize(
    "text", ['"\\\n\r\t\x00', "\u2028\u2029", "é😀", "data: x\n\n", "</script>"]
)
def test_any_text_survives_its_frame(text):
    assert spoken([Said(0, [Text(text)])], [FINISH]).choices[0].content == text


def test_several_kinds_of_events_leave_in_one_run_of_bytes():
    events = [
        Text("so "),
        CallStart(0, "call_1", "add"),
        CallArgs(0, '{"a"'),
        CallArgs(0, ": 1}"),
        CallEnd(0),
        CallStart(1, "call_2", "add"),
        CallArgs(1, "{}"),
        CallEnd(1),
        Finish("tool_calls"),
    ]
    heard = spoken([Said(0, events)]).choices[0]
    assert heard.content == "so "
    assert [call["arguments"] for call in heard.calls] == ['{"a": 1}', "{}"]
    assert heard.finish == "tool_calls"


def test_content_is_null_when_a_call_comes_first_and_empty_when_nothing_comes():
    call = [CallStart(0, "call_1", "add"), CallEnd(0), Finish("tool_calls")]
    assert spoken([Said(0, call)]).choices[0].content is None
    assert spoken([FINISH]).choices[0].content == ""


def test_nothing_leaves_before_choice_0_has_opened():
    made = frames(choices=2)
    assert made.batch([Said(1, [Text("one")])]) == b""
    assert made.batch([Said(0, []), Said(1, [Text("more")])]) == b""
    later = made.batch([Said(0, [Text("zero")])])
    end = made.batch([FINISH, Said(1, [Finish("length")])]) + made.end(USAGE)
    heard = Auditor().hear(later + end).choices
    assert (heard[0].content, heard[1].content) == ("zero", "onemore")


def test_usage_is_null_until_the_last_chunk_when_it_was_asked_for():
    heard = spoken([Said(0, [Text("a")])], [FINISH], include_usage=True)
    assert heard.usage["total_tokens"] == 7
    assert heard.usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_logprobs_wait_for_the_next_frame_and_none_is_lost():
    tokens = [TokenLogprob(letter, -0.5, [ord(letter)]) for letter in "abc"]
    heard = spoken(
        [Said(0, [], tokens[:1])], [Said(0, [Text("ab")], tokens[1:2])],
        [Said(0, [Finish("stop")], tokens[2:])],
    )  # fmt: skip
    assert [entry["token"] for entry in heard.choices[0].logprobs] == ["a", "b", "c"]


def test_a_call_that_the_closing_plan_completed_says_so_on_its_finish():
    made = frames()
    raw = made.batch([Said(0, [CallStart(0, "c", "add"), Finish("length")], closed_early=True)])
    marked = [frame.get("x-slipstream-call") for frame in parsed(raw)]
    assert marked == [None, None, "closed-early"]


def test_an_error_is_a_typed_frame_and_then_done():
    heard = Auditor().hear(error_frames(EngineRestarted()))
    assert heard.error["code"] == "engine_restarted"


def test_a_ping_is_a_comment_without_a_blank_line():
    assert PING == b": ping\n"
    stream = PING + frames().batch([FINISH]) + PING + frames().end(USAGE)
    assert Auditor().hear(stream).pings == 2


def test_text_completions_have_their_own_frames():
    made = TextFrames("cmpl-1", 7, "tiny", choices=1, include_usage=True)
    token = TokenLogprob("ab", -0.5, [97, 98])
    raw = made.echo(0, "p") + made.batch([Said(0, [Text("ab"), Finish("stop")], [token])])
    first, second, third = (frame["choices"][0] for frame in parsed(raw))
    assert first == {"index": 0, "text": "p", "logprobs": None, "finish_reason": None}
    assert second["logprobs"]["tokens"] == ["ab"] and second["text"] == "ab"
    assert third == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert made.end(USAGE).endswith(b"}\n\ndata: [DONE]\n\n")


BROKEN = [
    (lambda s: s.replace(b"data: [DONE]\n\n", b""), "DONE"),
    (lambda s: s + b"data: {}\n\n", "after"),
    (lambda s: b"id: 1\n" + s, "id"),
    (lambda s: s.replace(b'"finish_reason":"stop"', b'"finish_reason":null'), None),
    (lambda s: s.replace(b'"created":7', b'"created":8', 1), "created"),
    (lambda s: s.replace(b'"content":"a"', b'"content":""'), "empty"),
    (lambda s: s.replace(b"\n\n", b"\r\n\r\n"), None),
]


@pytest.mark.parametrize(("breaks", "said"), BROKEN)
def test_the_auditor_hears_a_broken_stream(breaks, said):
    made = frames()
    good = made.batch([Said(0, [Text("a")])]) + made.batch([FINISH]) + made.end(USAGE)
    Auditor().hear(good)
    with pytest.raises((AssertionError, KeyError), match=said):
        Auditor().hear(breaks(good))
