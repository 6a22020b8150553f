"""The device's draw against engine/sampling.py: same tokens, or a near-tie, shown to be one."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import msgspec
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.messages import Sampling
from engine.noise import gumbel
from engine.sampling import NOTHING, SampleRow, sample
from tests.sampler_rig import POISON, Group, mask_of, only_tokens, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on inf - inf
NEAR = 3e-5  # scores closer than this may come in either order: fp32 of numbers up to 100
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def threads():
    """One: tensors this small are slower on several, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mask_rows(masks: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if masks is None else masks[index : index + 1]


def drawn(logits: torch.Tensor, row: SampleRow, mask: torch.Tensor | None, jitter: float) -> set:
    """The tokens that fp64 gives for limits a little lower, as they are, and a little higher."""
    s = row.sampling
    found = set()
    for side in (-jitter, 0.0, jitter):
        top_p = s.top_p + side if 0 < s.top_p < 1 else s.top_p
        min_p = s.min_p * (1 + side) if s.min_p > 0 else 0.0
        near = msgspec.structs.replace(s, top_p=min(max(top_p, 1e-9), 1.0), min_p=min(min_p, 1.0))
        found |= set(sample(logits.double(), [replace(row, sampling=near)], mask).tokens)
    return found


def gap(logits: torch.Tensor, row: SampleRow, mask: torch.Tensor | None, a: int, b: int) -> float:
    """How far the scores of two tokens lie apart, everything but the filters applied, in fp64."""
    s = msgspec.structs.replace(row.sampling, top_k=0, top_p=1.0, min_p=0.0)
    only = []
    for token in (a, b):
        # The engine's own arithmetic: bias the token up until it wins, and see how much it takes.
        allowed = mask_of([{token}], logits.shape[1])
        assert sample(logits.double(), [replace(row, sampling=s)], allowed).tokens == [token]
        only.append(score_of(logits, row, token))
    return abs(only[0] - only[1])


def score_of(logits: torch.Tensor, row: SampleRow, token: int) -> float:
    """The shaped and scaled logit of one token plus its noise, fp64."""
    s = row.sampling
    x = float(logits[0, token]) + sum(value for t, value in s.bias if t == token)
    if row.history is not None:
        ids, counts = row.history.tensors(torch.device("cpu"))
        seen = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        times = seen.get(token, 0) + list(row.drafted).count(token)
        if token in seen or times:
            x = x / s.repetition if x > 0 else x * s.repetition
            x -= s.frequency * times + s.presence * (times > 0)
    if s.temperature == 0:
        return x
    seed = (s.seed + 2**63) % 2**64 - 2**63
    numbers = (torch.tensor([n]) for n in (seed, row.choice, row.position))
    noise = gumbel(*numbers, logits.shape[1], torch.float64)[0, token]
    return x / s.temperature + float(noise)


def check(logits: torch.Tensor, groups: list[Group], masks: torch.Tensor | None = None, **how):
    """Settle, and compare each row with the CPU's; the rig and how many rows were near-ties."""
    rig = run(logits, groups, masks, **how)
    rows = [row for group in groups for row in group.rows()]
    expected = sample(logits.float(), rows, masks).tokens
    ties = 0
    for i, (mine, theirs) in enumerate(zip(rig.tokens(), expected, strict=True)):
        if mine == theirs:
            continue
        assert NOTHING not in (mine, theirs), f"row {i}: {mine}, the CPU drew {theirs}"
        one, mask = logits[i : i + 1].float(), mask_rows(masks, i)
        # Either the filters put the cut elsewhere within rounding, or two scores are as good.
        near = mine in drawn(one, rows[i], mask, 1e-6)
        scale = max(1.0, 1 / max(rows[i].sampling.temperature, 1e-3))
        near = near or gap(one, rows[i], mask, mine, theirs) < NEAR * scale
        assert near, f"row {i}: {mine}, the CPU drew {theirs}, {rows[i]}"
        ties += 1
    return rig, ties


def some_logits(rng: random.Random, rows: int, vocab: int, dtype=torch.float32) -> torch.Tensor:
    """Logits of some temperature, sometimes in few levels so that values tie, some -inf."""
    torch.manual_seed(rng.randrange(2**31))
    x = torch.randn(rows, vocab) * rng.choice([0.3, 2.0, 6.0])
    if rng.random() < 0.4:
        x = (x * 2).round() / 2
    if rng.random() < 0.2:
        x[torch.rand(rows, vocab) < 0.1] = -math.inf
        x[:, rng.randrange(vocab)] = 1.0
    return x.to(dtype)


def some_sampling(rng: random.Random, vocab: int) -> Sampling:
    def often(value, off):
        return value if rng.random() < 0.5 else off

    ids = rng.sample(range(vocab + 3), min(vocab, 5))
    return Sampling(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=often(rng.uniform(0.05, 1), 1.0),
        top_k=often(rng.randrange(1, vocab + 3), 0),
        min_p=often(rng.uniform(0, 0.3), 0.0),
        seed=rng.randrange(2**64),
        repetition=often(rng.uniform(0.7, 1.6), 1.0),
        frequency=often(rng.uniform(-1, 1), 0.0),
        presence=often(rng.uniform(-1, 1), 0.0),
        bias=often(tuple((t, rng.uniform(-5, 5)) for t in ids), ()),
        min_tokens=often(rng.randrange(0, 8), 0),
    )


def some_group(rng: random.Random, vocab: int, sampling: Sampling) -> Group:
    def ids(most: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randrange(most))]

    return Group(
        sampling, stop_ids=[*ids(4), vocab + 1], choice=rng.randrange(4),
        prompt=[rng.randrange(vocab), *ids(6)], output=ids(5), drafts=ids(4),
    )  # fmt: skip


