"""The served proposers change no answer: the engine's promise, with them, in fp64.

What each guesses is tested beside this file; here they run in an engine, in every way that a
request can run.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.messages import Abort, SessionEnd, Submit
from tests.driver import Run, answers, make
from tests.exact import DRAWS, GRAMMARS, WAYS, pairwise, preempt_some, requests
from tests.proposers import Eager
from tests.tiny import write_llama

SOURCES = {
    "hybrid": ("forced", "suffix"), "suffix": ("suffix",), "forced": ("forced",),
    "predicted": ("forced", "suffix"),
}  # fmt: skip
DEPTHS = [1, 2, 3, 5, 8, 16]
ENDS = ["quiet", "aborts"]
CASES = pairwise(
    list(WAYS), list(SOURCES), DEPTHS, list(DRAWS), list(GRAMMARS), [1, 2], ENDS, [0, 1]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("equal") / "model", max_len=512)


@pytest.fixture(scope="module")
def truth(folder):
    """One request at a time, no cache, no drafts, whole prompts: what all others must equal."""
    engine = make(folder, prefix_caching=False, max_batch_tokens=4096)
    known: dict[bytes, dict] = {}

    def ask(submit: Submit) -> dict:
        key = msgspec.msgpack.encode(submit)
        if key not in known:
            known[key] = answers(engine, submit)
        return known[key]

    return ask


def edited(tokens: list[int], chance: random.Random) -> list[int]:
    """The answer with a place changed, one left out and one put in."""
    made = list(tokens)
    for change in range(3):
        at = chance.randrange(len(made) + 1)
        made[at : at + (change < 2)] = [] if change == 1 else [chance.randrange(256)]
    return made


def in_session(submits: list[Submit], turn: int, predicted: dict) -> list[Submit]:
    """The same requests, as a turn of two sessions of one tenant."""
    return [
        msgspec.structs.replace(
            submit, id=f"{submit.id}.{turn}", session=bytes([i % 2]) * 16, namespace=b"tenant",
            predicted=predicted.get((submit.id, 0), []),
        )
        for i, submit in enumerate(submits)
    ]


def run(engine, asks: list[Submit], disturb, aborts: bool) -> dict:
    """All of them at once, some beside others that are given up in the middle."""
    left = [msgspec.structs.replace(ask, id=f"left{i}", n=1) for i, ask in enumerate(asks)]
    started = Run(engine).put(*asks, *(left if aborts else ()))
    if aborts:
        for _ in range(9):
            engine.wait(5.0)
            started.step()
        started.put(*(Abort(ask.id) for ask in left))
    started.drain(disturb=disturb)
    assert not started.failed and not started.refused and engine.pool.used == 0
    return {key: got for key, got in started.tokens.items() if not key[0].startswith("left")}


@pytest.mark.parametrize("way, source, most, draw, grammar, n, end, depth", CASES)
def test_every_source_in_every_way_gives_the_same_tokens(
    folder, truth, way, source, most, draw, grammar, n, end, depth
):
    submits = requests(draw, grammar, n)
    expected = {key: tokens for submit in submits for key, tokens in truth(submit).items()}
    chance = random.Random(7)
    predicted = {key: edited(tokens, chance) for key, tokens in expected.items()}
    settings = dict(WAYS[way])
    disturb = preempt_some if settings.pop("disturb", False) else None
    settings.pop("together", None)
    engine = make(folder, drafts=Eager(SOURCES[source]), max_drafts=most, depth=depth, **settings)
    for turn in range(2):  # the second has a warm cache, and a session that says the same again
        asks = in_session(submits, turn, predicted if source == "predicted" else {})
        got = run(engine, asks, disturb, end == "aborts")
        assert {(id.split(".")[0], index): text for (id, index), text in got.items()} == expected
    if source != "forced":
        assert engine.guessing.matched["suffix"] + engine.guessing.matched["prediction"] > 0
    if source == "predicted":
        assert engine.guessing.verified["prediction"] > 0
    if source in ("forced", "hybrid") and grammar == "json":
        assert engine.guessing.matched["forced"] > 0


def test_a_session_that_ended_is_quoted_no_more(folder):
    said = list(range(30, 90))
    first, again = (
        Submit(f"r{turn}", [*said[:3], turn], 8, DRAWS["greedy"], session=b"s" * 16)
        for turn in range(2)
    )
    engine = make(folder, drafts=Eager(("suffix",)), max_drafts=8)
    answers(engine, first)
    texts = engine.guessing.host._suffix._sessions
    assert texts.nbytes > 0 and len(texts._named) == 1
    engine.inbox.put(SessionEnd(b"s" * 16))
    engine.step()
    assert not texts._named and texts.nbytes == 0
    answers(engine, again)
