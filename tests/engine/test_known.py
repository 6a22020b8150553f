"""From where on a device draft knows a sequence, against a list of its rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.cuda.known import MANY, Known

SIZE, BLOCKS = 4, 12


@pytest.mark.parametrize("often", [1, 5, 3 * MANY])
def test_what_is_known_is_what_was_written_awake_since_the_newest_gap(often):
    """Sequences grow, sleep and wake, end, and leave their blocks to others; asked so often."""
    chance = random.Random(5)
    known, free = Known(BLOCKS * 3, SIZE), list(range(BLOCKS * 3))
    chance.shuffle(free)
    blocks, rows = [[] for _ in range(3)], [[] for _ in range(3)]  # rows: made, by position
    gaps = 0
    for step in range(2000 * min(often, 5)):
        fresh, slept = [], []
        for own, made in zip(blocks, rows, strict=True):
            if len(made) == SIZE * BLOCKS - 2 or chance.random() < 0.02:
                free += own
                own.clear(), made.clear()
            if (len(made) + 1) // SIZE >= len(own):
                own.append(free.pop(0))
                fresh.append(own[-1])
        known.follow(fresh, [])
        asleep = chance.random() < 0.3
        for own, made in zip(blocks, rows, strict=True):
            slept.append(own[len(made) // SIZE] * SIZE + len(made) % SIZE)
            made.append(not asleep)
        if asleep:
            known.slept(np.array(slept, np.int32))
        if step % often:
            continue
        ids = np.array([own + [0] * (BLOCKS - len(own)) for own in blocks], np.int32)
        found = known.begins(ids, np.array([len(made) - 1 for made in rows], np.int32))
        for made, begin in zip(rows, found.tolist(), strict=True):
            last = max((i for i, one in enumerate(made) if not one), default=-1)
            # The row of the newest token of a block lies in the next one, which may be new.
            assert begin == min(last + 2, len(made)) or (begin == 1 and last == -1)
            gaps += begin > 1
    assert gaps > 10


def test_a_copy_has_the_gaps_of_its_source():
    known = Known(4, SIZE)
    known.slept(np.array([2 * SIZE + 1], np.int32))
    ids, starts = np.array([[2], [3], [1]], np.int32), np.array([3, 3, 3], np.int32)
    assert known.begins(ids, starts).tolist() == [3, 1, 1]
    known.follow([2], [(2, 3)])  # its source is handed out in the same plan
    assert known.begins(ids, starts).tolist() == [1, 3, 1]


def test_a_copy_that_is_made_in_a_sleep_is_not_trusted():
    known = Known(4, SIZE)
    known.slept(np.array([SIZE], np.int32))
    known.follow([], [(0, 3)])
    known.follow([2], [(3, 2)])  # and then handed out anew
    ids = np.array([[3, 0], [2, 0]], np.int32)
    assert known.begins(ids, np.array([3, 3], np.int32)).tolist() == [4, 1]
    assert known.begins(ids, np.array([6, 6], np.int32)).tolist() == [SIZE, 1]


def test_without_a_gap_all_is_known():
    assert Known(4, SIZE).begins(np.zeros((2, 1), np.int32), np.array([0, 3])).tolist() == [1, 1]
