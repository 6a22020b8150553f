"""Work items of the attention kernels: complete, in order, quick to make.  Runs no kernel."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest

from engine.kernels import attention_plan as plan

SPLIT = 128


def test_every_position_of_every_short_row_is_in_exactly_one_item():
    made = np.random.default_rng(1)
    starts = made.integers(0, 2000, 200).astype(np.int32)
    counts = made.integers(0, 40, 200).astype(np.int32)
    for tile in (1, 2, 4, 5, 16):
        items = np.full((2, 40_000), -1, np.int32)
        total = plan.fill_short(starts, counts, items, tile=tile, split=SPLIT)
        found = [tuple(pair) for pair in items[:, :total].T.tolist()]
        wanted = [
            (row * plan.TILES + at, split)
            for row in range(200) if 0 < counts[row] <= plan.SHORT
            for at in range(-(-int(counts[row]) // tile))
            for split in range((int(starts[row]) + min(int(counts[row]), (at + 1) * tile) - 1)
                               // SPLIT + 1)
        ]  # fmt: skip
        assert found == wanted
        assert (items[:, total:] == -1).all()
        assert total <= plan.most_short_items(200, 40, 2040, tile=tile, split=SPLIT)


def test_every_token_of_every_chunk_is_in_one_item_and_the_longest_context_comes_first():
    made = np.random.default_rng(2)
    starts = made.integers(0, 2000, 50).astype(np.int32)
    counts = made.integers(0, 300, 50).astype(np.int32)
    tokens = int(counts.sum())
    items = np.zeros((2, plan.most_chunk_items(50, tokens, tile=128)), np.int32)
    total = plan.fill_chunks(starts, counts, items, tile=128)
    found = {tuple(pair) for pair in items[:, :total].T.tolist()}
    assert len(found) == total
    assert found == {(row, at) for row in range(50) if counts[row] > plan.SHORT
                     for at in range(0, int(counts[row]), 128)}  # fmt: skip
    reach = starts[items[0, :total]] + items[1, :total]
    assert (np.diff(reach) <= 0).all()


def test_a_step_of_no_rows_has_no_items():
    nothing, items = np.zeros(4, np.int32), np.zeros((2, 1), np.int32)
    assert plan.fill_short(nothing, nothing, items, tile=4, split=SPLIT) == 0
    assert plan.fill_chunks(nothing, nothing, items, tile=64) == 0
    assert plan.most_chunk_items(4, 16, tile=64) == 0


def test_a_plan_that_outgrows_its_list_says_so():
    starts, counts = np.full(2, 500, np.int32), np.ones(2, np.int32)
    with pytest.raises(AssertionError, match="8 short items, room for 7"):
        plan.fill_short(starts, counts, np.zeros((2, 7), np.int32), tile=4, split=SPLIT)


def test_a_decode_step_of_256_rows_is_planned_in_a_tenth_of_a_millisecond():
    starts = np.arange(256, dtype=np.int32) * 8
    counts = np.ones(256, np.int32)
    items = np.zeros((2, 4096), np.int32)
    best = math.inf
    for _ in range(50):
        began = time.thread_time()
        plan.fill_short(starts, counts, items, tile=4, split=SPLIT)
        plan.fill_chunks(starts, counts, items, tile=128)
        best = min(best, time.thread_time() - began)
    assert best < 200e-6  # 20 us when the machine is ours


def test_items_of_a_few_rows_are_those_that_numpy_writes():
    chance, chunks = random.Random(9), 0
    for _ in range(300):
        rows, first = chance.randrange(1, plan.LISTED + 1), chance.choice([0, 0, 7])
        tile, split = chance.choice([1, 4, 5, 8]), chance.choice([64, 128])
        starts = np.array([chance.randrange(900) for _ in range(rows)], np.int32)
        counts = np.array([chance.choice([1, 1, 2, 7, 16, plan.SHORT, plan.SHORT + 1, 300])
                           for _ in range(rows)], np.int32)  # fmt: skip
        items = np.zeros((2, 16_000), np.int32)
        total = plan.fill_short(starts, counts, items, tile=tile, split=split)
        items[0] += first * plan.TILES
        own = starts.tolist(), counts.tolist()
        few = plan.few_short(*own, tile=tile, split=split, first=first)
        assert [list(line[:total]) for line in items] == [*few]
        total = plan.fill_chunks(starts, counts, items, tile=16 * tile)
        items[0] += first
        assert [list(line[:total]) for line in items] == [
            *plan.few_chunks(*own, tile=16 * tile, first=first)]
        chunks += total
    assert chunks > 1000
