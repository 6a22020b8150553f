"""Calls that a closing plan completed, or did not let open, on the wire: streamed and not."""

from __future__ import annotations

import asyncio
import json

import httpx
import jsonschema
import pytest

from engine.messages import Out, Stats, Submit
from gateway import app
from gateway.local_link import LocalLink
from tests.asking import ADD, HERMES, PlayedLink, open_gateway, post, saying
from tests.auditor import Auditor
from tests.driver import make
from tests.scripted import EOS
from tests.tiny import write_llama

ONE = HERMES.write([("add", '{"a": 1}')])
FIELD = "x-slipstream-call"


def ending(text: str, overflow: str, group: int = 4, **last: object) -> PlayedLink:
    """An engine that says this and ends it with `length` and `overflow`."""
    ids = list(text.encode())

    def outs(submit: Submit) -> list[list[Out]]:
        pieces = [ids[i : i + group] for i in range(0, len(ids), group)]
        steps = [[Out(submit.id, index, list(piece)) for index in range(submit.n)]
                 for piece in pieces]
        end = {"finish": "length", "overflow": overflow} | last
        return [*steps, [Out(submit.id, index, [], **end) for index in range(submit.n)]]

    return PlayedLink(outs)


def frames(raw: bytes) -> list[dict]:
    return [json.loads(block[6:]) for block in raw.decode().split("\n\n") if "{" in block]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("group", [1, 4, 99])
def test_a_call_that_was_closed_early_is_whole_and_says_so_streamed_and_not(group, usage):
    whole = post(ending(ONE, "closed", group), tools=[ADD])
    assert whole.status_code == 200 and whole.headers[FIELD] == "closed-early"
    (choice,) = whole.json()["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    stream = post(ending(ONE, "closed", group), tools=[ADD], stream=True,
                  stream_options={"include_usage": usage})
    assert FIELD not in stream.headers  # they leave before anybody can know
    heard = Auditor(usage).hear(stream.content).choices[0]
    assert heard.finish == "length" and heard.calls[0]["arguments"] == '{"a": 1}'
    marked = [frame for frame in frames(stream.content) if FIELD in frame]
    assert {frame[FIELD] for frame in marked} == {"closed-early"}
    ends = [bool(frame["choices"]) for frame in marked]
    assert ends == ([True, False] if usage else [True])  # its finish, and beside the usage


def test_a_named_call_that_was_closed_early_ends_with_length_too():
    named = {"type": "function", "function": {"name": "add"}}
    answer = post(ending(ONE, "closed"), tools=[ADD], tool_choice=named)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.headers[FIELD] == "closed-early"


def test_a_stop_id_behind_a_plans_tokens_does_not_make_it_the_models_call():
    def outs(submit: Submit) -> list[list[Out]]:
        return [[Out(submit.id, 0, [*ONE.encode(), EOS], "length", True, overflow="closed")]]

    answer = post(PlayedLink(outs), tools=[ADD])
    assert answer.headers[FIELD] == "closed-early"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == len(ONE) + 1


