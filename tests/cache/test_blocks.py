"""BlockPool, case by case.  test_machine.py mixes the cases; sessions are in test_sessions.py."""

from __future__ import annotations

import random
import time

import pytest

from cache import prefix
from cache.blocks import BlockPool, OutOfBlocks

ROOT = prefix.root(b"tenant")
SIZE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool(monkeypatch):  # torn down before the stubs are
    made = BlockPool(total=16, size=SIZE, clock=Clock())
    yield made
    made.check()


def prompt(blocks, start=0, size=SIZE):
    return list(range(start, start + blocks * size))


def fill(pool, tokens, root=ROOT):
    """Compute `tokens` as a new sequence would, hits included; return its blocks."""
    blocks = pool.match(root, tokens, len(tokens))
    pool.share(blocks)
    parent = blocks[-1].key if blocks else root
    size = pool.size
    for start in range(len(blocks) * size, len(tokens) - size + 1, size):
        blocks += pool.take(1)
        parent = pool.publish(blocks[-1], parent, tokens[start : start + size])
    pool.check()
    return blocks


def ids(blocks):
    return [block.id for block in blocks]


def test_blocks_of_a_new_pool_come_side_by_side(pool):
    assert ids(pool.take(5)) == [0, 1, 2, 3, 4]
    assert ids(pool.take(3)) == [5, 6, 7]
    assert (pool.used, pool.cached, pool.free_count, pool.available) == (8, 0, 8, 8)


def test_a_sequence_that_gives_its_tail_back_leaves_no_hole_before_the_next(pool):
    blocks = pool.take(6)
    pool.release(blocks[3:])
    assert ids(pool.take(4)) == [3, 4, 5, 6]


def test_taking_more_than_there_is_changes_nothing(pool):
    pool.release(fill(pool, prompt(10)))
    held = pool.take(4)
    with pytest.raises(OutOfBlocks) as refusal:
        pool.take(13)
    assert (refusal.value.wanted, refusal.value.available) == (13, 12)
    assert (pool.used, pool.cached, pool.evictions) == (4, 10, 0)
    assert len(pool.match(ROOT, prompt(10), 99)) == 10
    pool.take(12)
    assert pool.available == 0 and pool.evictions == 10
    assert all(block.users == 1 for block in held)


def test_a_cached_chain_is_found_up_to_the_first_other_token(pool):
    blocks = fill(pool, prompt(5))
    assert ids(pool.match(ROOT, prompt(5), 99)) == ids(blocks)
    other = prompt(5)
    other[3 * SIZE] += 1
    assert ids(pool.match(ROOT, other, 99)) == ids(blocks[:3])
    other[0] += 1
    assert pool.match(ROOT, other, 99) == []


@pytest.mark.parametrize("length", [SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1])
def test_the_limit_cuts_hits_to_whole_blocks_below_it(pool, length):
    fill(pool, prompt(4))
    assert len(pool.match(ROOT, prompt(4), length)) == length // SIZE
    assert len(pool.match(ROOT, prompt(4)[:length], 99)) == length // SIZE
    # The usual call: at least one token of the prompt must be computed.
    assert len(pool.match(ROOT, prompt(4)[:length], length - 1)) == (length - 1) // SIZE
    assert pool.match(ROOT, prompt(4), 0) == pool.match(ROOT, prompt(4), -1) == []


def test_a_match_changes_nothing(pool):
    pool.release(fill(pool, prompt(4)))
    before = (pool.used, pool.cached, pool.evictions, pool.free_count)
    found = pool.match(ROOT, prompt(4), 99)
    assert before == (pool.used, pool.cached, pool.evictions, pool.free_count)
    assert all(block.users == 0 for block in found)


def test_the_next_turns_tail_is_matched_below_the_block_that_is_held(pool):
    blocks = fill(pool, prompt(6))
    assert ids(pool.match(blocks[2].key, prompt(6)[3 * SIZE :], 99)) == ids(blocks[3:])
    assert pool.match(b"a gone block key", prompt(6), 99) == []


