"""From where on a device draft knows a sequence, against a list of its rows."""

from __future__ import annotations

import random
from types import SimpleNamespace as Some

import numpy as np
import pytest

from engine.cuda.known import BUSY, Known, reads

SIZE, BLOCKS = 4, 12


def row_of(blocks: list[int], start: int, count: int = 1, draft: tuple[int, ...] = ()) -> Some:
    """A row of a sequence that decodes, or with more than one token and no draft, that reads."""
    seq = Some(blocks=[Some(id=block) for block in blocks])
    return Some(seq=seq, start=start, count=count, last=True, draft=draft)


def planned(rows, fresh=(), copies=(), asleep: bool = False, reading: bool = False) -> Some:
    return Some(rows=rows, fresh=[*fresh], copies=[*copies], asleep=asleep, reading=reading,
                drawing=len(rows))


class Texts:
    """Sequences that grow by a token a step, end, and leave their blocks to others."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.known, self.free = Known(BLOCKS * 3, SIZE), [*range(BLOCKS * 3)]
        self.chance.shuffle(self.free)
        self.blocks: list[list[int]] = [[] for _ in range(3)]
        self.made: list[list[bool]] = [[] for _ in range(3)]  # rows, by position

    def step(self, asleep: bool, early: int) -> None:
        """One token of each; a block is handed out `early` tokens before it is needed."""
        fresh, rows = [], []
        for own, made in zip(self.blocks, self.made, strict=True):
            if len(made) >= SIZE * BLOCKS - 2 - early or self.chance.random() < 0.02:
                self.free += own
                own.clear(), made.clear()
            while (len(made) + 1 + early) // SIZE >= len(own):
                own.append(self.free.pop(0))
                fresh.append(own[-1])
            rows.append(row_of(own, len(made)))
        self.known.follow(planned(rows, fresh, asleep=asleep))
        for made in self.made:
            made.append(not asleep)

    def begins(self) -> list[int]:
        ids = np.array([own + [0] * (BLOCKS - len(own)) for own in self.blocks], np.int32)
        starts = np.array([len(made) - 1 for made in self.made], np.int32)
        return self.known.begins(ids, starts).tolist()


@pytest.mark.parametrize("early", [0, 3])
@pytest.mark.parametrize("often", [0.05, 0.3])
def test_what_is_known_is_what_was_written_awake_since_the_newest_gap(often, early):
    """`often`: how probable it is that a step changes between sleeping and waking."""
    texts, asleep, gaps = Texts(5), False, 0
    for _ in range(3000):
        asleep ^= texts.chance.random() < often
        texts.step(asleep, early)
        if asleep:  # nobody asks
            continue
        for made, begin in zip(texts.made, texts.begins(), strict=True):
            last = max((i for i, one in enumerate(made) if not one), default=-1)
            # The row of the newest token of a block lies in the next one, which may be new.
            assert begin == min(last + 2, len(made)) or (begin == 1 and last == -1)
            gaps += begin > 1
    assert gaps > 100


def test_a_sleep_is_noted_when_it_begins_and_with_each_block_and_not_at_each_step():
    class Counting(dict):
        def __getattr__(self, name):
            counted.append(name)
            return self[name]

    counted: list[str] = []
    known, seq = Known(4, SIZE), Some(blocks=[Some(id=0)])
    for start in range(SIZE):
        row = Counting(seq=seq, start=start, count=1, last=True, draft=())
        known.follow(planned([row], asleep=True))
        looked, counted = len(counted), []
        assert (looked > 0) == (start == 0)


def test_drafts_that_a_sleeping_draft_did_not_see_are_no_rows():
    """The step that wakes verifies two tokens of the host's: it makes rows of them."""
    known, ids = Known(4, SIZE), np.array([[2, 3]], np.int32)
    known.follow(planned([row_of([2, 3], 1)], [2, 3], asleep=True))
    known.follow(planned([row_of([2, 3], 2, 3, draft=(7, 8))]))
    assert known.begins(ids, np.array([4], np.int32)).tolist() == [3]


def test_a_prompt_that_was_read_in_a_sleep_is_known_and_what_others_said_meanwhile_is_not():
    known, ids = Known(8, SIZE), np.array([[0, 1], [2, 3]], np.int32)
    talks, prompt = row_of([0, 1], 1), row_of([2, 3], 0, 6)
    known.follow(planned([talks], [0, 1], asleep=True))
    known.follow(planned([row_of([0, 1], 2), prompt], [2, 3], asleep=True, reading=True))
    known.slept(np.array([2], np.int32))
    assert known.begins(ids, np.array([3, 6], np.int32)).tolist() == [4, 1]
    known.follow(planned([row_of([0, 1], 3), row_of([2, 3], 6)], asleep=True))
    known.follow(planned([row_of([0, 1], 4), row_of([2, 3], 7)]))
    assert known.begins(ids, np.array([4, 7], np.int32)).tolist() == [5, 8]
    # Whoever finds the prompt's first block in the cache knows it.
    assert known.begins(np.array([[2, 5]], np.int32), np.array([4], np.int32)).tolist() == [1]


def test_beside_many_no_prompt_is_read():
    rows = [row_of([0], 1)] * BUSY
    assert reads(planned(rows, reading=True)) and not reads(planned(rows))
    assert not reads(planned([*rows, rows[0]], reading=True))


def test_a_copy_has_the_gaps_of_its_source():
    known = Known(4, SIZE)
    known.slept(np.array([2 * SIZE + 1], np.int32))
    ids, starts = np.array([[2], [3], [1]], np.int32), np.array([3, 3, 3], np.int32)
    assert known.begins(ids, starts).tolist() == [3, 1, 1]
    known.follow(planned([], [2], [(2, 3)]))  # its source is handed out in the same plan
    assert known.begins(ids, starts).tolist() == [1, 3, 1]


@pytest.mark.parametrize("reads", [True, False])
def test_a_copy_of_what_was_written_in_the_sleep_that_it_ends_is_not_trusted(reads):
    """Nor is one to a block that belonged to somebody in that sleep taken for that one's."""
    known, ids = Known(8, SIZE), np.array([[5]], np.int32)
    talks = row_of([0, 1], 1)
    known.follow(planned([talks], [0], asleep=True))
    known.follow(planned([row_of([0, 1], 4)], [1, 6], asleep=True))
    rows = [row_of([0, 1], 6), row_of([5], 2, 2)]
    known.follow(planned(rows, [], [(1, 5), (3, 6)], asleep=reads, reading=reads))
    assert known.begins(ids, np.array([3], np.int32)).tolist() == [4]
    assert known.begins(np.array([[6]], np.int32), np.array([3], np.int32)).tolist() == [1]


def test_a_copy_that_is_made_in_a_sleep_is_not_trusted():
    known = Known(4, SIZE)
    known.follow(planned([], [], [(0, 3)], asleep=True))
    known.follow(planned([], [2], [(3, 2)]))  # and then handed out anew
    ids = np.array([[3, 0], [2, 0]], np.int32)
    assert known.begins(ids, np.array([3, 3], np.int32)).tolist() == [4, 1]
    assert known.begins(ids, np.array([6, 6], np.int32)).tolist() == [SIZE + 1, 1]


def test_without_a_gap_all_is_known():
    assert Known(4, SIZE).begins(np.zeros((2, 1), np.int32), np.array([0, 3])).tolist() == [1, 1]
