"""Which of the sizes within the gap a step takes: the one whose token costs least.  No clock."""

from __future__ import annotations

import random

import pytest

from engine.cuda.buckets import bucket, sizes
from engine.pace import CALM_S, LEAST, MARGIN, OWED, STALE, STRAIN, STRAINED_S, Pace

SIZES = sizes(2048)
GAP = 0.02

# Milliseconds by flat tokens that an 8B takes on an H200, and a 135M.
CARD = {
    1: 4.05, 16: 4.1, 32: 4.3, 64: 4.5, 96: 5.2, 128: 5.4, 160: 5.9, 192: 6.0, 224: 6.1, 256: 6.4,
    320: 7.5, 384: 8.3, 448: 9.8, 512: 10.3, 640: 13.4, 768: 15.3, 896: 18.2, 1024: 19.6,
    1152: 23.4, 1280: 25.2, 1408: 27.3, 1536: 29.1, 1664: 33.4, 1792: 35.5, 1920: 37.4, 2048: 39.0,
}  # fmt: skip
TINY = {1: 0.6, 8: 0.65, 32: 0.85, 64: 1.0, 128: 1.1, 256: 1.3, 512: 1.7, 1024: 2.6, 2048: 4.4}


def card(streams: int, tokens: int, table: dict[int, float] = CARD) -> float:
    """Seconds of a step; each stream reads its context."""
    row = 0.04 if table is CARD else 0.0006
    return (table[bucket(list(table), tokens)] + row * streams) / 1e3


def waiting(pace: Pace, seconds: float) -> int:
    """Prompt tokens that take so long in the largest steps."""
    return int(seconds * 2048 / pace.expected(2048))


def taught(streams: int, table: dict[int, float] = CARD) -> Pace:
    """A pace that saw every size."""
    pace = Pace(SIZES, GAP, 2048)
    for size in SIZES:
        pace.observe(size, card(min(streams, size), size, table))
    return pace


def drive(pace: Pace, streams: int, steps: int, cost=card, backlog: int = 0) -> list[int]:
    """Sizes of steps with prompts; every fifth has none, as when prompts do not come that fast."""
    taken = []
    for i in range(steps):
        tokens = streams if i % 5 == 0 else min(2048, streams + pace.budget(streams, backlog))
        pace.observe(tokens, cost(streams, tokens))
        taken += [tokens] if i % 5 else []
    return taken


@pytest.mark.parametrize(("streams", "best"), [(8, 256), (28, 256), (64, 512)])
def test_with_few_streams_a_step_stops_where_another_prompt_token_begins_to_cost(streams, best):
    """The largest that fits, of 640 to 896 tokens, would cost half as much again for a token."""
    assert streams + taught(streams).budget(streams) == best
    assert drive(Pace(SIZES, GAP, 2048), streams, 100)[-1] == best


def test_behind_a_long_queue_a_step_is_the_most_efficient_one():
    pace = taught(200)
    assert 200 + pace.budget(200, waiting(pace, 2 * STRAINED_S)) in (1536, 1792)
    assert 200 + pace.budget(200, waiting(pace, CALM_S / 2)) == 512


def test_a_small_model_takes_whole_steps():
    for streams in (8, 32, 200):
        pace = taught(streams, TINY)
        assert streams + pace.budget(streams) == 2048


def test_the_queue_stretches_the_gap_by_its_seconds_and_no_step_is_beyond_it():
    """Where larger steps are ever cheaper, so that the limit alone decides."""

    def device(tokens: int) -> float:
        return 0.008 + tokens * 2e-5

    pace = Pace(SIZES, GAP, 2048)
    for size in SIZES:
        pace.observe(size, device(size))
    calm = pace.budget(50)
    assert pace.budget(50, waiting(pace, 0.99 * CALM_S)) == calm
    seconds = [CALM_S, (CALM_S + STRAINED_S) / 2, STRAINED_S, 9.0]
    budgets = [pace.budget(50, waiting(pace, waited) + 1) for waited in seconds]
    assert budgets == sorted(budgets) and calm < budgets[1] < budgets[2] == budgets[3]
    for budget, times in ((calm, 1), (budgets[-1], STRAIN)):
        most = max(size for size in SIZES if device(size) <= times * MARGIN * GAP)
        assert 50 + budget == most


