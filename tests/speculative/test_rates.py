"""What either way gave, by number of sequences.  Knows no clock."""

from __future__ import annotations

import math

import pytest

from speculative.rates import AHEAD, ENOUGH, HALF, WAITED, Rates


def seen(rates: Rates, sequences: int, way: int, tokens: int, steps: int = ENOUGH) -> None:
    for _ in range(steps):
        rates.observe(sequences, way, tokens, 0.5)


def test_nothing_is_known_before_both_ways_were_seen_often_enough() -> None:
    rates = Rates()
    seen(rates, 8, AHEAD, 8)
    assert rates.gain(8, WAITED) is None
    seen(rates, 8, WAITED, 24, ENOUGH - 1)
    assert rates.gain(8, WAITED) is None
    seen(rates, 8, WAITED, 24, 1)
    assert rates.gain(8, WAITED) == pytest.approx(3)


def test_a_size_at_which_one_way_was_not_seen_takes_both_from_the_nearest() -> None:
    rates = Rates()
    for sequences, gained in ((4, 16), (100, 90)):
        seen(rates, sequences, AHEAD, sequences)
        seen(rates, sequences, WAITED, gained)
    seen(rates, 32, AHEAD, 1000)  # tells nothing by itself
    assert rates.gain(5, WAITED) == rates.gain(9, WAITED) == pytest.approx(4)
    assert rates.gain(40, WAITED) == rates.gain(127, WAITED) == pytest.approx(0.9)
    assert rates.gain(500, WAITED) == pytest.approx(0.9)


def test_what_was_long_ago_fades() -> None:
    rates = Rates()
    seen(rates, 2, AHEAD, 2)
    seen(rates, 2, WAITED, 8)
    seen(rates, 2, WAITED, 2, 1000)
    assert rates.gain(2, WAITED) == pytest.approx(1, abs=0.01)


def test_running_ahead_that_gave_nothing_is_worth_less_than_anything() -> None:
    """Answers of one token: what ran ahead of their ends was in vain."""
    rates = Rates()
    seen(rates, 2, AHEAD, 0)
    seen(rates, 2, WAITED, 2)
    assert rates.gain(2, WAITED) == math.inf
    seen(rates, 16, AHEAD, 0)
    seen(rates, 16, WAITED, 0)
    assert rates.gain(16, WAITED) == math.inf  # as near it


def test_each_way_is_compared_with_running_ahead() -> None:
    rates = Rates()
    seen(rates, 8, AHEAD, 8)
    seen(rates, 8, WAITED, 24)
    assert rates.gain(8, HALF) is None
    seen(rates, 8, HALF, 32)
    assert rates.gain(8, HALF) == pytest.approx(4) and rates.gain(8, WAITED) == pytest.approx(3)
