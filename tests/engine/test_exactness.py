"""The engine's promise: output is a function of weights, prompt, parameters and seed alone.

Every way to run a request (batch, chunks, cache, preemption, drafts of any kind, fork) gives the
same tokens in fp64, for every way to draw them.  Pairs of settings are covered pairwise.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from engine.messages import Submit
from tests.driver import Run, answers, make
from tests.exact import DRAWS, GRAMMARS, VOCAB, WAYS, pairwise, preempt_some, requests
from tests.proposers import (
    AdversarialDrafts,
    ForcedDrafts,
    OracleDrafts,
    RandomDrafts,
    RandomHead,
)
from tests.scripted import EOS
from tests.tiny import write_llama

DRAFTS = ["none", "random", "oracle", "adversarial", "forced", "head"]
DEPTHS = [1, 2, 5, 8]
CHOICES = [1, 2]

CASES = pairwise(list(WAYS), DRAFTS, DEPTHS, list(DRAWS), list(GRAMMARS), CHOICES)
# Drafts need the newest token, so that with them the loop never runs ahead.
AHEAD = pairwise(list(WAYS), list(DRAWS), list(GRAMMARS), CHOICES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("exact") / "model", max_len=512)


@pytest.fixture(scope="module")
def truth(folder):
    """One request at a time, no cache, no drafts, whole prompts: what all others must equal."""
    engine = make(folder, prefix_caching=False, max_batch_tokens=4096)
    known = {}

    def ask(submit: Submit) -> dict:
        key = msgspec.msgpack.encode(submit)
        if key not in known:
            known[key] = answers(engine, submit)
        return known[key]

    return ask


def proposer(kind: str, expected: dict):
    match kind:
        case "random":
            return RandomDrafts(VOCAB, 1)
        case "oracle":
            return OracleDrafts(expected, 2)
        case "adversarial":
            return AdversarialDrafts(expected, VOCAB, EOS, 3)
        case "forced":
            return ForcedDrafts()
    return None


@pytest.mark.parametrize("way, drafts, depth, draw, grammar, n", CASES)
def test_every_way_to_run_a_request_gives_the_same_tokens(
    folder, truth, way, drafts, depth, draw, grammar, n
):
    submits = requests(draw, grammar, n)
    expected = {key: tokens for submit in submits for key, tokens in truth(submit).items()}
    settings = dict(WAYS[way])
    together = settings.pop("together", False)
    disturb = preempt_some if settings.pop("disturb", False) else None
    head = RandomHead(64, VOCAB, (0, 1)) if drafts == "head" else None
    engine = make(
        folder, drafts=proposer(drafts, expected), head=head, max_drafts=depth, **settings
    )
    got = {}
    for group in [submits] if together else [[submit] for submit in submits]:
        got |= answers(engine, *group, disturb=disturb)
    assert got == expected
    if way == "preempted":
        assert engine.scheduler.preemptions > 0
    if way == "chunked":
        assert engine.scheduler.prefix_hits >= 128
    if drafts == "oracle":
        assert engine.guessing.accepted > 0
    if drafts == "head":
        assert head.steps > 0 and engine.guessing.drafted > 0


@pytest.mark.parametrize("way, draw, grammar, n", AHEAD)
def test_a_loop_that_runs_ahead_gives_the_same_tokens(folder, truth, way, draw, grammar, n):
    submits = requests(draw, grammar, n)
    expected = {key: tokens for submit in submits for key, tokens in truth(submit).items()}
    settings = dict(WAYS[way])
    together = settings.pop("together", False)
    disturb = preempt_some if settings.pop("disturb", False) else None
    engine = make(folder, depth=1, **settings)
    got = {}
    for group in [submits] if together else [[submit] for submit in submits]:
        got |= answers(engine, *group, disturb=disturb)
    assert got == expected


def test_choices_of_one_request_differ_when_sampled_and_agree_when_greedy(truth):
    hot = truth(requests("hot", "free", 2)[0])
    cold = truth(requests("greedy", "free", 2)[0])
    assert hot["r0", 0] != hot["r0", 1]
    assert cold["r0", 0] == cold["r0", 1]


def test_the_texts_are_not_trivial(truth):
    seen = [tuple(truth(s)[s.id, 0]) for d in DRAWS for s in requests(d, "free", 1)]
    assert len(set(seen)) > len(seen) * 0.8
    assert max(len(set(text)) for text in seen) > 20


# ---- breaking one row of one thing must be noticed ---------------------------------------------


def differs(folder, truth, draw, grammar, depth=5):
    """Whether some answer is not the truth; a request that fails altogether is one."""
    submits = requests(draw, grammar, 1)
    expected = {key: tokens for submit in submits for key, tokens in truth(submit).items()}
    run = Run(make(folder, drafts=OracleDrafts(expected, 2), max_drafts=depth))
    return run.put(*submits).drain().tokens != expected


@pytest.mark.parametrize(
    "draw, grammar, depth",
    [
        ("hot", "json", 5),
        ("hot", "free", 5),
        ("greedy-penalised", "free", 8),
        ("greedy", "free", 5),
    ],
)
def test_nothing_differs_when_nothing_is_broken(folder, truth, draw, grammar, depth):
    assert not differs(folder, truth, draw, grammar, depth)


def test_a_wrong_mask_row_is_noticed(folder, truth, monkeypatch):
    from engine.grammar.masks import Masks

    fill = Masks.fill

    def shifted(self, requests, *given):
        masks = fill(self, requests, *given)
        for row, _, drafts in requests:
            if len(drafts) > 1:
                masks[row + 1] = masks[row]
        return masks

    monkeypatch.setattr(Masks, "fill", shifted)
    assert differs(folder, truth, "hot", "json")


def test_a_wrong_noise_key_is_noticed(folder, truth, monkeypatch):
    import engine.runner as runner

    rows = runner._sample_rows

    def shifted(share):
        found = rows(share)
        for row in found[1:2]:
            row.position += 1
        return found

    monkeypatch.setattr(runner, "_sample_rows", shifted)
    assert differs(folder, truth, "hot", "free")


def test_a_wrong_history_is_noticed(folder, truth, monkeypatch):
    import engine.runner as runner

    rows = runner._sample_rows

    def forgetful(share):
        found = rows(share)
        for row in found:
            row.drafted = ()
        return found

    monkeypatch.setattr(runner, "_sample_rows", forgetful)
    assert differs(folder, truth, "greedy-penalised", "free", depth=8)


@pytest.mark.parametrize("draw, grammar", [("hot", "json"), ("greedy-penalised", "free")])
def test_settling_before_the_host_knows_the_last_token_is_noticed(
    folder, truth, monkeypatch, draw, grammar
):
    from engine.loop import Engine

    submits = requests(draw, grammar, 1)
    expected = {key: tokens for submit in submits for key, tokens in truth(submit).items()}
    assert Run(make(folder, depth=1)).put(*submits).drain().tokens == expected
    monkeypatch.setattr(Engine, "_needs_host", lambda self, plan: False)
    assert Run(make(folder, depth=1)).put(*submits).drain().tokens != expected


def test_a_newest_token_of_somebody_else_is_noticed(folder, truth, monkeypatch):
    import engine.runner as runner

    pack = runner.pack

    def shifted(rows, size, device):
        batch = pack(rows, size, device)
        places, owners = zip(*batch.origins, strict=True) if batch.origins else ((), ())
        return replace(batch, origins=tuple(zip(places, owners[1:] + owners[:1], strict=True)))

    submits = requests("greedy", "free", 1)
    expected = {key: tokens for submit in submits for key, tokens in truth(submit).items()}
    monkeypatch.setattr(runner, "pack", shifted)
    assert Run(make(folder, depth=1)).put(*submits).drain().tokens != expected


def test_kv_in_a_wrong_slot_is_noticed(folder, truth, monkeypatch):
    import engine.runner as runner

    pack = runner.pack

    def shifted(rows, size, device):
        batch = pack(rows, size, device)
        if any(row.drafts > 1 for row in rows):
            batch.slots[-1] = batch.slots[-2]  # the last draft's KV lands on its neighbour's
        return batch

    monkeypatch.setattr(runner, "pack", shifted)
    assert differs(folder, truth, "greedy", "free")
