"""Answers that begin anew because their engine died before anybody saw them.  No sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from engine.messages import Out, Submit, TokenLogprobs
from tests.asking import ADD, HERMES, PlayedLink, open_gateway, post
from tests.auditor import Auditor
from tests.scripted import EOS, ScriptedLink


def restarting(text: str | bytes, at: Sequence[int], n: int = 1) -> ScriptedLink:
    """An engine of one token a step that is killed before these tokens, and comes back."""
    ids = [*(text.encode() if isinstance(text, str) else text), EOS]
    deaths = list(at)

    def play(submit: Submit) -> Iterator[list[Out]]:
        for number, id in enumerate(ids):
            if deaths and deaths[0] == number:
                del deaths[0]
                asyncio.get_running_loop().call_soon(link.restart)
                yield []
            last = number == len(ids) - 1
            order = reversed(range(n))  # choice 0 comes last
            yield [Out(submit.id, i, [id], "stop" if last else "", last) for i in order]

    link = PlayedLink(play)
    return link


@pytest.mark.parametrize("at", [0, 1, 9, 30])
@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_that_nobody_has_seen_is_made_again_when_its_engine_dies(at, n):
    text = "Look:\n" + HERMES.write([("add", '{"a": 1}')])
    plain = post(restarting(text, [], n), tools=[ADD], n=n, stop=["nothing"])
    link = restarting(text, [at], n)
    gateway = open_gateway(link)
    again = post(gateway, tools=[ADD], n=n, stop=["nothing"])
    assert again.status_code == 200 and link.restarts == 1
    assert again.json()["usage"] == plain.json()["usage"]
    for one, other in zip(plain.json()["choices"], again.json()["choices"], strict=True):
        (call,), (other_call,) = one["message"]["tool_calls"], other["message"]["tool_calls"]
        assert call["function"] == other_call["function"]
        assert one["message"]["content"] == other["message"]["content"]
    assert gateway.admission.open == 0 and not link.boxes.open_boxes()


def test_a_stream_of_which_no_frame_has_left_begins_anew():
    link = restarting("é€", [1])  # half a code point is held back
    heard = Auditor().hear(post(link, stream=True).content)
    assert (heard.choices[0].content, link.restarts) == ("é€", 1)


def test_frames_that_wait_for_choice_0_are_dropped_when_the_answer_begins_anew():
    def play(submit: Submit) -> Iterator[list[Out]]:
        entry = [TokenLogprobs(-0.5, [])]
        yield [Out(submit.id, 1, [ord("a")], logprobs=entry)]
        if not link.restarts:
            asyncio.get_running_loop().call_soon(link.restart)
            yield []
        yield [Out(submit.id, 0, [ord("b")], "length", logprobs=entry)]
        yield [Out(submit.id, 1, [ord("c")], "length", logprobs=entry)]

    link = PlayedLink(play)
    answer = post(link, stream=True, n=2, logprobs=True)
    heard = Auditor().hear(answer.content).choices
    assert link.restarts == 1
    assert (heard[0].content, heard[1].content) == ("b", "ac")
    assert [entry["token"] for entry in heard[1].logprobs] == ["a", "c"]


def test_what_was_shown_is_not_made_again_and_nothing_is_tried_a_third_time():
    link = restarting("words", [2])
    heard = Auditor().hear(post(link, stream=True).content)
    assert heard.error["code"] == "engine_restarted" and heard.choices[0].content == "wo"
    twice = post(restarting("words", [2, 3]))
    assert twice.status_code == 503
    assert twice.json()["error"]["code"] == "engine_restarted"
