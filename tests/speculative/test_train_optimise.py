"""Training itself: it learns, it stops and goes on to the bit, and what it exports is what it had.

One training of 200 steps, shared by the tests of this file.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from engine.messages import Sampling, Submit
from speculative.checkpoint import open_head
from speculative.suffix import SuffixDrafts
from speculative.train import vocabulary
from speculative.train.evaluate import PLACES, _compared, _sampling, evaluate, suffix_steps, walked
from speculative.train.export import export
from speculative.train.optimise import AUTO, STATE, WARM, Point, Training, one_step, train
from speculative.train.packing import Corpus
from speculative.train.shards import Entry
from speculative.train.unroll import Drawn, head_config, unroll
from tests.driver import Run, make
from tests.training import RECIPE, VOCAB, Clock, chance, fill, open_target, target_folder

KEPT = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    fill(target_folder(root / "model"), root / "shards", count=48, length=96)
    return root


@pytest.fixture(scope="module")
def world(folder):
    """Target, kept ids, head's shape, corpus."""
    target = open_target(folder / "model", RECIPE.length, torch.float32)
    names = vocabulary.choose(vocabulary.count(folder / "shards"), KEPT, [258])
    config = head_config(target.config, KEPT)
    corpus = Corpus.open(folder / "shards", RECIPE.length, RECIPE.seed, held_out=False)
    return target, torch.tensor(names.ids), config, corpus, names


@pytest.fixture(scope="module")
def trained(world, folder):
    target, kept, config, corpus, _ = world
    training = Training.begin(config, RECIPE, target, kept)
    told = train(training, target, corpus, kept, folder, tell_every=10)
    return training, told


def test_the_loss_falls_and_the_first_token_is_found_far_above_chance(trained):
    training, told = trained
    assert training.step == RECIPE.steps
    assert told[-1].step == RECIPE.steps - 1
    last = told[-4:]
    assert sum(p.loss for p in last) / 4 < 0.5 * told[0].loss
    assert told[-1].loss < 0.5 * chance() * sum(0.8**s for s in range(RECIPE.unroll))
    right = sum(p.right[0] for p in last) / 4
    assert right > 0.4  # one of 259 by chance
    assert sum(p.alpha[0] for p in last) / 4 > 0.3


def test_held_out_answers_are_judged_better_than_before_training(world, trained, folder):
    target, kept, config, _, _ = world
    held = Corpus.open(folder / "shards", RECIPE.length, 0, held_out=True)
    before = Training.begin(config, RECIPE, target, kept)
    rows = {}
    for name, training in (("before", before), ("after", trained[0])):
        found = evaluate(training.weights, config, target, held, kept, suffix_every=1)
        rows[name] = {(row.domain, row.temperature): row for row in found}
    everyone, greedy = rows["after"]["all", -1.0], rows["after"]["chat", 0.0]
    assert everyone.answers == len(held.sequences)
    former = rows["before"]["all", -1.0]
    assert everyone.full_accuracy[0] > 0.4 > 1.3 * former.full_accuracy[0]
    assert everyone.tau[3] > former.tau[3] + 0.1
    assert {domain for domain, _ in rows["after"]} == {"all", "chat", "tool"}
    for row in found:
        assert 1 <= row.tau[0] <= 2
        assert row.tau[0] < max(row.tau) <= PLACES + 1
        assert row.full_accuracy == sorted(row.full_accuracy, reverse=True)
        assert row.full_accuracy[0] == row.conditional_accuracy[0] == row.agreement[0]
        assert 1 <= row.suffix_tau[3] < 5
    assert greedy.chains == everyone.chains * greedy.answers / everyone.answers


