"""An EAGLE-3 head named on the command line, in the engine that it makes.  Trains none."""

from __future__ import annotations

import json

import pytest

from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loop import Engine
from engine.model_config import BadCheckpoint
from speculative import probe
from speculative.ahead import FIRST
from speculative.served import configured
from tests.driver import answers, make
from tests.exact import requests
from tests.head_files import a_head, written
from tests.tiny import write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("served") / "model", layers=8, max_len=512)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "head"
    return written(folder, "specforge", *a_head())


def asked(model, head, method: str) -> EngineConfig:
    text = json.dumps({"method": method, "model": str(head), "num_speculative_tokens": 4})
    return configured(EngineConfig(
        model=str(model), dtype="float64", device="cpu", threads=1, speculative=text,
        cache=CacheConfig(blocks=256),
    ))  # fmt: skip


def test_a_head_that_guesses_nothing_right_is_refused_before_it_serves(model, head) -> None:
    with pytest.raises(BadCheckpoint, match="costs more than it gives"):
        Engine(asked(model, head, "eagle3"), open_checkpoint(str(model)))


@pytest.mark.parametrize("method", ["eagle3", "hybrid"])
@pytest.mark.parametrize(("draw", "grammar"), [("greedy", "free"), ("hot", "json")])
def test_an_engine_with_a_head_says_what_one_without_says(
    model, head, method, draw, grammar, monkeypatch
) -> None:
    monkeypatch.setattr(probe.probe, "__defaults__", (0.0,))  # this one was never taught
    engine = Engine(asked(model, head, method), open_checkpoint(str(model)))
    mine = ["forced", "suffix"] if method == "hybrid" else []
    assert engine.hello.draft_sources == [*mine, "eagle3"]
    engine.guessing.host.timed = lambda *given: None  # rows stay as cheap as believed
    for ahead in engine.guessing.host._ahead:
        ahead._turn = FIRST  # it has looked at steps without a chain
        ahead.alone._row = 1e-9
    submits = requests(draw, grammar, 2)
    assert answers(engine, *submits) == answers(make(model), *submits)
    assert engine.guessing.verified["eagle3"] > 0
    if method == "hybrid" and grammar == "json":
        assert engine.guessing.matched["forced"] > 0