def some_masks(rng: random.Random, rows: int, vocab: int) -> torch.Tensor | None:
    if rng.random() < 0.4:
        return None
    some = range(1, vocab)
    return mask_of(
        [rng.choice([None, set(), set(rng.sample(some, rng.randrange(1, 5)))])
         for _ in range(rows)],
        vocab,
    )  # fmt: skip


FEATURES = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.7),
    "freezing": Sampling(temperature=1e-40),
    "top_k": Sampling(top_k=3),
    "one": Sampling(top_k=1),
    "top_p": Sampling(top_p=0.6),
    "no_mass": Sampling(top_p=1e-9),
    "min_p": Sampling(min_p=0.2),
    "all_filters": Sampling(top_k=9, top_p=0.8, min_p=0.05),
    "repetition": Sampling(temperature=0.0, repetition=1.4),
    "frequency": Sampling(temperature=0.5, frequency=0.7),
    "presence": Sampling(temperature=0.5, presence=-0.9),
    "bias": Sampling(temperature=0.5, bias=((3, 4.0), (0, -3.0), (32, 2.0), (999_999, 9.0))),
    "min_tokens": Sampling(temperature=0.0, min_tokens=9),
}


@pytest.mark.parametrize("vocab", [33, 50, 1100])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_alone_draws_what_the_cpu_draws(feature, vocab):
    rng = random.Random(f"{feature} {vocab}")
    groups, sampling = [], FEATURES[feature]
    for seed in range(4):
        group = some_group(rng, vocab, msgspec.structs.replace(sampling, seed=seed << 33))
        groups.append(replace(group, stop_ids=list(range(0, vocab, 2))[:16]))
    rows = sum(len(group.drafts) + 1 for group in groups)
    _, ties = check(some_logits(rng, rows, vocab), groups)
    assert ties <= 1


@pytest.mark.parametrize("seed", range(24))
def test_random_mixes_draw_what_the_cpu_draws(seed):
    rng = random.Random(seed)
    vocab = rng.choice([7, 32, 61, 130, 1024, 1500])
    groups = [some_group(rng, vocab, some_sampling(rng, vocab)) for _ in range(4)]
    rows = sum(len(group.drafts) + 1 for group in groups)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    masks = some_masks(rng, rows, vocab)
    _, ties = check(some_logits(rng, rows, vocab, dtype), groups, masks, order=rng)
    assert ties <= 1


@pytest.mark.parametrize("seed", range(4))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(seed):
    rng = random.Random(100 + seed)
    vocab = 1100
    params = [
        msgspec.structs.replace(some_sampling(rng, vocab), logprobs=rng.choice([-1, 0, 3]))
        for _ in range(4)
    ]
    groups = [some_group(rng, vocab, sampling) for sampling in params]
    sizes = [len(group.drafts) + 1 for group in groups]
    logits = some_logits(rng, sum(sizes), vocab)
    whole = run(logits, groups, order=rng, pad=2, everything=True)
    begin = 0
    for group, size in zip(groups, sizes, strict=True):
        alone = run(logits[begin : begin + size], [group])
        mine = slice(begin, begin + size)
        assert alone.tokens() == whole.tokens()[mine]
        if group.sampling.logprobs >= 0:
            assert torch.equal(alone.results.own, whole.results.own[mine])
            for name in ("best_ids", "best_values"):
                ours, theirs = getattr(alone.results, name), getattr(whole.results, name)[mine]
                assert torch.equal(ours[:, : params[0].logprobs], theirs[:, : params[0].logprobs])
        begin += size