@pytest.mark.parametrize("cut", [3, 7])
def test_a_training_that_was_cut_goes_on_to_the_bit(world, tmp_path, cut):
    target, kept, config, corpus, _ = world
    recipe = msgspec.structs.replace(RECIPE, steps=10, hybrid=0.5, micro=2)
    whole = Training.begin(config, recipe, target, kept)
    (tmp_path / "whole").mkdir()
    train(whole, target, corpus, kept, tmp_path / "whole")
    part = Training.begin(config, recipe, target, kept)
    while part.step < cut:
        one_step(part, target, corpus, kept)
    part.save(tmp_path / STATE)
    rest = Training.begin(config, recipe, target, kept)
    rest.restore(tmp_path / STATE)
    assert rest.step == cut
    train(rest, target, Corpus(corpus.sequences, recipe.length, recipe.seed), kept, tmp_path)
    assert rest.step == whole.step == 10
    for name, value in whole.weights.items():
        assert torch.equal(value, rest.weights[name]), name
    assert (tmp_path / STATE).read_bytes() == (tmp_path / "whole" / STATE).read_bytes()


@pytest.mark.parametrize("hybrid", [0.0, 1.0])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_step_in_pieces_is_the_undivided_one(world, folder, monkeypatch, micro, hybrid):
    """fp64 throughout, answers of all lengths: gradients, losses and shares to rounding."""
    monkeypatch.setattr("speculative.train.optimise._read", lambda x, _: x)
    _, kept, config, corpus, _ = world
    target = open_target(folder / "model", RECIPE.length)
    draw = np.random.default_rng(0)
    cut = [
        (msgspec.structs.replace(entry, length=length), ids[:length])
        for entry, ids in corpus.sequences
        for length in [entry.prompt + int(draw.integers(2, 60))]
    ]
    corpus = Corpus(cut, RECIPE.length, RECIPE.seed)
    recipe = msgspec.structs.replace(RECIPE, rows=5, unroll=4, hybrid=hybrid)
    found = {}
    for rows in (0, micro):
        training = Training.begin(
            config, msgspec.structs.replace(recipe, micro=rows), target, kept)
        training.weights = {
            name: torch.nn.Parameter(value.detach().double())
            for name, value in training.weights.items()
        }
        point = one_step(training, target, corpus, kept)
        found[rows] = point, {name: w.grad for name, w in training.weights.items()}
    (whole, expected), (parts, got) = found[0], found[micro]
    assert parts.tokens == whole.tokens
    assert len(parts.right) == 4 and whole.right[0] > whole.right[3] >= 0
    assert parts.loss == pytest.approx(whole.loss, rel=1e-9)
    assert parts.right == pytest.approx(whole.right, rel=1e-6)
    assert parts.alpha == pytest.approx(whole.alpha, rel=1e-9)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-11, rtol=1e-9, msg=name)


def test_time_decides_once_how_many_steps_there_will_be(world, tmp_path, monkeypatch):
    target, kept, config, corpus, _ = world
    rates = []

    def quick(training, *_):
        rates.append(training.recipe.rate_at(training.step, training.steps))
        training.step += 1
        return Point(training.step - 1, 1.0, [0.5], [0.5], 100)

    monkeypatch.setattr("speculative.train.optimise.one_step", quick)
    recipe = msgspec.structs.replace(RECIPE, steps=AUTO, rate=1e-3)
    training = Training.begin(config, recipe, target, kept)
    lines: list[str] = []
    train(training, target, corpus, kept, tmp_path, deadline=400.0, clock=Clock(2.0),
          tell=lines.append)
    assert 185 < training.step == training.steps <= 200
    assert sum("there is time for" in line for line in lines) == 1
    assert rates[0] == pytest.approx(1e-3 / WARM) and max(rates) == 1e-3
    assert rates[: WARM] == sorted(rates[: WARM]) and rates[WARM:] == sorted(rates[WARM:])[::-1]
    assert rates[-1] < 1e-6
    again = Training.begin(config, recipe, target, kept)
    again.restore(tmp_path / STATE)
    assert (again.step, again.steps) == (training.step, training.steps)