def test_tenants_never_see_each_others_blocks(pool):
    fill(pool, prompt(4), prefix.root(b"a"))
    assert pool.match(prefix.root(b"b"), prompt(4), 99) == []


def test_equal_blocks_at_another_place_in_the_chain_are_not_shared(pool):
    blocks = fill(pool, [5] * SIZE * 3)
    assert ids(pool.match(ROOT, [5] * SIZE * 3, 99)) == ids(blocks)
    assert len(set(ids(blocks))) == 3


def test_a_block_shared_by_two_sequences_survives_the_first_release(pool):
    first = fill(pool, prompt(3))
    second = fill(pool, prompt(3))
    assert ids(first) == ids(second)
    pool.release(first)
    assert second[0].users == 1 and pool.cached == 0
    pool.release(second)
    assert pool.cached == 3


def test_releasing_twice_is_caught(pool):
    blocks = fill(pool, prompt(2))
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_free_block_cannot_be_shared_or_published(pool):
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="free"):
        pool.share([block])
    with pytest.raises(AssertionError, match="free"):
        pool.publish(block, ROOT, prompt(1))


def test_a_block_is_published_once_and_never_with_more_than_it_holds(pool):
    (block,) = pool.take(1)
    for tokens in ([1, 2, 3, 4, 5], []):
        with pytest.raises(AssertionError, match="block of 4"):
            pool.publish(block, ROOT, tokens)
    pool.publish(block, ROOT, prompt(1))
    with pytest.raises(AssertionError, match="twice"):
        pool.publish(block, ROOT, prompt(1))


def test_a_block_that_begins_alike_is_found_with_how_much_agrees(pool):
    blocks = fill(pool, prompt(2))
    parent = blocks[0].key
    assert pool.match_part(parent, [4, 5, 9, 9, 9]) == (blocks[1], 2)
    assert pool.match_part(parent, [4, 5, 6, 7, 8, 9]) == (blocks[1], 4)
    assert pool.match_part(parent, [5, 5, 6, 7]) is None
    assert pool.match_part(parent, []) is None
    assert pool.match_part(ROOT, [0, 1, 2]) == (blocks[0], 3)
    assert pool.match_part(prefix.root(b"other"), [0, 1, 2]) is None
    assert pool.match_part(blocks[1].key, [8, 9]) is None


def test_a_turns_tail_is_found_in_part_only_and_goes_when_it_is_evicted(pool):
    (head,) = fill(pool, prompt(1))
    (tail,) = pool.take(1)
    pool.publish(tail, head.key, [4, 5, 6])
    pool.release([head, tail])
    assert pool.match(ROOT, prompt(2), 99) == [head]
    assert pool.match_part(head.key, [4, 5, 6, 7]) == (tail, 3)
    pool.take(15)  # the tail is colder than its head
    assert pool.match_part(head.key, [4, 5, 6, 7]) is None
    assert pool.match(ROOT, prompt(2), 99) == [head]


def test_the_newest_child_is_the_one_that_is_looked_at(pool):
    (head,) = fill(pool, prompt(1))
    for first in (10, 20):
        (child,) = pool.take(1)
        pool.publish(child, head.key, [first] * 4)
    assert pool.match_part(head.key, [10] * 4) is None
    assert pool.match_part(head.key, [20, 20, 1]) == (child, 2)


def test_a_private_block_may_be_shared_by_a_fork(pool):
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert block.users == 1 and pool.used == 1
    pool.release([block])
    assert pool.free_count == 16


def test_children_are_evicted_before_their_parents(pool):
    pool.release(fill(pool, prompt(16)))
    for left in range(15, -1, -1):
        pool.take(1)
        assert len(pool.match(ROOT, prompt(16), 99)) == left
    assert pool.evictions == 16


