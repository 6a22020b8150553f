"""The unroll against the head as it serves, and the packed target against the engine."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint import open_checkpoint
from speculative.head import Head
from speculative.train.packing import Corpus
from speculative.train.unroll import Drawn, Whole, fresh, head_config, losses, unroll
from tests.training import VOCAB, fill, open_target, target_folder

LENGTH, STEPS = 160, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    model = target_folder(root / "model", damping=0.6)
    fill(model, root / "shards", count=9, length=40)
    return root


@pytest.fixture(scope="module")
def target(folder):
    return open_target(folder / "model", LENGTH)


@pytest.fixture(scope="module")
def corpus(folder):
    return Corpus.open(folder / "shards", LENGTH, 0, held_out=False)


@pytest.fixture(scope="module")
def config(folder):
    return head_config(open_checkpoint(str(folder / "model")).config, 100)


@pytest.fixture(scope="module")
def kept():
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:100].sort().values


def test_boundaries_are_those_of_published_heads(config):
    assert config.taps == (2, 4, 5)


def test_packed_rows_give_what_the_engine_said(target, corpus):
    row = corpus.rows(0)[0]
    assert len(row) > 1
    batch = corpus.batch([row])
    _, last = target.run(batch)
    said = target.model.logits(last[0]).argmax(-1)
    checked = 0
    for document, i in enumerate(row):
        entry, ids = corpus.sequences[i]
        if entry.temperature:
            continue
        at = (batch.documents[0] == document).nonzero().view(-1)
        answer = ids[entry.prompt :].tolist()
        assert said[at[entry.prompt - 1 : -1]].tolist() == answer
        checked += 1
    assert checked


class Serving:
    """One sequence's keys and values, as a cache has them."""

    def __init__(self, config) -> None:
        self.keys = self.values = None
        self.config = config

    def keep(self, count: int) -> None:
        """Forget all rows but the first `count`."""
        if self.keys is not None:
            self.keys, self.values = self.keys[:count], self.values[:count]

    def __call__(self, layer, query, keys, values):
        past = 0 if self.keys is None else len(self.keys)
        self.keys = keys if past == 0 else torch.cat((self.keys, keys))
        self.values = values if past == 0 else torch.cat((self.values, values))
        groups = self.config.heads // self.config.kv_heads
        seen = self.keys.repeat_interleave(groups, 1), self.values.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, seen[0]) * self.config.head_dim**-0.5
        places = torch.arange(len(self.keys))
        scores = scores.masked_fill(places > past + torch.arange(len(query))[:, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), seen[1]).flatten(1)


def served(head: Head, config, features, ids, start: int, steps: int):
    """Logits of a chain that begins at `start`: true rows up to it, then the head's own."""
    cache = Serving(config)
    rows = slice(0, start + 1)
    state = head.run(
        head.fuse(features[rows]), ids[1 : start + 2], torch.arange(start + 1), cache)
    feature, logits = head.read(state[-1:])
    found = [logits[0]]
    for step in range(1, steps):
        token, place = ids[start + 1 + step : start + 2 + step], torch.tensor([start + step])
        feature, logits = head.read(head.run(feature, token, place, cache))
        found.append(logits[0])
    return found


def test_unrolled_logits_are_those_of_serving(target, corpus, config, kept):
    row = corpus.rows(0)[0]
    batch = corpus.batch([row])
    features, last = target.run(batch)
    wanted = target.wanted(batch, last, kept)
    weights = fresh(config, target.head, target.model.norm, kept, 3)
    weights = {name: value.double() for name, value in weights.items()}
    drawn = list(unroll(weights, config, batch, features, wanted, target.embedding, STEPS))
    head = Head(config, weights, target.embedding, kept, LENGTH)
    compared = 0
    for document, i in enumerate(row):
        entry, ids = corpus.sequences[i]
        own = (batch.documents[0] == document).nonzero().view(-1)
        ids = torch.from_numpy(ids.astype("int64"))
        for start in (entry.prompt - 1, entry.prompt + 4, entry.length - 3):
            steps = min(STEPS, entry.length - 2 - start)
            expected = served(head, config, features[0, own], ids, start, steps)
            chain = (batch.starts[0] == own[start]).nonzero()[0, 0]
            for one, logits in zip(drawn, expected, strict=False):
                place = int((one.chains == chain).nonzero())
                torch.testing.assert_close(one.logits[place], logits, atol=1e-9, rtol=1e-9)
                compared += 1
    assert compared >= 2 * len(row)


def test_wanted_rows_are_the_target_s_own_distributions(target, corpus, kept):
    row = corpus.rows(0)[0]
    batch = corpus.batch([row])
    _, last = target.run(batch)
    wanted = target.wanted(batch, last, kept)
    share = target.model.logits(last[0]).softmax(-1)
    live = batch.left[0] > 0
    for start in batch.starts[0][live][::7].tolist():
        number = int(wanted.row[0, start + 1])
        torch.testing.assert_close(wanted.share[number], share[start + 1][kept])
        best = int(share[start + 1].argmax())
        assert bool(wanted.inside[number]) is (best in kept.tolist())
        if wanted.inside[number]:
            assert int(kept[wanted.best[number]]) == best


def alone(wanted, *drawn, hybrid):
    """The losses of one batch that is all there is."""
    chains, inside = len(wanted.inside), wanted.inside.sum()
    whole = Whole([chains] * len(drawn), [inside] * len(drawn))
    return losses(iter(drawn), wanted, whole, hybrid=hybrid)


def test_a_token_outside_teaches_nothing_but_counts_as_wrong(target, corpus, config, kept):
    batch = corpus.batch(corpus.rows(0)[:1])
    _, last = target.run(batch)
    wanted = target.wanted(batch, last, kept)
    inside = wanted.inside
    assert inside.any() and not inside.all()
    everyone = torch.arange(len(inside))
    perfect = (wanted.share / wanted.share.sum(-1, keepdim=True)).log()
    found = alone(wanted, Drawn(perfect, everyone, everyone), hybrid=False)
    assert float(found.loss) == pytest.approx(0.0, abs=1e-9)
    assert float(found.right[0]) == pytest.approx(float(inside.double().mean()))
    spoiled = perfect.clone()
    spoiled[~inside] = torch.randn(int((~inside).sum()), len(kept), dtype=torch.float64)
    again = alone(wanted, Drawn(spoiled, everyone, everyone), hybrid=False)
    assert float(again.loss) == pytest.approx(0.0, abs=1e-9)


def test_later_steps_weigh_less_and_the_hybrid_rewards_overlap(target, corpus, kept):
    batch = corpus.batch(corpus.rows(0)[:1])
    _, last = target.run(batch)
    wanted = target.wanted(batch, last, kept)
    everyone = torch.arange(len(wanted.inside))
    flat = torch.zeros(len(everyone), len(kept), dtype=torch.float64)
    one = Drawn(flat, everyone, everyone)
    once = float(alone(wanted, one, hybrid=False).loss)
    twice = float(alone(wanted, one, one, hybrid=False).loss)
    assert twice == pytest.approx(1.8 * once)
    mixed = float(alone(wanted, one, hybrid=True).loss)
    assert 0 < mixed < once
