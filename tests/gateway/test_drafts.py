"""`speculation` and `prediction`: what the engine is asked, what usage says.  Drafts nothing."""

from __future__ import annotations

import msgspec
import pytest

from engine.messages import DRAFT_SOURCES, Out, Submit
from gateway.prompt import INLINE
from tests.asking import PlayedLink, post, saying
from tests.auditor import Auditor
from tests.scripted import EOS, ScriptedLink

PATHS = ["/v1/chat/completions", "/v1/completions"]
PART = {"type": "text", "text": "12"}


def counts(**right_of_seen: tuple[int, int]) -> list[int]:
    """Out.drafts, by source: (right, verified)."""
    pairs = (right_of_seen.get(source, (0, 0)) for source in DRAFT_SOURCES)
    return [number for right, seen in pairs for number in (seen, right)]


def drafting(link: ScriptedLink) -> ScriptedLink:
    assert link.hello is not None
    link.hello = msgspec.structs.replace(link.hello, draft_sources=["forced", "suffix"])
    return link


def ended(submit: Submit) -> list[list[Out]]:
    """Two choices that drafted, one of them out of the prediction."""
    first = counts(prediction=(5, 7), suffix=(1, 4))
    return [
        [Out(submit.id, 0, [97]), Out(submit.id, 1, [98])],
        [Out(submit.id, 0, [EOS], "stop", True, drafts=first)],
        [Out(submit.id, 1, [EOS], "stop", True, drafts=counts(forced=(2, 2)))],
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("asked", "drafts", "most"),
    [
        ({}, "auto", 1 << 30),
        ({"mode": "off"}, "off", 1 << 30),
        ({"mode": "suffix", "max": 3}, "suffix", 3),
        ({"max": 0}, "auto", 0),
        ({"mode": "forced", "unknown": 1}, "forced", 1 << 30),
    ],
)
def test_the_engine_hears_who_may_draft_and_how_much(path, asked, drafts, most) -> None:
    link = drafting(saying("ok"))
    assert post(link, path, speculation=asked).status_code == 200
    (submit,) = link.submits
    assert (submit.drafts, submit.max_drafts) == (drafts, most)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"mode": "eagle3"}, "speculation.mode", "drafts with forced, suffix; use auto or off"),
        ({"mode": "best"}, "speculation.mode", "'best' is not available. This server drafts"),
        ({"max": -1}, "speculation.max", ">= 0"),
        ({"max": 65}, "speculation.max", "<= 64"),
        ("off", "speculation", "expected `object | null`"),
    ],
)
def test_a_mistake_is_refused_before_the_stream_and_names_its_field(path, asked, param, says):
    link = drafting(saying("ok"))
    answer = post(link, path, speculation=asked, stream=True)
    assert answer.status_code == 400 and not link.submits
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"]


def test_a_server_that_drafts_nothing_says_so() -> None:
    error = post(saying("ok"), speculation={"mode": "suffix"}).json()["error"]
    assert error["code"] == "unsupported_value" and "This server drafts not" in error["message"]
    assert post(saying("ok"), speculation={"mode": "off"}).status_code == 200


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("ab", b"ab"),
        ([PART, PART], b"1212"),
        ("", b""),
        ("<|im_end|>x", None),  # control tokens are text like any other, or tokens: but never lost
        ("long " * INLINE, b"long " * 20),
    ],
)
def test_a_prediction_reaches_the_engine_as_tokens_no_more_than_may_come(content, expected) -> None:
    link = saying("ok")
    asked = {"type": "content", "content": content}
    assert post(link, prediction=asked, max_tokens=100).status_code == 200
    (submit,) = link.submits
    if expected is None:
        assert submit.predicted[-1] == ord("x")
    else:
        assert bytes(submit.predicted) == expected
    assert len(submit.predicted) <= submit.max_tokens


@pytest.mark.parametrize("asked", ["text", {"type": "other", "content": "a"}, {"type": "content"}])
def test_a_prediction_of_another_shape_is_refused(asked) -> None:
    answer = post(saying("ok"), prediction=asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("prediction")


@pytest.mark.parametrize("tells", [False, True])
def test_usage_counts_predicted_tokens_and_tells_all_drafts_only_when_asked(tells) -> None:
    fields = {"n": 2} | ({"speculation": {}} if tells else {})
    usage = post(PlayedLink(ended), **fields).json()["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 5
    assert details["rejected_prediction_tokens"] == 2
    if not tells:
        assert "speculation" not in usage
    else:
        assert usage["speculation"] == {
            "drafted": 13, "accepted": 8,
            "sources": {
                "forced": {"drafted": 2, "accepted": 2}, "suffix": {"drafted": 4, "accepted": 1},
                "prediction": {"drafted": 7, "accepted": 5},
            },
        }  # fmt: skip
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    heard = Auditor(include_usage=True).hear(post(PlayedLink(ended), **fields).content)
    assert heard.usage == usage


def test_a_request_without_drafts_tells_zeros() -> None:
    usage = post(saying("ok"), speculation={"mode": "off"}).json()["usage"]
    assert usage["speculation"] == {"drafted": 0, "accepted": 0, "sources": {}}