def test_a_plan_that_was_cut_goes_on_to_the_bit(world, tmp_path):
    target, kept, config, corpus, _ = world
    recipe = msgspec.structs.replace(RECIPE, steps=AUTO, hybrid=0.5, rows=2, micro=1)
    whole = Training.begin(config, recipe, target, kept)
    (tmp_path / "whole").mkdir()
    train(whole, target, corpus, kept, tmp_path / "whole", deadline=48.0, clock=Clock(1.0))
    assert 43 <= whole.steps == whole.step <= 48
    part = Training.begin(config, recipe, target, kept)
    # The same plan, but the clock leaps when it has been made.
    clock = Clock(1.0)
    train(part, target, corpus, kept, tmp_path, deadline=48.0,
          clock=lambda: clock() + (1e3 if part.step > 41 else 0))
    assert part.step < whole.steps == part.planned
    rest = Training.begin(config, recipe, target, kept)
    rest.restore(tmp_path / STATE)
    train(rest, target, corpus, kept, tmp_path, deadline=1e6, clock=Clock(99.0))
    assert (tmp_path / STATE).read_bytes() == (tmp_path / "whole" / STATE).read_bytes()


def test_acceptance_joins_the_loss_behind_its_share_of_a_known_plan():
    recipe = msgspec.structs.replace(RECIPE, hybrid=0.5)
    assert [recipe.mixes(step, 100) for step in (0, 49, 50, 99)] == [False, False, True, True]
    assert not recipe.mixes(40, 0)
    assert not msgspec.structs.replace(recipe, hybrid=1.0).mixes(99, 100)
    assert msgspec.structs.replace(recipe, hybrid=0.0).mixes(0, 0)


def test_time_that_never_ends_gives_no_plan(world, tmp_path):
    target, kept, config, corpus, _ = world
    training = Training.begin(config, msgspec.structs.replace(RECIPE, steps=AUTO), target, kept)
    with pytest.raises(ValueError, match="give --minutes"):
        train(training, target, corpus, kept, tmp_path)


def test_no_time_left_trains_nothing_but_leaves_a_state(world, tmp_path):
    target, kept, config, corpus, _ = world
    training = Training.begin(config, RECIPE, target, kept)
    train(training, target, corpus, kept, tmp_path, deadline=-math.inf)
    assert training.step == 0
    again = Training.begin(config, RECIPE, target, kept)
    again.restore(tmp_path / STATE)
    assert again.step == 0


def test_another_recipe_does_not_go_on_with_this_state(world, tmp_path):
    target, kept, config, _, _ = world
    Training.begin(config, RECIPE, target, kept).save(tmp_path / STATE)
    other = Training.begin(config, msgspec.structs.replace(RECIPE, rate=1e-4), target, kept)
    with pytest.raises(ValueError, match=r"rate 0\.01 there, 0\.0001 here"):
        other.restore(tmp_path / STATE)


def test_what_is_exported_loads_and_gives_the_trainer_s_logits(world, trained, tmp_path):
    target, kept, config, corpus, names = world
    weights = trained[0].weights
    size = export(tmp_path, weights, config, names, target.config, torch.float32)
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
    opened = open_head(
        str(tmp_path), target.config, target.embedding, target.head, RECIPE.length, torch.float32,
        torch.device("cpu"),
    ).head  # fmt: skip
    assert opened.config == config
    assert opened.kept.tolist() == names.ids
    row = corpus.rows(0)[0]
    batch = corpus.batch([row])
    features, last = target.run(batch)
    wanted = target.wanted(batch, last, kept)
    with torch.no_grad():
        first = next(unroll(weights, config, batch, features, wanted, target.embedding, 1))
    entry, ids = corpus.sequences[row[0]]
    ids = torch.from_numpy(ids.astype("int64"))

    def attend(layer, query, keys, values):
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query, keys, values)), is_causal=True,
            enable_gqa=True,
        )  # fmt: skip
        return mixed[0].transpose(0, 1).flatten(1)

    count = entry.length - 2
    state = opened.run(
        opened.fuse(features[0, :count]), ids[1 : count + 1], torch.arange(count), attend)
    _, logits = opened.read(state)
    own = first.logits[first.chains.argsort()][: count - entry.prompt + 1]
    torch.testing.assert_close(own, logits[entry.prompt - 1 :], atol=2e-4, rtol=2e-4)


