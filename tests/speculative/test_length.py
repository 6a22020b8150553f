"""How many drafts pay: the choice against a search of all lengths, the curve against true times."""

from __future__ import annotations

import itertools
import random

import pytest

from speculative import length
from speculative.length import MARGIN, MARKS, StepTimes, choose


def learned(curve, sizes, rounds: int = 200) -> StepTimes:
    times = StepTimes(0.01)
    chance = random.Random(1)
    for _ in range(rounds):
        rows = chance.choice(sizes)
        times.observe(rows, curve(rows))
    return times


def line(rows: int) -> float:
    return 0.012 + 0.0005 * rows


def knee(rows: int) -> float:
    return 0.004 if rows <= 128 else 0.004 * rows / 128


def rate(times: StepTimes, survival: list[list[float]], lengths: tuple[int, ...]) -> float:
    gained = sum(sum(chain[:length]) for chain, length in zip(survival, lengths, strict=True))
    return (len(survival) + gained) / times(len(survival) + sum(lengths))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("curve", [line, knee])
def test_the_lengths_are_the_best_of_all(curve, seed: int) -> None:
    chance = random.Random(seed)
    times = learned(curve, MARKS)
    survival = []
    for _ in range(chance.randint(1, 4)):
        alive, chain = 1.0, []
        for _ in range(chance.randint(0, 4)):
            alive *= chance.random()
            chain.append(alive)
        survival.append(chain)
    lengths = choose(times, survival)
    every = itertools.product(*(range(len(chain) + 1) for chain in survival))
    best = max(rate(times, survival, one) for one in every)
    nothing = rate(times, survival, (0,) * len(survival))
    assert best / (1 + MARGIN) - 1e-12 <= rate(times, survival, tuple(lengths))
    if not any(lengths):
        assert best <= nothing * (1 + MARGIN) + 1e-12
    assert all(length <= len(chain) for length, chain in zip(lengths, survival, strict=True))


def test_likely_drafts_are_verified_while_rows_are_free_and_not_when_they_cost() -> None:
    free, dear = learned(knee, MARKS), learned(lambda rows: 0.001 * rows, MARKS)
    chain = [0.9, 0.8, 0.7, 0.6]
    assert choose(free, [chain] * 8) == [4] * 8
    assert choose(dear, [chain] * 8) == [0] * 8
    assert choose(free, [[], chain]) == [0, 4]
    assert choose(free, []) == []


def test_rows_beyond_the_knee_go_to_the_likeliest_chains() -> None:
    times = learned(knee, MARKS)
    good, poor = [0.99, 0.98, 0.97, 0.96], [0.3, 0.1, 0.05, 0.01]
    lengths = choose(times, [good] * 30 + [poor] * 30)
    assert sum(lengths) <= 128 - 60 + 8 and lengths[:30] >= [2] * 30 and max(lengths[30:]) == 0


@pytest.mark.parametrize("curve", [line, knee])
def test_the_curve_is_learned_between_its_marks_too(curve) -> None:
    times = learned(curve, MARKS, 2000)
    for rows in range(1, 2048):
        assert times(rows) == pytest.approx(curve(rows), rel=0.16), rows
        assert times(rows + 1) >= times(rows) * 0.999


def test_a_slow_minute_is_believed_of_every_size_and_a_wild_step_of_none() -> None:
    times = learned(line, (1, 8))
    before = times(16)
    for _ in range(30):
        times.observe(1, 3 * line(1))
    assert times(16) == pytest.approx(3 * before, rel=0.2)
    times = learned(line, (1, 8))
    times.observe(8, 100.0)
    assert times(8) < 2 * line(8)


def test_before_a_step_was_measured_the_belief_decides() -> None:
    assert choose(StepTimes(1e-6), [[0.9, 0.5]]) == [2]
    assert choose(StepTimes(10.0), [[0.9, 0.5]]) == [0]


def test_a_chain_that_rises_again_is_still_taken_from_its_beginning() -> None:
    assert choose(learned(knee, MARKS), [[0.1, 0.9, 0.9]]) == [3]
    assert choose(learned(line, MARKS), [[0.01, 0.9, 0.9]]) == [0]


def test_beside_prompts_that_cost_what_they_compute_nothing_is_drafted() -> None:
    likely = [0.99] * 8
    assert choose(learned(line, MARKS), [likely] * 4, 192) == [0] * 4
    assert sum(choose(learned(line, MARKS), [likely] * 4)) > 0
    assert choose(learned(knee, MARKS), [likely] * 4, 64) == [8] * 4  # there rows are free
    assert sum(choose(learned(knee, MARKS), [likely] * 4, 512)) == 0


def test_times_of_many_numbers_of_rows_are_those_of_each():
    """Also where the curve falls, is flat, or ends, and for few numbers, which take a loop."""
    chance = random.Random(4)
    for _ in range(300):
        times = StepTimes(chance.choice([0.0, 0.002, 0.3]))
        for _ in range(chance.randrange(40)):
            times.observe(chance.choice([1, 2, 3, 5, 9, 30, 70, 200, 900]), chance.uniform(0.1, 9))
        first, count = chance.randrange(1, 400), chance.choice([0, 1, 11, 12, 13, 200])
        found = times.each(first, count)
        assert found == [times(rows) for rows in range(first, first + count)]


@pytest.mark.parametrize("seed", range(40))
def test_many_chains_are_cut_as_few_are(seed, monkeypatch):
    """Numpy chooses what the loop does, equal chances and rising ones included."""
    chance, times = random.Random(seed), StepTimes(0.002)
    for rows, seconds in ((8, 1.0), (64, 1.1), (256, 2.0), (512, 4.0)):
        times.observe(rows, seconds)
    chains = [[chance.choice([1.0, 0.9, 0.5, 0.3]) ** (place + 1) * chance.choice([1.0, 1.02])
               for place in range(chance.randrange(20))] for _ in range(chance.randrange(1, 40))]
    beside, prompt = chance.choice([0, 0, 40, 300]), chance.choice([0.25, 2.0])
    found = []
    for many in (0, 1 << 30):
        monkeypatch.setattr(length, "MANY", many)
        if any(chains):
            found.append(length.choose(times, chains, beside, prompt))
    assert not found or found[0] == found[1]
