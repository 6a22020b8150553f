"""The device's noise, cuts, logprobs, accept walk and slot tables, each against its CPU twin."""

from __future__ import annotations

import math
import os
import random

import msgspec
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine import noise
from engine.accept import End, accept
from engine.kernels import sampler_filter, sampler_search
from engine.kernels.accept_walk import accept_walk
from engine.kernels.sampler import Needs, settle
from engine.kernels.sampler_tables import (
    BIAS_COUNT,
    FLAGS,
    HOT,
    WORDS,
    Results,
    Rows,
    Scratch,
    SlotParams,
    SlotTables,
    refusal,
)
from engine.messages import Sampling
from engine.sampling import sample
from tests.noise_probe import exponentials, quads, singles
from tests.sampler_rig import DEVICE, POISON, Group, lay, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on inf - inf
WORD = 2**32


def signed(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


def words_of(seed: int, position: int, choice: int, ids: torch.Tensor) -> torch.Tensor:
    """engine/noise.py's words of these ids, int64."""
    key = [torch.tensor(n) for n in (seed % WORD, seed >> 32, position % WORD, choice % WORD)]
    words = torch.stack(noise.philox(*key, ids // 4, torch.zeros_like(ids)), -1)
    return words.gather(-1, (ids % 4)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("seed", "position", "choice"),
    [(0, 0, 0), (1, 7, 0), (2**64 - 1, 2**31 + 5, 3), (0xDEADBEEF_01234567, 131_071, 127)],
)
def test_the_words_are_bit_equal_to_the_cpus(seed, position, choice):
    counter = torch.tensor(
        [signed(n) for n in (seed % WORD, seed >> 32, position, choice)], dtype=torch.int32
    ).to(DEVICE)
    ids = torch.arange(256)
    expected = words_of(seed, position, choice, ids)
    assert torch.equal(quads(counter, 64), expected)
    picked = torch.tensor([0, 3, 5, 131_070, 49_151, 2, 77, 128_255])
    assert torch.equal(singles(counter, picked), words_of(seed, position, choice, picked))


def test_philox_gives_the_published_words():
    # Random123's known answers for philox4x32-10: all zeros, and the counter's third word free.
    zeros = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    published = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert quads(zeros, 1).tolist() == published


def test_the_noise_is_that_of_the_cpu_to_a_few_float_units():
    rng = random.Random(1)
    ends = [0, 1, 2, 127, 128, 255, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 129, 2**32 - 300]
    numbers = ends + [rng.randrange(2**32) for _ in range(245 - 60)]
    numbers += [rng.randrange(2**k) for k in range(2, 32) for _ in range(2)]
    words = torch.tensor(numbers)
    expected = words.float()
    noise._to_gumbel(expected)
    exact = -torch.log1p(-(words.double() + 0.5) / WORD)
    got, drawn = exponentials(words)
    inside = words < 2**32 - 2**9  # nearer to the end the fp32 contract rounds w itself
    error = ((got.double() - exact) / exact).abs()[inside]
    assert error.max() < 3e-5, "fp32 holds w to 24 bits"
    assert (got > 0).all()
    assert (drawn - expected).abs().max() < 6e-6
    small = words < 2**20  # where 1 - w has lost bits of w that the correction must give back
    assert ((got.double() - exact) / exact).abs()[small].max() < 5e-7


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that rows of 1,500 ids meet every path of the filters."""
    monkeypatch.setattr(sampler_filter, "SMALL", 16)
    monkeypatch.setattr(sampler_filter, "TILE", 64)
    monkeypatch.setattr(sampler_filter, "AIM", 24)
    monkeypatch.setattr(sampler_search, "WIDE", 512)


CUTS = [
    Sampling(top_k=10),
    Sampling(top_k=40),
    Sampling(top_k=300),
    Sampling(top_k=1499),
    Sampling(top_k=5_000),
    Sampling(top_p=0.05),
    Sampling(top_p=0.5),
    Sampling(top_p=0.97),
    Sampling(min_p=0.4),
    Sampling(min_p=0.001),
    Sampling(top_k=200, top_p=0.8),
    Sampling(top_k=30, top_p=0.8, min_p=0.3),
    Sampling(top_k=700, top_p=0.95, min_p=0.1),
]


@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_wide_cuts_draw_what_the_cpu_draws(monkeypatch, sampling, levels):
    narrow(monkeypatch)
    rng = torch.Generator().manual_seed(levels)
    x = torch.randn(2, 1500, generator=rng) * torch.tensor([0.3, 3.0])[:, None]
    if levels:
        x = (x * levels).round() / levels  # many ties: the cut falls within equal values
    groups = [
        Group(msgspec.structs.replace(sampling, seed=i), prompt=[0] * (i + 1)) for i in range(2)
    ]
    rows = [row for group in groups for row in group.rows()]
    expected = sample(x.double(), rows, None).tokens
    assert run(x, groups).tokens() == expected


def test_small_and_large_tiles_and_the_search_agree(monkeypatch):
    x = torch.randn(6, 1500, generator=torch.Generator().manual_seed(3)) * 1.5
    groups = [
        Group(Sampling(top_p=0.3 + 0.1 * i, top_k=100 * (i % 2), seed=i)) for i in range(6)
    ]
    usual = run(x, groups).tokens()
    narrow(monkeypatch)
    assert run(x, groups).tokens() == usual


def test_more_best_tokens_than_the_tile_found_go_to_the_search(monkeypatch):
    x = torch.randn(1, 1500, generator=torch.Generator().manual_seed(4)).expand(8, -1) * 0.1
    groups = [Group(Sampling(top_k=32, seed=i)) for i in range(8)]
    usual = run(x, groups).tokens()
    narrow(monkeypatch)
    assert run(x, groups).tokens() == usual


@pytest.mark.parametrize("small", [False, True])
def test_a_mass_is_reached_to_the_last_bit_of_an_fp64(monkeypatch, small):
    if small:
        monkeypatch.setattr(sampler_filter, "SMALL", 2)
        monkeypatch.setattr(sampler_filter, "TILE", 2)
    x = torch.full((7, 200), -90.0)
    x[:, [5, 9, 100, 150]] = 3.0
    for top_p, kept in ((0.5, {5, 9}), (0.5 + 1e-13, {5, 9, 100}), (0.75, {5, 9, 100})):
        groups = [Group(Sampling(top_p=top_p, seed=i)) for i in range(7)]
        assert set(run(x, groups).tokens()) == kept


def test_ids_of_18_bits_keep_their_places_in_the_order():
    vocab = 2**17 + 40
    x = torch.full((1, vocab), -50.0)
    best = [vocab - 1, 2**17, 2**17 - 1, 77]
    x[0, best] = torch.tensor([5.0, 5.0, 5.0, 4.5])
    group = Group(Sampling(top_k=3, top_p=0.5, seed=1))
    assert run(x, [group]).tokens()[0] in (2**17 - 1, 2**17)


def test_a_cut_keeps_exactly_what_the_cpu_keeps(monkeypatch):
    """Flat weights and some seeds: what is kept is drawn at some time, and nothing else ever."""
    narrow(monkeypatch)
    x = torch.full((6, 200), -30.0)
    x[:, 50:170] = 1.0  # 120 equal tokens: more than the tile
    for sampling, kept in ((Sampling(top_k=7), 7), (Sampling(top_p=0.03), 4)):
        groups = [Group(msgspec.structs.replace(sampling, seed=i)) for i in range(6)]
        assert set(run(x, groups).tokens()) <= set(range(50, 50 + kept))
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.016)):
        groups = [Group(msgspec.structs.replace(sampling, seed=i)) for i in range(6)]
        assert set(run(x, groups).tokens()) == {50, 51}


@pytest.mark.parametrize("vocab", [11, 1024, 2500])
def test_logprobs_are_those_of_the_raw_logits_lower_ids_first(vocab):
    generator = torch.Generator().manual_seed(vocab)
    x = (torch.randn(5, vocab, generator=generator) * 8).round() / 4  # with ties
    x[1, 3] = -math.inf
    x[4, vocab - 1] = -0.0
    counts = (0, 1, 5, 20, -1)
    groups = [
        Group(Sampling(logprobs=n, seed=n + 1, bias=((2, 50.0),)), prompt=[0] * (n + 2))
        for n in counts
    ]
    rig = run(x, groups)
    rows = [row for group in groups for row in group.rows()]
    expected = sample(x, rows, None)
    assert rig.tokens() == expected.tokens
    for i, found in enumerate(expected.logprobs[:4]):
        assert found is not None
        assert float(rig.results.own[i]) == pytest.approx(found.logprob, abs=2e-5)
        ids = [token for token, _ in found.top]
        assert rig.results.best_ids[i, : len(ids)].tolist() == ids
        values = rig.results.best_values[i, : len(ids)].tolist()
        assert values == pytest.approx([value for _, value in found.top], abs=2e-5)
    assert float(rig.results.own[4]) == POISON
    if vocab < 20:
        assert (rig.results.best_ids[3, vocab:] == -1).all()


@pytest.mark.parametrize("seed", range(6))
def test_the_walk_accepts_what_accept_accepts(seed):
    rng = random.Random(seed)
    groups, drawn = [], []
    for _ in range(5):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        if rng.random() < 0.3:
            tokens[rng.randrange(len(tokens))] = -1
        sampling = Sampling(frequency=rng.choice([0.0, 0.5]))
        drafts = [rng.choice([max(t, 0), rng.randrange(3)]) for t in tokens[:-1]]
        groups.append(Group(sampling, prompt=[1, 2], output=[2, 0], drafts=drafts))
        drawn.append(tokens)
    tables = SlotTables.allocate(8, 5, DEVICE)
    params = SlotParams(tables)
    slots = rng.sample(range(8), 5)
    for slot, group in zip(slots, groups, strict=True):
        params.write(slot, group.sampling, (), 0, group.prompt, group.output)
    params.upload()
    rows, _ = lay(groups, slots, sum(map(len, drawn)), 2, None, 5)
    results = Results.allocate(sum(map(len, drawn)) + 2, 7, DEVICE)
    results.matched.fill_(POISON)
    flat = [token for tokens in drawn for token in tokens]
    results.tokens[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
    tables.last.fill_(4)
    accept_walk(rows, tables, results, penalties=True)
    for i, (slot, group, tokens) in enumerate(zip(slots, groups, drawn, strict=True)):
        told = accept(tokens, group.drafts, End(remaining=100))
        assert int(results.matched[i]) == told.matched
        assert int(tables.last[slot]) == max(tokens[told.matched], 0)
        words = [0] * 5
        if group.sampling.frequency:
            words = [2 * [*group.output, *told.tokens].count(t) + (t in (1, 2)) for t in range(5)]
        assert tables.history[slot].tolist() == words
    assert (results.matched[5:] == POISON).all()
    others = [slot for slot in range(9) if slot not in slots]
    assert (tables.last[others] == 4).all()


def test_history_grown_on_the_device_is_the_history_written_afresh():
    sampling = Sampling(temperature=0.0, frequency=0.6, repetition=1.3)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    first = Group(sampling, prompt=[1], drafts=[int(x[0].argmax())])
    rig = run(x[:2], [first])
    matched = int(rig.results.matched[0])
    later = Group(sampling, prompt=[1], output=rig.tokens()[: matched + 1])
    rows, _ = lay([later], rig.slots, 1, 0, None, 40)
    results, scratch = Results.allocate(1, 1, DEVICE), Scratch.allocate(1, 40, DEVICE)
    settle(x[2:].to(DEVICE), rows, rig.tables, None, scratch, results, Needs(shaped=True))
    assert results.tokens.tolist() == run(x[2:], [later]).tokens()


def test_a_slot_that_is_written_again_keeps_nothing_of_its_last_sequence():
    tables = SlotTables.allocate(3, 50, DEVICE)
    params = SlotParams(tables)
    loaded = Sampling(bias=((1, 3.0), (7, -2.0)), presence=0.5, top_k=3, logprobs=2, seed=-1)
    params.write(1, loaded, [4, 5], 2, [9], [8])
    params.write(2, loaded, [4, 5], 2, [9], [8])
    params.upload()
    kept = tables.records[2].clone()
    assert int(tables.records[1, BIAS_COUNT]) == 2
    assert tables.history[1].nonzero().flatten().tolist() == [8, 9]
    plain = params.write(1, Sampling(presence=0.5), (), 0, [3], ())
    params.upload()
    fresh = SlotTables.allocate(3, 50, DEVICE)
    other = SlotParams(fresh)
    assert other.write(1, Sampling(presence=0.5), (), 0, [3], ()) == plain
    other.upload()
    assert torch.equal(tables.records[1], fresh.records[1])
    assert torch.equal(tables.history[1], fresh.history[1])
    assert torch.equal(tables.records[2], kept)
    assert not tables.records[3].any()
    assert tables.records.shape == (4, WORDS)


def test_ids_and_stop_ids_that_cannot_matter_take_no_room():
    tables = SlotTables.allocate(1, 9, DEVICE)
    params = SlotParams(tables)
    bias = tuple((id, 1.0) for id in (*range(-2_000, 0), 3, 2**31 - 1, 2**60))
    assert refusal(Sampling(bias=bias), list(range(100))) == ""
    params.write(0, Sampling(bias=bias), list(range(100)), 0, (), ())
    params.upload()
    assert int(tables.records[0, BIAS_COUNT]) == 1


def test_filters_of_a_greedy_row_are_not_filters():
    tables = SlotTables.allocate(1, 9, DEVICE)
    params = SlotParams(tables)
    assert params.write(0, Sampling(temperature=0.0, top_k=3, top_p=0.5), (), 0, (), ()) == 0
    assert params.write(0, Sampling(temperature=1e-44), (), 0, (), ()) == HOT
    params.upload()
    assert int(tables.records[0, FLAGS]) == HOT


@pytest.mark.parametrize(
    "write",
    [
        {"sampling": Sampling(bias=tuple((i, 1.0) for i in range(1025)))},
        {"sampling": Sampling(logprobs=21)},
        {"sampling": Sampling(min_tokens=1), "stop_ids": list(range(17))},
        {"slot": 2},
    ],
    ids=["bias", "logprobs", "stops", "slot"],
)
def test_more_than_the_tables_hold_is_refused_before_anything_is_staged(write):
    tables = SlotTables.allocate(1, 2000, DEVICE)
    params = SlotParams(tables)
    call = {"slot": 0, "sampling": Sampling(), "stop_ids": (), "choice": 0, "prompt": (),
            "output": (), **write}  # fmt: skip
    if "slot" not in write:
        assert "this engine" in refusal(call["sampling"], call["stop_ids"])
    with pytest.raises(AssertionError):
        params.write(**call)
    params.upload()
    assert not tables.records.any()


@pytest.mark.gpu
def test_a_captured_settle_replays_to_the_same_tokens_from_new_contents():
    vocab, groups = 3000, [Group(Sampling(top_p=0.8, seed=i, logprobs=2)) for i in range(3)]
    x = torch.randn(2, 3, vocab)
    expected = [run(part, groups) for part in x]
    tables = SlotTables.allocate(5, vocab, DEVICE)
    params = SlotParams(tables)
    for slot, group in enumerate(groups):
        params.write(slot, group.sampling, (), 0, group.prompt, group.output)
    params.upload()
    rows, _ = lay(groups, [0, 1, 2], 3, 0, None, vocab)
    results, scratch = Results.allocate(3, 3, DEVICE), Scratch.allocate(3, vocab, DEVICE)
    logits, needs = x[0].to(DEVICE), Needs(shaped=True, filters=True, logprobs=True)
    settle(logits, rows, tables, None, scratch, results, needs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        settle(logits, rows, tables, None, scratch, results, needs)
    for part, wanted in zip(x, expected, strict=True):
        logits.copy_(part)
        graph.replay()
        assert results.tokens.tolist() == wanted.tokens()
        assert torch.equal(results.best_ids[:, :2], wanted.results.best_ids[:, :2])


def test_rows_lie_in_one_piece_of_memory_for_one_copy():
    rows = Rows.allocate(4, 3, 9, DEVICE)
    assert rows.tokens.shape == (9,)
    start = rows.slot.untyped_storage().data_ptr()
    assert rows.groups.untyped_storage().data_ptr() == start
