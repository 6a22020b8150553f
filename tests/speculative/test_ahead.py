"""How long a device's chains are to be.  Knows no device."""

from __future__ import annotations

import pytest

from speculative.ahead import FIRST, LENGTHS, LOOK, TRY, Ahead
from speculative.length import StepTimes


def made(row: float = 0.002, token: float = 0.05) -> Ahead:
    """One that knows: a step takes 1 s with one row, a token of a chain `token`."""
    ahead = Ahead(StepTimes(row))
    ahead.observe(1, 1.0, 0)
    ahead._turn = FIRST
    for _ in range(200):
        ahead.observe(1, 1.0 + 3 * token, 3)
    return ahead


@pytest.mark.parametrize(("chance", "wanted"), [(0.02, 0), (0.2, 1), (0.97, 7)])
def test_likely_chains_are_long_and_unlikely_ones_are_not_made(chance, wanted):
    assert made().choose([chance] * 8, 1, 0, 7) == wanted


def test_a_length_is_one_that_graphs_are_made_for_and_within_what_is_allowed():
    for most in range(1, 9):
        found = made().choose([0.95] * 8, 1, 0, most)
        assert found == max(length for length in LENGTHS if length <= most)


def test_nothing_is_drafted_where_rows_cost_what_they_compute():
    ahead = made(row=1.0)
    assert ahead.choose([0.6] * 8, 64, 0, 7) == 0


def test_what_a_token_of_a_chain_costs_is_learned():
    dear, cheap = made(token=0.6), made(token=0.01)
    assert dear.choose([0.5] * 8, 1, 0, 7) == 0 < cheap.choose([0.5] * 8, 1, 0, 7)


def test_it_looks_now_and_then_at_a_step_by_itself_and_tries_a_chain_where_none_pays():
    ahead, good, bad = made(), [0.9] * 8, [0.01] * 8
    found = [ahead.choose(good, 1, 0, 7) for _ in range(4 * LOOK)]
    assert found.count(0) == 4 and set(found) == {0, 7}
    tried = [ahead.choose(bad, 1, 0, 7) for _ in range(2 * LOOK * TRY)]
    assert tried.count(1) == 2 and set(tried) == {0, 1}


def test_the_first_steps_draft_nothing():
    ahead = Ahead(StepTimes(0.002))
    assert [ahead.choose([0.9] * 8, 1, 0, 7) for _ in range(FIRST + 1)] == [0] * FIRST + [7]
