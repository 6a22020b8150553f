"""Whether steps wait, and how long a device's chains are to be.  Knows no device."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from engine.proposer import ASLEEP, FREE, HOST, LENGTHS, Load, Ran
from speculative.ahead import BLIND, DREAM, FIRST, LOOK, NAP, REST, SELDOM, TRIAL, TRY, WAKE, Ahead

ONE = Load(1)


def made(row: float = 0.002, token: float = 0.05) -> Ahead:
    """One of a device that never runs ahead.

    It knows: a step takes 1 s with one row, a token of a chain `token`.
    """
    ahead = Ahead(row, False)
    ahead.observe(Ran(1, 1.0))
    ahead._turn = FIRST
    for _ in range(200):
        ahead.observe(Ran(1, 1.0 + 3 * token, 3))
    return ahead


def run(ahead: Ahead, steps: int, load: Load, chances, worth: float, most: int, *, free: float,
        waits: float, token: float) -> list[int]:  # fmt: skip
    """What is chosen, step by step, where steps take so long, rows nothing."""
    found, alone, guesses, chosen = [], False, 0, FREE
    for _ in range(steps):
        slept, chosen = chosen == ASLEEP, ahead.choose(chances, worth, load, most)
        chain_s = guesses * token
        chain = sum(math.prod(chances[: n + 1]) for n in range(guesses))
        gained = max(worth, chain) if alone else 0
        ahead.observe(Ran(load.rows, waits + chain_s if alone else free, guesses, chain_s, alone,
                          sequences=load.rows, tokens=round(load.rows * (1 + gained)),
                          asleep=slept and not alone))
        alone, guesses = chosen not in (FREE, ASLEEP), max(chosen, 0)
        found.append(chosen)
    return found


@pytest.mark.parametrize(("chance", "wanted"), [(0.02, 0), (0.2, 1), (0.97, 7)])
def test_likely_chains_are_long_and_unlikely_ones_are_not_made(chance, wanted):
    assert made().choose([chance] * 8, 0.0, ONE, 7) == wanted


def test_a_length_is_one_that_graphs_are_made_for_and_within_what_is_allowed():
    for most in range(1, 9):
        found = made().choose([0.95] * 8, 0.0, ONE, most)
        assert found == max(length for length in LENGTHS if length <= most)


def test_nothing_is_drafted_where_rows_cost_what_they_compute():
    ahead = made(row=1.0)
    assert ahead.choose([0.6] * 8, 0.0, Load(64), 7) == 0


def test_what_a_token_of_a_chain_costs_is_learned():
    dear, cheap = made(token=0.6), made(token=0.01)
    assert dear.choose([0.5] * 8, 0.0, ONE, 7) == 0 < cheap.choose([0.5] * 8, 0.0, ONE, 7)


def test_it_looks_now_and_then_at_a_step_by_itself_and_tries_a_chain_where_none_pays():
    ahead, good, bad = made(), [0.9] * 8, [0.01] * 8
    found = [ahead.choose(good, 0.0, ONE, 7) for _ in range(4 * LOOK)]
    assert found.count(0) == 4 and set(found) == {0, 7}
    tried = [ahead.choose(bad, 0.0, ONE, 7) for _ in range(2 * LOOK * TRY)]
    assert tried.count(1) == 2 and set(tried) == {0, 1}


def test_the_first_steps_draft_nothing():
    ahead = Ahead(0.002, False)
    assert [ahead.choose([0.9] * 8, 0.0, ONE, 7) for _ in range(FIRST + 1)] == [0] * FIRST + [7]


def test_a_wait_that_costs_more_than_chains_bring_is_only_tried():
    """Two tokens a step, but each takes three times as long."""
    found = run(Ahead(0.002, True), 4000, Load(32), [0.5] * 8, 0.0, 7, free=1.0, waits=3.0,
                token=0.1)  # fmt: skip
    waited = sum(one >= 0 for one in found)
    assert found[:FIRST] == [FREE] * FIRST
    assert TRIAL <= waited < 0.02 * len(found)


def test_a_wait_that_pays_is_found_though_it_was_believed_not_to():
    found = run(Ahead(0.002, True), 1000, Load(1), [0.4] * 8, 0.0, 7, free=1.0, waits=1.02,
                token=0.01)  # fmt: skip
    assert sum(one > 0 for one in found[200:]) > 0.95 * len(found[200:])


@pytest.mark.parametrize(("waits", "pays"), [(1.7, True), (2.2, False)])
def test_of_many_what_gave_more_is_done_and_the_other_way_only_tried(waits, pays):
    """Twice the tokens a step, at a cost that no count of rows tells."""
    found = run(Ahead(0.002, True), 4000, Load(64), [0.0], 1.0, 0, free=1.0, waits=waits,
                token=0.0)[500:]  # fmt: skip
    waited = sum(one >= 0 for one in found) / len(found)
    assert 0.98 < waited < 1 if pays else 0 < waited < 0.02


def test_guesses_of_the_host_make_steps_wait_while_they_are_worth_it():
    ahead, none = Ahead(0.002, True), [0.0]
    how = {"free": 1.0, "waits": 1.6, "token": 0.0}
    assert run(ahead, 30, ONE, none, 0.0, 0, **how).count(0) == TRIAL
    found = run(ahead, 60, ONE, none, 3.0, 0, **how)
    assert found.count(0) > 50
    found = run(ahead, 60, ONE, none, 0.1, 0, **how)
    assert found.count(0) <= 2 * TRIAL


def test_a_draft_of_the_device_that_is_far_from_paying_sleeps():
    ahead = Ahead(0.002, True)
    how = {"free": 1.0, "waits": 3.0, "token": 0.1}
    assert ASLEEP not in run(ahead, DREAM, Load(8), [0.3] * 8, 0.0, 7, **how)
    found = run(ahead, 12_000, Load(8), [0.3] * 8, 0.0, 7, **how)
    assert found.count(ASLEEP) > 0.85 * len(found)
    # It is tried all the same, when it has read for a while: it knows nothing of what it slept
    # through.
    tried = [i for i, one in enumerate(found) if one > 0 and found[i - 1] <= 0]
    assert len(tried) >= 3
    for at in tried:
        assert ASLEEP not in found[max(at - NAP + 5, 0) : at]


def test_a_decision_to_sleep_holds_for_several_and_is_no_longer_than_it_would_be():
    """With a head and without one; trials come after as many steps as where each is asked for."""
    for most in (7, 0):
        woke = []
        for holds in (False, True):
            ahead, step, slept, load = Ahead(0.002, True), 0, 0, Load(8)
            while step < 4 * SELDOM:
                ahead.rested(load.steps - 1)
                chosen = ahead.choose([0.3] * 8, 0.0, load, most)
                if slept > WAKE and chosen != ASLEEP:
                    break
                slept += load.steps if chosen == ASLEEP else 0
                load = Load(8, steps=ahead.holds if holds else 1)
                step += load.steps
                ahead.observe(Ran(8, 3.0 if chosen >= 0 else 1.0, alone=chosen >= 0, sequences=8,
                                  tokens=8))
                assert ahead.holds == (REST if chosen == ASLEEP and not ahead._rest else 1)
            woke.append(step)
        assert WAKE < woke[0] <= woke[1] <= woke[0] + 2 * REST < SELDOM * 1.2, most
    ahead.choose([0.3] * 8, 0.0, ONE, 0)
    assert ahead.holds == 1


@pytest.mark.parametrize("load", [ONE, Load(32)], ids=["one", "several"])
def test_a_draft_of_the_device_sleeps_while_steps_wait_for_the_host_alone(load):
    ahead, how = Ahead(0.002, True), {"free": 1.0, "waits": 1.2, "token": 0.3}
    found = run(ahead, 1500, load, [0.05] * 8, 2.0, 7, **how)
    assert found[-600:].count(HOST) > 0.95 * 600
    assert all(one < 1 for one in found[-600:]), "the other way is what is tried"
    # It wakes as soon as its chains are worth more.
    found = run(ahead, 300, load, [0.95] * 8, 0.5, 7, **how)
    assert sum(one > 0 for one in found[-200:]) > 0.9 * 200


@pytest.mark.parametrize("load", [ONE, Load(32)], ids=["one", "several"])
def test_what_a_sleep_costs_is_still_measured(load):
    """What runs ahead becomes five times as slow: then waiting pays."""
    ahead, how = Ahead(0.002, True), {"waits": 2.2, "token": 0.1}
    run(ahead, 200, Load(32), [0.05] * 8, 0.0, 7, free=1.0, **how)  # which it may remember
    found = run(ahead, 400, load, [0.05] * 8, 0.0, 7, free=1.0, **how)
    assert found.count(ASLEEP) > 40
    found = run(ahead, 2500, load, [0.05] * 8, 0.0, 7, free=5.0, **how)
    assert sum(one not in (FREE, ASLEEP) for one in found[-200:]) > 150


@pytest.mark.parametrize("load", [ONE, Load(32)], ids=["one", "several"])
def test_the_other_way_is_measured_out_of_a_wait_in_which_a_draft_sleeps(load):
    ahead, how = Ahead(0.002, True), {"waits": 1.2, "token": 0.3}
    found = run(ahead, 1500, load, [0.05] * 8, 2.0, 7, free=1.0, **how)
    assert found[-100:].count(HOST) > 90
    found = run(ahead, 20_000, load, [0.05] * 8, 2.0, 7, free=0.1, **how)
    assert sum(one in (FREE, ASLEEP) for one in found[-200:]) > 150, "it was seen to be quicker"


def test_what_gave_far_less_is_tried_the_seldomer_the_more_it_costs():
    ahead, how = Ahead(0.002, True), {"free": 1.0, "waits": 3.0, "token": 0.1}
    found = run(ahead, 5 * SELDOM, Load(64), [0.3] * 8, 0.0, 7, **how)
    tried = [i for i, one in enumerate(found) if one > 0 and found[i - 1] <= 0]
    assert 1 <= len(tried) <= 2 and tried[-1] < 500, "and then not in eight times SELDOM steps"
    # With few, where a trial costs little and may tell another thing, at once.
    found = run(ahead, WAKE + 20, Load(4), [0.3] * 8, 0.0, 7, **how)
    assert any(one > 0 for one in found)


def test_the_first_steps_of_a_way_do_not_count_where_nobody_has_been_guessed_for():
    """Beginnings cost: without their steps waiting pays, with them it would not seem to."""
    ahead, found = Ahead(0.002, True), []
    waited = 0
    for _ in range(2000):
        chosen = ahead.choose([0.0], 1.0, Load(32), 0)
        alone = bool(found) and found[-1] >= 0
        waited = waited + 1 if alone else 0
        seconds = (20.0 if waited <= 3 else 1.5) if alone else 1.0
        ahead.observe(Ran(32, seconds, alone=alone, sequences=32, tokens=64 if alone else 32))
        found.append(chosen)
    assert found[400:].count(0) > 0.95 * len(found[400:])


def test_where_no_step_ever_runs_ahead_chains_are_drafted_all_the_same():
    """A device draft that the host has to feed: each step waits for it."""
    ahead, found, guesses = Ahead(0.002, True), [], 0
    for _ in range(120):
        guesses = max(ahead.choose([0.9] * 8, 0.0, ONE, 7), 0)
        ahead.observe(Ran(1, 1.0 + 0.01 * guesses, guesses))
        found.append(guesses)
    assert found[:BLIND] == [0] * BLIND and found[BLIND + 3 :].count(7) > 30


@pytest.mark.parametrize(("bare", "wanted"), [(0.0, {HOST, 0}), (0.55, {2, 3}), (1.0, {3, 5, 7})])
def test_those_of_several_that_the_host_has_no_guess_for_are_worth_a_chain(bare, wanted):
    """It has long guesses for the others, in the mean longer than any chain."""
    ahead, found, alone, guesses = Ahead(0.002, True), [], False, 0
    chances, load = [0.65, 0.6, 0.5, 0.4, 0.4, 0.4, 0.4], Load(32, masked=True)
    for _ in range(1500):
        chosen = ahead.choose(chances, 3.5, load, 7, bare)
        chain = sum(math.prod(chances[: n + 1]) for n in range(guesses))
        gained, chain_s = (3.5 + bare * chain, 0.03 * guesses) if alone else (0.0, 0.0)
        ahead.observe(Ran(144 if alone else 32, (1.3 + chain_s) if alone else 1.0, guesses, chain_s,
                          alone, True, 32, round(32 * (1 + gained))))
        alone, guesses = chosen not in (FREE, ASLEEP), max(chosen, 0)
        found.append(chosen)
    late = found[500:]
    assert sum(one in wanted for one in late) > 0.9 * len(late), Counter(late)


@pytest.mark.parametrize(("waits", "best"), [(0.7, HOST), (0.8, ASLEEP), (1.0, ASLEEP)])
@pytest.mark.parametrize("seed", range(3))
def test_a_wait_is_compared_with_a_draft_that_sleeps_not_with_one_that_is_kept_ready(
    waits, best, seed):
    """Ready costs an eighth of a step.  A wait that beats only that is worse than none."""
    ahead, chance, given, seconds = Ahead(0.002, True), random.Random(seed), 0.0, 0.0
    found, alone, guesses, chosen = [], False, 0, FREE
    for _ in range(12_800):
        before, chosen = chosen, ahead.choose([0.4, *[0.35] * 6], 0.15, Load(8), 7)
        chain = sum(0.4 * 0.35**place for place in range(guesses))
        ready = 0.58 if before == ASLEEP else 0.65
        took = (waits + 0.06 * guesses if alone else ready) * chance.gauss(1, 0.1)
        tokens = 8 * (1 + (max(0.15, chain) if alone else 0)) * chance.gauss(1, 0.05)
        given, seconds = given + tokens, seconds + took
        ahead.observe(Ran(8, took, guesses, 0.06 * guesses, alone, sequences=8,
                          tokens=round(tokens), asleep=before == ASLEEP and not alone))
        alone, guesses = chosen not in (FREE, ASLEEP), max(chosen, 0)
        found.append(chosen)
    asleep = 8 / 0.58
    assert given / seconds > (1.04 if best == HOST else 0.985) * asleep, Counter(found)
    assert found.count(FREE) < 0.06 * len(found), "ready for nothing"
