"""Chances from counts: priors, learning, forgetting.  No drafts."""

from __future__ import annotations

import random

import pytest

from speculative.calibration import FADE, WEIGHT, Calibration


def test_before_anything_is_seen_a_chance_is_its_prior():
    assert list(Calibration([0.2, 0.9]).chances) == [0.2, 0.9]


def test_a_chance_moves_from_its_prior_by_the_weight_of_evidence():
    cells = Calibration([0.5, 0.5])
    cells.learn(0, True)
    assert cells.chances[0] == pytest.approx((1 + WEIGHT * 0.5) / (1 + WEIGHT))
    assert cells.chances[1] == 0.5


@pytest.mark.parametrize("true", [0.05, 0.6, 0.97])
def test_a_chance_comes_to_what_is_seen(true):
    draw, cells = random.Random(1), Calibration([0.5])
    for _ in range(6000):
        cells.learn(0, draw.random() < true)
    assert cells.chances[0] == pytest.approx(true, abs=0.04)


def test_old_outcomes_fade():
    cells = Calibration([0.5])
    for _ in range(20_000):
        cells.learn(0, True)
    memory = round(1 / (1 - FADE))
    for _ in range(memory):
        cells.learn(0, False)
    assert 0.25 < cells.chances[0] < 0.5  # 1/e of the old ones is left
    for _ in range(4 * memory):
        cells.learn(0, False)
    assert cells.chances[0] < 0.03


def test_a_chance_is_never_certain():
    cells = Calibration([0.5, 0.5])
    for _ in range(5000):
        cells.learn(0, True)
        cells.learn(1, False)
    assert 0 < cells.chances[1] < cells.chances[0] < 1
