"""What a request finds in the cache, what it leaves there, who keeps what.  Not the pool."""

from __future__ import annotations

import math
import random

import pytest
import torch

import cache.prefix as prefix
from engine.messages import Sampling, SessionEnd, Submit, TurnEnd
from tests.driver import Run, answers, make
from tests.proposers import RandomDrafts
from tests.tiny import write_llama

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("caching") / "model", max_len=512)


def prompt(length: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(length)]


def test_cached_tokens_are_frozen_at_first_admission(folder):
    engine = make(folder)
    shared = prompt(200)
    answers(engine, Submit("first", shared, 4, GREEDY))
    run = Run(engine).put(Submit("second", [*shared, 7, 8], 12, GREEDY))
    for number in range(100):
        run.step()
        if engine.scheduler.running and number % 3 == 1:
            engine.scheduler.preempt(engine.scheduler.running[0])
        if not engine.busy:
            break
    assert {out.cached for out in run.outs["second", 0]} == {200}  # to the token, not the block
    assert run.outs["second", 0][-1].written == 0


def test_a_fully_cached_prompt_still_computes_its_last_token(folder):
    engine = make(folder)
    whole = prompt(128)
    first = answers(engine, Submit("a", whole, 3, GREEDY))
    run = Run(engine).put(Submit("b", whole, 3, GREEDY)).drain()
    assert run.outs["b", 0][-1].cached == 127
    assert run.tokens["b", 0] == first["a", 0]


def test_written_tokens_are_those_whose_blocks_became_findable(folder):
    engine = make(folder)
    run = Run(engine).put(Submit("a", prompt(150), 60, GREEDY)).drain()
    assert run.outs["a", 0][-1].written == 150  # the third block was finished by the output
    run = Run(engine).put(Submit("b", prompt(150), 2, GREEDY)).drain()
    assert run.outs["b", 0][-1].cached == 149 and run.outs["b", 0][-1].written == 0


def test_tenants_never_share_blocks(folder):
    engine = make(folder)
    answers(engine, Submit("a", prompt(200), 2, GREEDY, namespace=b"one"))
    run = Run(engine).put(Submit("b", prompt(200), 2, GREEDY, namespace=b"two")).drain()
    assert run.outs["b", 0][-1].cached == 0
    run = Run(engine).put(Submit("c", prompt(200), 2, GREEDY, namespace=b"one")).drain()
    assert run.outs["c", 0][-1].cached == 192


def test_a_sessions_blocks_outlive_a_flood_over_the_tool_gap(folder):
    kept = {}
    for pinned in (True, False):
        engine = make(folder, blocks=16)
        answers(engine, Submit("turn", prompt(250), 4, GREEDY, session=b"k" * 16))
        Run(engine).put(TurnEnd(b"k" * 16, pinned)).step()
        assert engine.stats().sessions_pinned == pinned
        answers(engine, *(Submit(f"f{i}", prompt(200, 50 + i), 4, GREEDY) for i in range(8)))
        kept[pinned] = engine.scheduler.lookup(_root(), prompt(250))
    assert kept[True] == 249 and kept[False] < 192


def test_an_ended_session_goes_first(folder):
    engine = make(folder, blocks=18)
    answers(engine, Submit("turn", prompt(250), 4, GREEDY, session=b"k" * 16))
    answers(engine, Submit("other", prompt(250, 2), 4, GREEDY))
    Run(engine).put(TurnEnd(b"k" * 16, True), SessionEnd(b"k" * 16)).step()
    assert engine.stats().sessions_pinned == 0
    for seed in (3, 4):  # the second one needs three blocks of somebody else's
        answers(engine, Submit("flood", prompt(400, seed), 4, GREEDY))
    kept = [engine.scheduler.lookup(_root(), prompt(250, seed)) for seed in (1, 2)]
    assert kept[0] < 192 <= kept[1]


def _root() -> bytes:
    return prefix.root(b"")


def test_attention_reads_only_the_sequences_own_blocks(folder):
    engine = make(folder, blocks=32)
    ask = Submit("a", prompt(200), 30, GREEDY)
    expected = answers(engine, ask)
    engine = make(folder, blocks=32)
    engine.runner.pages.data.fill_(math.nan)

    def poison(engine, _):
        own = {b.id for s in engine.scheduler.running for b in s.blocks}
        others = torch.tensor([i for i in range(32) if i not in own])
        if not any(seq.keys for seq in engine.scheduler.waiting):
            engine.runner.pages.data.index_fill_(1, others, math.nan)

    assert answers(engine, ask, disturb=poison) == expected


def test_written_tokens_are_counted_once_however_often_they_are_computed(folder):
    engine = make(folder, prefix_caching=True, blocks=8)
    run = Run(engine).put(Submit("a", prompt(200), 30, GREEDY))
    for number in range(40):
        run.step()
        if number == 5:
            engine.scheduler.preempt(engine.scheduler.running[0])
            taken = engine.pool.take(engine.pool.available)  # evicts what it had published
            engine.pool.release(taken)
        if not engine.busy:
            break
    assert run.finish(("a", 0)) == "length"
    assert run.outs["a", 0][-1].written == 200


def test_nothing_is_published_beyond_what_was_accepted(folder):
    ask = Submit("a", prompt(60), 100, GREEDY)
    engine = make(folder, drafts=RandomDrafts(259, 2), max_drafts=8)
    text = answers(engine, ask)["a", 0]
    whole = [*prompt(60), *text]
    assert engine.scheduler.lookup(_root(), whole) == 159  # all but the newest token
    assert engine.pool.cached == 3
    again = answers(make(folder), Submit("b", whole, 20, GREEDY))
    assert answers(engine, Submit("b", whole, 20, GREEDY)) == again
