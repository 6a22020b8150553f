"""The engine's promise: output is a function of weights, prompt, parameters and seed alone.

Every way to run a request (batch, chunks, cache, preemption, drafts of any kind, fork) gives the
same tokens in fp64, for every way to draw them.  Pairs of settings are covered pairwise.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import msgspec
import pytest

from engine.messages import Grammar, Sampling, Submit
from tests.driver import Run, answers, make
from tests.proposers import (
    AdversarialDrafts,
    ForcedDrafts,
    OracleDrafts,
    RandomDrafts,
    RandomHead,
)
from tests.scripted import EOS
from tests.tiny import write_llama

VOCAB = 259

DRAWS = {
    "greedy": Sampling(temperature=0.0),
    "hot": Sampling(temperature=1.0, seed=11),
    "top": Sampling(temperature=0.8, top_p=0.8, top_k=40, min_p=0.02, seed=12),
    "penalised": Sampling(temperature=0.7, repetition=1.2, frequency=0.4, presence=0.3, seed=13),
    "greedy-penalised": Sampling(temperature=0.0, repetition=1.3, presence=0.5),
    "biased": Sampling(temperature=0.9, bias=((65, 3.0), (EOS, 1.0)), min_tokens=5, seed=14),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "array", "items": {"enum": ["mon", "tue"]}, "minItems": 1, "maxItems": 3},
        "n": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "days", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"start: %json {json.dumps(SCHEMA)}"
GRAMMARS = {
    "free": None,
    "json": Grammar(JSON),
    "choice": Grammar('start: "<a>" ("yes" | "no" | /[0-9]{3,9}/)+ "</a>"'),
    "tight": Grammar(JSON),  # with so few tokens that closing plans have to speak
}
BUDGETS = {"json": 80, "tight": len('{"city":"","days":["mon"],"n":1}')}
WAYS = {
    "batch": {"together": True},
    "chunked": {"max_batch_tokens": 24, "mixed_tokens": 9},
    "uncached": {"prefix_caching": False},
    "preempted": {"together": True, "blocks": 11, "max_batch_tokens": 64, "disturb": True},
    "whole": {"max_batch_tokens": 2048},
}


def preempt_some(engine, number):
    """Every third step somebody loses its blocks, whoever it is."""
    running = engine.scheduler.running
    if running and number % 3 == 2:
        engine.scheduler.preempt(running[number % len(running)])


DRAFTS = ["none", "random", "oracle", "adversarial", "forced", "head"]
DEPTHS = [1, 2, 5, 8]
CHOICES = [1, 2]


def pairwise(*axes, seed=5):
    """Rows that hold every pair of values of every two axes: greedy, near the fewest."""
    chance = random.Random(seed)
    missing = {
        (i, a, j, b)
        for (i, left), (j, right) in itertools.combinations(enumerate(axes), 2)
        for a in left
        for b in right
    }
    rows = []
    while missing:
        pool = [tuple(chance.choice(axis) for axis in axes) for _ in range(60)]
        i, a, j, b = next(iter(sorted(missing, key=repr)))
        wanted = {i: a, j: b}
        pool = [tuple(wanted.get(n, value) for n, value in enumerate(row)) for row in pool]

        def gain(row):
            return sum(
                (n, x, m, y) in missing
                for (n, x), (m, y) in itertools.combinations(enumerate(row), 2)
            )

        best = max(pool, key=gain)
        missing -= {
            (n, x, m, y) for (n, x), (m, y) in itertools.combinations(enumerate(best), 2)
        }
        rows.append(best)
    return rows


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


def requests(draw: str, grammar: str, n: int) -> list[Submit]:
    """Four requests: two share a prefix of more than two blocks, one is short, one is long."""
    chance = random.Random(99)
    shared = [chance.randrange(256) for _ in range(150)]
    prompts = [
        [*shared, 1, 2, 3],
        [*shared, 9, 8],
        [chance.randrange(256) for _ in range(5)],
        [chance.randrange(256) for _ in range(128)],  # ends on a block's edge
    ]
    return [
        Submit(
            f"r{i}", prompt, BUDGETS.get(grammar, 40) + i,
            msgspec.structs.replace(DRAWS[draw], seed=DRAWS[draw].seed + i),
            n=n, stop_ids=[EOS], grammar=GRAMMARS[grammar],
        )
        for i, prompt in enumerate(prompts)
    ]


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
        assert engine._accepted > 0
    if drafts == "head":
        assert head.steps > 0 and engine._drafted > 0


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

    def shifted(self, requests, rows=None):
        masks = fill(self, requests, rows)
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
    monkeypatch.setattr(Engine, "_needs_host", lambda self, plan, masked: False)
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