def test_the_least_recently_released_chain_leaves_first(pool):
    old, new = prompt(6), prompt(6, start=500)
    pool.release(fill(pool, old))
    pool._clock.now += 1
    pool.release(fill(pool, new))
    pool._clock.now += 1
    pool.take(4 + 3)
    assert len(pool.match(ROOT, old, 99)) == 3 and len(pool.match(ROOT, new, 99)) == 6
    pool._clock.now += 1
    pool.release(fill(pool, old[: 3 * SIZE]))  # a hit makes it the hottest
    pool.take(5)
    assert len(pool.match(ROOT, old, 99)) == 3 and len(pool.match(ROOT, new, 99)) == 1


def test_a_reused_block_is_never_found_under_its_old_key(pool):
    pool.release(fill(pool, prompt(16)))
    for block in pool.take(16):
        assert block.key is None and not block.shared and not block.tokens
    assert pool.match(ROOT, prompt(16), 99) == []


def test_every_published_block_re_hashes_to_its_key(pool):
    for block in fill(pool, prompt(8)):
        assert prefix.key(block.parent, list(block.tokens)) == block.key


def test_an_equal_block_stays_private_and_its_chain_goes_on(pool):
    first, second = pool.take(2)
    key = pool.publish(first, ROOT, prompt(1))
    assert pool.publish(second, ROOT, prompt(1)) == key
    assert second.key is None
    (after,) = pool.take(1)
    pool.publish(after, key, prompt(1, start=4))
    assert ids(pool.match(ROOT, prompt(2), 99)) == [first.id, after.id]
    assert pool.resident([second, after]) == [first, after]


def test_a_private_equal_takes_over_when_the_published_one_is_evicted(pool):
    first, second, after = pool.take(3)
    key = pool.publish(first, ROOT, prompt(1))
    pool.publish(second, ROOT, prompt(1))
    pool.release([first])
    pool.take(14)  # evicts `first`, the only cached block
    assert first.key is None and second.key == key
    pool.check()
    pool.publish(after, key, prompt(1, start=4))
    assert ids(pool.match(ROOT, prompt(2), 99)) == [second.id, after.id]


def test_using_a_private_equal_keeps_the_published_one_as_warm_as_its_children(pool):
    first, second, after = pool.take(3)
    key = pool.publish(first, ROOT, prompt(1))
    pool.publish(second, ROOT, prompt(1))
    pool.publish(after, key, prompt(1, start=4))
    pool.release([first])
    pool._clock.now += 5
    pool.release([second, after])
    pool.take(15)
    assert ids(pool.match(ROOT, prompt(2), 99)) == [first.id]


@pytest.mark.parametrize("digest", [lambda parent, packed: b"k" * 16,
                                    lambda parent, packed: packed[:1] * 16])  # fmt: skip
def test_colliding_keys_never_share_a_block(pool, monkeypatch, digest):
    monkeypatch.setattr(prefix, "digest", digest)
    mine, theirs = prompt(3), [0, *prompt(3)[1:]]
    theirs[2] = 77
    blocks = fill(pool, mine)
    assert ids(pool.match(ROOT, mine, 99)) == ids([b for b in blocks if b.key])
    others = fill(pool, theirs)
    assert not set(ids(others)) & set(ids(blocks))
    assert pool.match(ROOT, theirs, 99) == []  # their first block collided, so nothing hangs below
    assert pool.match(prefix.root(b"other"), mine, 99) == []
    assert len(pool.match(ROOT, [0] * SIZE * 2, 99)) == 0


ONE, TWO, THREE = ([number] * SIZE for number in (1, 2, 3))


@pytest.fixture
def forged(monkeypatch):
    """ONE and TWO have the same key; all else hashes as ever."""
    real, pair = prefix.digest, {prefix.pack(ONE), prefix.pack(TWO)}

    def digest(parent, packed):
        return b"x" * 16 if packed in pair else real(parent, packed)

    monkeypatch.setattr(prefix, "digest", digest)


