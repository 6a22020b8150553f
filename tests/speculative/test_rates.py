"""What either way gave, by number of sequences.  Knows no clock."""

from __future__ import annotations

import math

import pytest

from speculative.rates import ENOUGH, RAN, SLEPT, WAITED, Rates


def seen(rates: Rates, sequences: int, waited: int, tokens: int, steps: int = ENOUGH) -> None:
    for _ in range(steps):
        rates.observe(sequences, waited, tokens, 0.5)


def test_nothing_is_known_before_both_ways_were_seen_often_enough() -> None:
    rates = Rates()
    seen(rates, 8, False, 8)
    assert rates.waiting(8) is None
    seen(rates, 8, True, 24, ENOUGH - 1)
    assert rates.waiting(8) is None
    seen(rates, 8, True, 24, 1)
    assert rates.waiting(8) == pytest.approx(3)


def test_a_size_at_which_one_way_was_not_seen_takes_both_from_the_nearest() -> None:
    rates = Rates()
    for sequences, gained in ((4, 16), (100, 90)):
        seen(rates, sequences, False, sequences)
        seen(rates, sequences, True, gained)
    seen(rates, 32, False, 1000)  # tells nothing by itself
    assert rates.waiting(5) == rates.waiting(9) == pytest.approx(4)
    assert rates.waiting(40) == rates.waiting(127) == rates.waiting(500) == pytest.approx(0.9)


def test_what_was_long_ago_fades() -> None:
    rates = Rates()
    seen(rates, 2, False, 2)
    seen(rates, 2, True, 8)
    seen(rates, 2, True, 2, 1000)
    assert rates.waiting(2) == pytest.approx(1, abs=0.01)


def test_running_ahead_that_gave_nothing_is_worth_less_than_anything() -> None:
    """Answers of one token: what ran ahead of their ends was in vain."""
    rates = Rates()
    seen(rates, 2, False, 0)
    seen(rates, 2, True, 2)
    assert rates.waiting(2) == math.inf
    seen(rates, 16, False, 0)
    seen(rates, 16, True, 0)
    assert rates.waiting(16) == math.inf  # as near it


def test_the_best_of_running_ahead_is_what_waiting_is_compared_with() -> None:
    rates = Rates()
    seen(rates, 8, RAN, 8)
    seen(rates, 8, WAITED, 12)
    assert not rates.seen(8, SLEPT) and rates.waiting(8) == pytest.approx(1.5)
    seen(rates, 8, SLEPT, 10, ENOUGH - 1)
    assert not rates.seen(8, SLEPT) and rates.waiting(8) == pytest.approx(1.5)
    seen(rates, 8, SLEPT, 10, 1)
    assert rates.seen(8, SLEPT) and rates.waiting(8) == pytest.approx(1.2)
    seen(rates, 8, RAN, 24)  # the machine became quicker
    assert rates.waiting(8) < 0.8
    seen(rates, 8, SLEPT, 6, 300)  # and slow: what was quick with the draft is long ago
    assert rates.waiting(8) > 1.8
    lone = Rates()  # where nothing is kept ready
    seen(lone, 8, SLEPT, 10)
    seen(lone, 8, WAITED, 12)
    assert lone.waiting(8) == pytest.approx(1.2)