def test_the_noise_of_an_answer_is_found_again(folder):
    """A head that is the target itself would draft every token of every answer."""
    target = open_target(folder / "model", RECIPE.length)
    corpus = Corpus.open(folder / "shards", RECIPE.length, 0, held_out=True)
    kept = torch.arange(VOCAB)
    rows = corpus.rows(0)
    batch = corpus.batch(rows)
    _, last = target.run(batch)
    wanted = target.wanted(batch, last, kept)
    chains, met = batch.living(0), wanted.met(batch, 0)
    seeds, heats = _sampling(batch, corpus, rows)
    heat = heats.flatten()[chains]
    assert len(set(heat.tolist())) == 3
    one = Drawn(wanted.share[met].log(), chains, met)
    right, alpha, hits = _compared(one, wanted, batch, 0, seeds, heats, kept)
    assert right.all() and hits.all()
    torch.testing.assert_close(alpha, torch.ones_like(alpha))
    _, _, wrong = _compared(one, wanted, batch, 0, seeds + 1, heats, kept)
    assert wrong[heat == 0].all()
    assert not wrong[heat > 0].all()


def test_tau_of_held_out_answers_is_that_of_the_engine(world, trained, folder, tmp_path):
    _, kept, config, _, names = world
    target = open_target(folder / "model", RECIPE.length)
    held = Corpus.open(folder / "shards", RECIPE.length, 0, held_out=True)
    export(tmp_path, trained[0].weights, config, names, target.config, torch.float64)
    judged = {
        (row.domain, row.temperature): row
        for row in evaluate(trained[0].weights, config, target, held, kept, suffix_every=99)
    }
    for most in (1, 4):
        head = open_head(str(tmp_path), target.config, target.embedding, target.head,
                         RECIPE.length, torch.float64, torch.device("cpu"))
        engine = make(folder / "model", head=head, max_drafts=most, speculative="off")
        asked = [
            Submit(str(entry.number), ids[: entry.prompt].tolist(), entry.length - entry.prompt,
                   Sampling(temperature=entry.temperature, seed=entry.seed))
            for entry, ids in held.sequences
        ]
        run = Run(engine).put(*asked).drain()
        tokens = steps = 0
        for entry, ids in held.sequences:
            key = str(entry.number), 0
            assert run.tokens[key] == ids[entry.prompt :].tolist()
            behind = entry.length - entry.prompt - 1
            tokens += behind
            steps += behind - run.outs[key][-1].accepted
        engine.close()
        assert tokens / steps == pytest.approx(judged["all", -1.0].tau[most - 1], abs=6e-5)


def test_an_answer_is_walked_as_the_engine_would():
    import numpy as np

    hits = np.array([[1, 1, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    assert walked(hits, 1) == 3  # 2 + 1 (wrong at 2) + 2
    assert walked(hits, 2) == 2  # 3 + 2
    assert walked(np.ones((8, PLACES), bool), 3) == 2
    assert walked(np.zeros((8, PLACES), bool), 3) == 8


def test_suffix_drafts_are_judged_by_what_they_offer():
    import numpy as np

    ids = np.array([1, 2, 3, 4, 5, 6, 7, 8] * 6)
    entry = Entry(0, 16, len(ids), "chat", 0.0, False, "", 0)
    assert suffix_steps(SuffixDrafts(), entry, ids, 4) <= 8  # of 31 tokens
    other = Entry(1, 16, 40, "chat", 0.0, False, "", 0)
    assert suffix_steps(SuffixDrafts(), other, np.arange(40), 4) == 23