def test_a_drafted_row_is_the_row_that_a_later_step_would_have_had():
    sampling = Sampling(temperature=0.9, top_p=0.9, frequency=0.4, repetition=1.2, seed=5)
    x = torch.randn(3, 90)
    together = run(x, [Group(sampling, prompt=[1, 2], output=[5], drafts=[7, 7])]).tokens()
    for i, output in enumerate([[5], [5, 7], [5, 7, 7]]):
        later = Group(sampling, prompt=[1, 2], output=output)
        assert run(x[i : i + 1], [later]).tokens() == [together[i]]


def test_rows_beyond_the_count_are_not_touched():
    group = Group(Sampling(top_p=0.9, logprobs=2, frequency=0.1), drafts=[1])
    rig = run(torch.randn(2, 40), [group], pad=3)
    for tensor, real in ((rig.results.tokens, 2), (rig.results.own, 2), (rig.results.matched, 1)):
        assert (tensor[:real] != POISON).all()
        assert (tensor[real:] == POISON).all()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=5, top_p=0.9)])
def test_rows_without_a_sound_legal_token_report_minus_one(sampling):
    vocab = 1200
    x = torch.randn(6, vocab)
    x[0, 3], x[1, 1111], x[2] = math.nan, math.inf, -math.inf
    x[3, 7] = -math.inf
    masks = mask_of([None, {5}, None, {7}, set(), {1150}], vocab)
    groups = [Group(sampling, prompt=[0] * (i + 1)) for i in range(6)]
    rig, ties = check(x, groups, masks)
    assert rig.tokens() == [-1, -1, -1, -1, -1, 1150]
    assert ties == 0
    assert (rig.tables.last >= 0).all()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=5, top_p=0.9),
                                      Sampling(temperature=0.0, repetition=1.4)])
def test_one_token_stands_for_its_mask(sampling):
    vocab = 2500
    ids = [token for token in (0, 31, 32, 1023, 1024, 2047, 2499) for _ in range(2)]
    masks = mask_of([{token} for token in ids], vocab)
    assert only_tokens(masks) == dict(enumerate(ids))
    groups = [Group(sampling, prompt=[0] * (i + 1)) for i in range(len(ids))]
    rig, ties = check(torch.randn(len(ids), vocab), groups, masks)
    assert rig.tokens() == ids and ties == 0
    assert rig.rows.mask[: len(ids)].tolist() == [
        ~token if row % 2 else row for row, token in enumerate(ids)]
    wrong = torch.randn(len(ids), vocab)
    wrong[range(len(ids)), ids] = torch.tensor([math.nan, math.inf, -math.inf, 1.0]).repeat(4)[:14]
    assert run(wrong, groups, masks).tokens() == [
        -1 if row % 4 < 3 else token for row, token in enumerate(ids)]


def test_the_lowest_id_wins_ties_across_chunks():
    x = torch.zeros(2, 3000)
    x[0, [2999, 1500, 40]] = 5.0
    x[1, [2500, 1023, 1024]] = 5.0
    assert run(x, [Group(GREEDY), Group(GREEDY)]).tokens() == [40, 1023]
    first = [Group(Sampling(top_k=1, seed=s)) for s in (1, 2)]
    assert run(x, first).tokens() == [40, 1023]


def test_bias_reaches_the_edges_of_chunks_and_nothing_outside_the_vocabulary():
    vocab, edges = 2500, [0, 1023, 1024, 2047, 2048, 2499]
    others = tuple((edge, -1.0) for edge in (2500, 3071, 9999))
    groups = [
        Group(Sampling(temperature=0.0, bias=((edge, 50.0), (7, 1.0), *others))) for edge in edges
    ]
    assert run(torch.zeros(len(edges), vocab), groups).tokens() == edges


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=2)])
def test_min_tokens_holds_stop_ids_back_unless_nothing_else_is_legal(sampling):
    vocab = 2100
    held = msgspec.structs.replace(sampling, min_tokens=5)
    x = torch.randn(3, vocab)
    x[:, 2050] = 60.0
    masks = mask_of([None, {2050, 3}, {2050, 40}], vocab)
    groups = [Group(held, [2050]), Group(held, [2050]), Group(held, [2050, 40])]
    rig, _ = check(x, groups, masks)
    tokens = rig.tokens()
    assert tokens[0] != 2050
    assert tokens[1] == 3
    assert tokens[2] == 2050


def test_a_seed_is_64_bits_and_the_choice_counts():
    x = torch.zeros(1, 800)
    seeds = (1, 1 + 2**32, 2**63, -1)
    drawn = [run(x, [Group(Sampling(seed=seed), choice=c)]).tokens()[0] for seed in seeds
             for c in (0, 1)]  # fmt: skip
    assert len(set(drawn)) > 5
    assert run(x, [Group(Sampling(seed=-1))]).tokens() == run(
        x, [Group(Sampling(seed=2**64 - 1))]
    ).tokens()