def test_of_several_choices_only_the_closed_one_is_marked():
    def outs(submit: Submit) -> list[list[Out]]:
        ids = list(ONE.encode())
        return [
            [Out(submit.id, 0, [*ids, EOS], "stop", True)],
            [Out(submit.id, 1, ids, "length", overflow="closed")],
        ]

    body = {"tools": [ADD], "n": 2}
    assert post(PlayedLink(outs), **body).headers[FIELD] == "closed-early"
    stream = post(PlayedLink(outs), **body, stream=True).content
    (frame,) = [frame for frame in frames(stream) if FIELD in frame]
    assert frame["choices"][0]["index"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_does_not_fit_at_all_is_an_empty_message(stream):
    def outs(submit: Submit) -> list[list[Out]]:
        return [[Out(submit.id, 0, [], "length", overflow="unopened")]]

    answer = post(PlayedLink(outs), tools=[ADD], tool_choice="required", max_tokens=1,
                  stream=stream)
    assert answer.status_code == 200 and FIELD not in answer.text
    if stream:
        heard = Auditor().hear(answer.content).choices[0]
        assert (heard.content, heard.calls, heard.finish) == ("", [], "length")
        return
    assert FIELD not in answer.headers
    body = answer.json()
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": "", "refusal": None
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("group", [1, 3, 99])
def test_the_beginning_of_a_call_that_was_not_opened_is_no_text(group):
    for overflow, content in (("unopened", "Look: "), ("", "Look: <tool_cal")):
        link = ending("Look: <tool_cal", overflow, group)
        assert post(link, tools=[ADD]).json()["choices"][0]["message"]["content"] == content
        link = ending("Look: <tool_cal", overflow, group)
        stream = post(link, tools=[ADD], stream=True).content
        assert Auditor().hear(stream).choices[0].content == content


def test_a_stop_string_that_comes_first_is_the_end_that_is_told():
    def outs(submit: Submit) -> list[list[Out]]:
        return [[Out(submit.id, 0, list(b"one two"), "length", overflow="closed")]]

    answer = post(PlayedLink(outs), tools=[ADD], stop="two")
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert FIELD not in answer.headers


@pytest.mark.parametrize(
    "given, sent", [({}, "close"), ({"tool_overflow": "close"}, "close"),
                    ({"tool_overflow": None}, "close"), ({"tool_overflow": "cut"}, "cut")],
)  # fmt: skip
def test_tool_overflow_reaches_the_engine(given, sent):
    link = saying(ONE)
    post(link, tools=[ADD], **given)
    assert link.submits[0].overflow == sent


@pytest.mark.parametrize("bad", ["explode", "", "CUT", 1, True, ["cut"]])
def test_any_other_tool_overflow_is_refused_by_name(bad):
    answer = post(saying(ONE), tools=[ADD], tool_overflow=bad)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_overflow"


# ---- over a real engine --------------------------------------------------------------------------

NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "day": {"enum": ["mon", "tue"]}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
SHORTEST = len(HERMES.write([("note", '{"text": ""}')]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("closed") / "model", max_len=4096)


def asked(folder, bodies: list[dict], **settings) -> tuple[list[httpx.Response], Stats]:
    """The answers of a gateway over a tiny model, and the engine's counters after them."""

    async def go() -> tuple[list[httpx.Response], Stats]:
        engine = make(folder, **settings)
        link = LocalLink(lambda: engine)
        await link.start()
        await link.ready()
        transport = httpx.ASGITransport(app.build(open_gateway(link)))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return [
                    await client.post("/v1/chat/completions", json=body) for body in bodies
                ], engine.stats()
        finally:
            await link.stop()

    return asyncio.run(go())


def body(most: int, **more: object) -> dict:
    return {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [NOTE],
        "tool_choice": "required", "max_tokens": most, "seed": most, "temperature": 1,
    } | more  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1])
def test_at_every_budget_a_call_is_whole_or_the_message_is_empty(folder, depth):
    budgets = [1, 2, SHORTEST - 1, SHORTEST, SHORTEST + 1, SHORTEST + 9, 90, 120]
    plain = [body(most) for most in budgets]
    streamed = [body(most, stream=True) for most in budgets]
    answers, stats = asked(folder, [*plain, *streamed], depth=depth)
    closed = 0
    for most, one, stream in zip(budgets, answers, answers[len(budgets) :], strict=False):
        assert one.status_code == stream.status_code == 200
        (choice,) = one.json()["choices"]
        heard = Auditor().hear(stream.content).choices[0]
        assert heard.finish == choice["finish_reason"]
        calls = choice["message"].get("tool_calls", [])
        assert [call["arguments"] for call in heard.calls] == [
            call["function"]["arguments"] for call in calls
        ]
        early = FIELD in one.headers
        closed += 2 * early
        assert early == (FIELD in stream.text)
        assert bool(calls) == (most >= SHORTEST)
        if most < SHORTEST:
            assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
        for call in calls:
            jsonschema.validate(
                json.loads(call["function"]["arguments"]), NOTE["function"]["parameters"]
            )
            assert early == (choice["finish_reason"] == "length")
    assert closed > 4 and stats.closed_early == closed and stats.closing_refusals == 6


def test_cut_gives_openais_cut_arguments(folder):
    most = SHORTEST + 5
    (cut, closed), _ = asked(folder, [body(most, tool_overflow="cut"), body(most)])
    (choice,) = cut.json()["choices"]
    assert choice["finish_reason"] == "length" and FIELD not in cut.headers
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert cut.json()["usage"]["completion_tokens"] == most
    assert closed.headers[FIELD] == "closed-early"