def test_a_child_of_a_collided_parent_is_not_reached_through_its_namesake(forged, pool):
    fill(pool, ONE)
    fill(pool, TWO + THREE)
    assert len(pool.match(ROOT, ONE + THREE, 99)) == 1


def test_a_child_that_outlived_its_parent_is_not_reached_through_a_namesake(forged, pool):
    parent, child = fill(pool, ONE + THREE)
    pool.release([parent])
    pool._clock.now += 1
    pool.release([child])
    pool.take(15)  # evicts the parent, and not the child
    assert parent.key is None and child.key is not None
    pool.publish(parent, ROOT, TWO)
    assert child.parent == parent.key
    assert pool.match(ROOT, TWO + THREE, 99) == [parent]
    assert pool.match(parent.key, THREE, 99) == []


def test_a_namesake_does_not_push_out_a_block_that_an_equal_stands_for(forged, pool):
    first, equal, other = pool.take(3)
    pool.publish(first, ROOT, ONE)
    pool.publish(equal, ROOT, ONE)
    pool.release([first])
    pool.publish(other, ROOT, TWO)
    assert other.key is None and pool.match(ROOT, ONE, 99) == [first]


def test_an_idle_namesake_gives_way_so_that_it_cannot_block_a_chain(pool, monkeypatch):
    monkeypatch.setattr(prefix, "digest", lambda parent, packed: b"x" * 16)
    pool.release(fill(pool, [1] * SIZE))
    fill(pool, [2] * SIZE)
    assert len(pool.match(ROOT, [2] * SIZE, 99)) == 1 and not pool.match(ROOT, [1] * SIZE, 99)


def test_what_hangs_below_an_evicted_parent_stays_private(pool):
    first, after = pool.take(2)
    key = pool.publish(first, ROOT, prompt(1))
    pool.release([first])
    pool.take(15)
    assert pool.publish(after, key, prompt(1, start=4)) != prefix.key(key, prompt(1, start=4))
    assert after.key is None


def test_a_preempted_chain_outlives_a_finished_one_of_the_same_age(pool):
    pool.release(fill(pool, prompt(4)), warm=True)
    pool.release(fill(pool, prompt(4, start=500)))
    pool.take(8 + 4)
    assert len(pool.match(ROOT, prompt(4), 99)) == 4


def test_finding_a_long_prompt_is_quick():
    size, tokens = 64, [random.Random(1).randrange(150_000) for _ in range(32_768)]
    pool = BlockPool(total=600, size=size)
    fill_quietly(pool, tokens)
    held = pool.match(ROOT, tokens, len(tokens) - 1)
    assert len(held) == 511
    whole = best(lambda: pool.match(ROOT, tokens, len(tokens) - 1))
    tail = tokens[509 * size :]
    turn = best(lambda: pool.match(held[508].key, tail, len(tail)))
    # The targets are 0.4 ms and 20 us on an idle machine; a shared one gets a margin of 10.
    assert whole < 4e-3 and turn < 200e-6


def test_taking_costs_no_more_in_a_large_pool_than_in_a_small_one():
    seconds = {}
    for total in (1_000, 30_000):
        pool = BlockPool(total=total, size=1)
        blocks = pool.take(total)
        pool.release(blocks[::2])
        pool.release(blocks[1::2])
        for number, block in enumerate(taken := pool.take(total)):
            pool.publish(block, ROOT, [number])
        pool.release(taken)
        seconds[total] = best(lambda pool=pool: pool.release(pool.take(50)), rounds=9)
        pool.take(total - 100)
        pool.check()
    assert seconds[30_000] < 10 * seconds[1_000] + 1e-3


def fill_quietly(pool, tokens):
    parent = ROOT
    for number, block in enumerate(pool.take(len(tokens) // pool.size)):
        start = number * pool.size
        parent = pool.publish(block, parent, tokens[start : start + pool.size])


def best(call, rounds=15):
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