def test_no_chosen_step_is_expected_to_take_longer_than_the_limit():
    chance = random.Random(2)
    pace = Pace(SIZES, GAP, 2048)
    for _ in range(2000):
        streams, waited = chance.randrange(1, 100), chance.random() * 2 * STRAINED_S
        backlog = waiting(pace, waited) + 1 if pace.expected(2048) else 1
        tokens = streams + pace.budget(streams, backlog)
        share = min(max((waited - CALM_S) / (STRAINED_S - CALM_S), 0.0), 1.0)
        limit = MARGIN * GAP * (1 + (STRAIN - 1) * share)
        if tokens > streams + LEAST:
            assert pace.expected(tokens) <= 1.01 * limit or not pace.expected(2048)
        pace.observe(min(tokens, 2048), card(streams, min(tokens, 2048)) * chance.uniform(1, 1.2))


def test_a_good_size_between_two_that_were_seen_is_found():
    pace = Pace(SIZES, GAP, 2048)
    for size in (28, 128, 768):
        pace.observe(size, card(28, size))
    assert drive(pace, 28, 100)[-1] == 256


def test_a_size_is_tried_once_and_not_again_for_long_if_it_is_bad():
    taken = drive(Pace(SIZES, GAP, 2048), 28, STALE)
    tried = [size for size in taken if size != 256]
    assert 0 < len(tried) <= 12 and len(tried) == len(set(tried))


def test_a_size_that_has_become_good_is_found_though_the_old_one_did_not_change():
    def better(streams: int, tokens: int) -> float:
        return min(card(streams, tokens), max(0.0076, tokens * 1.6e-5))

    pace = Pace(SIZES, GAP, 2048)
    assert drive(pace, 28, 200)[-1] == 256
    taken = drive(pace, 28, 2 * STALE, better)
    assert sum(size in (448, 512) for size in taken[-400:]) > 380


@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_make_it_wander_to_bad_sizes(seed):
    chance = random.Random(seed)

    def noisy(streams: int, tokens: int) -> float:
        stall = 0.02 if chance.random() < 0.002 else 0.0
        return card(streams, tokens) * chance.gauss(1.0, 0.03) + stall

    taken = drive(Pace(SIZES, GAP, 2048), 28, 3000, noisy)[100:]
    alone = OWED * card(28, 28)
    spent = sum(card(28, size) - alone for size in taken)
    best = (card(28, 256) - alone) / (256 - OWED * 28)
    assert spent <= 1.05 * best * sum(size - OWED * 28 for size in taken)
    assert sum(card(28, size) > GAP for size in taken) <= 2


def test_a_device_that_breaks_the_two_facts_is_not_explored_all_the_time():
    """Each size that is run then puts others in doubt: 448 takes less time than 320."""

    def odd(streams: int, tokens: int) -> float:
        return 0.0079 if 384 < tokens <= 512 else card(streams, tokens)

    taken = drive(Pace(SIZES, GAP, 2048), 28, 3000, odd)
    assert sum(odd(28, size) > 0.015 for size in taken) <= 0.05 * len(taken)


def test_after_a_crowd_has_gone_the_small_steps_are_back():
    """What 200 streams taught of a size is not what 28 need, and small steps were not run."""
    pace = taught(200)
    drive(pace, 180, 500, backlog=60_000)
    taken = drive(pace, 28, 1500)
    assert max(taken[:100]) <= 1024 and max(taken[20:100]) <= 512
    assert taken[-50:].count(256) >= 40


def test_streams_that_never_step_alone_do_not_hold_it_at_the_small_size():
    """What they cost alone is unknown, or long ago: then the mean decides, and the queue ends."""
    pace = Pace(SIZES, GAP, 2048)
    for _ in range(40):
        tokens = 28 + pace.budget(28)
        pace.observe(tokens, card(28, tokens))
    assert tokens > 256
    assert drive(pace, 28, 20)[-1] == 256


def test_only_what_waits_counts_of_a_size():
    """332 tokens would run as 384, for a third of its cost: better two steps."""
    pace = taught(32)
    assert 32 + pace.budget(32, 300) == 256
    assert pace.budget(32, 10) == LEAST
