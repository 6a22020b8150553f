"""The head that comes with the built-in model: found, left out, as good as its card says."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loop import Engine
from engine.messages import Submit
from engine.proposer import head_maker
from speculative import served
from speculative.served import OWN_HEADS, configured
from speculative.train.card import Card
from speculative.train.generate import submit_of
from speculative.train.stages import held_out
from tests.driver import Run
from tests.tiny import write_llama

MODEL = "smollm2"
K = 4


def maker(text: str, kind: str = "cpu", model: str = MODEL):
    config = configured(EngineConfig(model=model, speculative=text))
    return head_maker(config.resolved(kind), kind)


def test_it_is_used_where_drafts_are_unless_another_or_none_is_asked_for(tmp_path, monkeypatch):
    for text in ("auto", "{}", '{"method": "eagle3"}', '{"num_speculative_tokens": 3}'):
        assert maker(text) is not None, text
    for text in ("off", '{"method": "suffix"}', '{"model": ""}'):
        assert maker(text) is None, text
    assert maker("auto", "cuda") is not None and maker("off", "cuda") is None
    assert maker("auto", model="other") is None
    assert maker(f'{{"model": "{tmp_path}"}}')._path == str(tmp_path)
    monkeypatch.setitem(served.OWN_HEADS, MODEL, tmp_path / "missing")
    assert maker("auto") is None


def test_one_that_does_not_fit_is_left_out_and_said(tmp_path, monkeypatch, caplog):
    """As when another file is served under the model's name."""
    folder = write_llama(tmp_path / "model")
    monkeypatch.setitem(served.OWN_HEADS, str(folder), OWN_HEADS[MODEL])
    config = configured(EngineConfig(model=str(folder), device="cpu"))
    with caplog.at_level(logging.WARNING, logger="speculative.served"):
        engine = Engine(config, open_checkpoint(str(folder)))
    assert engine.hello.draft_sources == ["forced", "suffix"]
    assert "without the draft head" in caplog.text
    engine.close()


@pytest.mark.model
def test_its_chains_are_as_often_right_as_its_card_says():
    """The gate against a change that makes drafts worse without changing any answer."""
    card, checkpoint = Card.read(OWN_HEADS[MODEL]), open_checkpoint(MODEL)
    said = next(row for row in card.rows if row.domain == "all").tau[K - 1]
    config = EngineConfig(model=MODEL, device="cpu", speculative='{"method": "eagle3"}',
                          max_drafts=K)
    engine = Engine(configured(config), checkpoint)
    engine.guessing.host = None  # every chain is verified whole
    asked = [
        replace(submit_of(one, engine.hello.stop_ids), max_tokens=40, drafts="auto")
        for one in held_out("gateway.asked:Asker", checkpoint, card.run, 12)
    ]
    cold, text = tau(engine, asked)
    assert cold > 0.85 * said, (cold, said)
    # The head's own KV of a prompt in the cache is what a cold prompt gives.
    warm, again = tau(engine, asked)
    assert again == text and warm == pytest.approx(cold, rel=0.02)
    engine.close()


def tau(engine: Engine, asked: list[Submit]) -> tuple[float, dict]:
    guessing = engine.guessing
    before = guessing.accepted, guessing.rounds
    run = Run(engine).put(*asked).drain()
    assert not run.failed and not run.refused
    rounds = guessing.rounds - before[1]
    assert rounds > 100
    return 1 + (guessing.accepted - before[0]) / rounds, run.tokens
