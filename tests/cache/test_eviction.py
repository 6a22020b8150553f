"""The eviction rule alone: classes, pins, demotion, against a plain LRU.  No keys, no sessions."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from cache.eviction import Entry, Eviction


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def idle(clock):
    return Eviction(clock)


def entries(count):
    return [Entry(number) for number in range(count)]


def drain(idle):
    return [idle.pop().id for _ in range(len(idle))]


def test_one_class_alone_leaves_in_the_order_of_its_last_use(idle):
    for number, entry in enumerate(made := entries(5)):
        idle.add(entry, float(number), warm=False)
    idle.refresh(made[1], 9.0)
    idle.remove(made[3])
    assert drain(idle) == [0, 2, 4, 1]


@pytest.mark.parametrize(("age_s", "first"), [(69.9, "other"), (70.1, "tool")])
def test_a_tool_block_goes_first_only_beyond_four_other_ages_and_thirty_seconds(
    idle, clock, age_s, first
):
    tool, other = entries(2)
    clock.now = 1000.0
    idle.add(tool, clock.now - age_s, warm=True)
    idle.add(other, clock.now - 10.0, warm=False)
    assert idle.pop() is (tool if first == "tool" else other)


def test_a_released_tool_block_stays_a_tool_block_until_a_turn_ends_otherwise(idle, clock):
    kept, plain = entries(2)
    idle.add(kept, 0.0, warm=True)
    idle.remove(kept)
    idle.add(kept, 0.0, warm=False)
    idle.add(plain, 5.0, warm=False)
    clock.now = 6.0
    assert idle.pop() is plain
    idle.add(plain, 5.0, warm=False)
    idle.settle(kept, warm=False)
    assert idle.pop() is kept


def test_pinned_blocks_leave_last_and_the_oldest_of_them_first(idle, clock):
    made = entries(6)
    for number, entry in enumerate(made):
        idle.add(entry, float(number), warm=False)
    clock.now = 10.0
    idle.pin([made[0]], 99.0, most=9)
    idle.pin([made[2], made[1]], 99.0, most=9)
    assert idle.pinned == 3
    assert drain(idle) == [3, 4, 5, 0, 1, 2]
    assert idle.pinned == 0


def test_an_expired_pin_puts_blocks_back_where_their_age_belongs(idle, clock):
    made = entries(4)
    for number, entry in enumerate(made):
        idle.add(entry, float(number), warm=True)
    idle.pin(made[1:3], 60.0, most=9)
    clock.now = 60.0
    assert drain(idle) == [0, 1, 2, 3]
    assert idle.pinned == 0


def test_an_expired_pin_leaves_its_blocks_in_the_tool_queue(idle, clock):
    pinned, plain = entries(2)
    idle.add(pinned, 0.0, warm=False)
    idle.pin([pinned], 10.0, most=9)
    idle.add(plain, 5.0, warm=False)
    clock.now = 20.0
    assert idle.pop() is plain and idle.pinned == 0


def test_a_pin_holds_until_just_before_its_time(idle, clock):
    made = entries(2)
    for entry in made:
        idle.add(entry, 0.0, warm=True)
    idle.pin(made[:1], 60.0, most=9)
    clock.now = 59.9
    assert idle.pop() is made[1]
    idle.expire()
    assert idle.pinned == 1


def test_a_block_of_two_pins_stays_pinned_until_both_are_lifted(idle, clock):
    shared, own = entries(2)
    idle.add(shared, 0.0, warm=False)
    idle.add(own, 0.0, warm=False)
    first = idle.pin([shared], 90.0, most=9)
    second = idle.pin([shared], 50.0, most=9)
    idle.unpin(second)
    idle.unpin(second)
    assert idle.pinned == 1 and idle.pop() is own
    idle.unpin(first)
    assert idle.pinned == 0


def test_pins_never_hold_more_than_their_limit_and_the_oldest_gives_way(idle):
    made = entries(9)
    for entry in made:
        idle.add(entry, 0.0, warm=False)
    oldest = idle.pin(made[:2], 60.0, most=5)
    newer = idle.pin(made[2:4], 60.0, most=5)
    idle.pin(made[4:6], 60.0, most=5)
    assert not oldest.live and newer.live and idle.pinned == 4
    whole = idle.pin(made, 60.0, most=5)
    assert idle.pinned == 5 and not newer.live
    assert [entry.id for entry, _ in whole.entries] == [0, 1, 2, 3, 4]
    idle.check(made)


def test_a_pin_that_outlives_its_block_does_nothing_to_the_next_contents(idle, clock):
    (entry,) = entries(1)
    idle.add(entry, 0.0, warm=True)
    stale = idle.pin([entry], 60.0, most=9)
    assert idle.pop() is entry and idle.pinned == 0
    idle.add(entry, 1.0, warm=False)
    fresh = idle.pin([entry], 60.0, most=9)
    idle.unpin(stale)
    assert idle.pinned == 1 and fresh.live
    idle.check([entry])


def test_a_pin_made_while_the_block_is_in_use_counts_when_it_comes_back(idle, clock):
    used, plain = entries(2)
    idle.pin([used], 60.0, most=9)
    idle.add(used, 0.0, warm=False)
    idle.add(plain, 0.0, warm=True)
    assert idle.pop() is plain


def test_demoted_blocks_go_before_all_others_in_the_order_of_demotion(idle, clock):
    made = entries(5)
    for number, entry in enumerate(made):
        idle.add(entry, float(number), warm=number < 2)
    idle.demote(made[4])
    idle.demote(made[3])
    clock.now = 1e6
    assert drain(idle)[:2] == [4, 3]


def test_evicting_from_nothing_is_our_own_mistake(idle):
    with pytest.raises(AssertionError, match="empty"):
        idle.pop()


def test_dead_queue_items_do_not_pile_up(idle):
    made = entries(10)
    for entry in made:
        idle.add(entry, 0.0, warm=False)
    for number in range(5_000):
        idle.refresh(made[number % 10], float(number))
    assert sum(len(queue) for queue in idle._queues) < 200
    idle.check(made)


def trace(seed):
    """(time, session, warm): agents that return in seconds, chats that return in an hour."""
    rng = random.Random(seed)
    events = []
    for session in range(400):
        at = rng.random() * 3600
        agent = session < 30
        for _ in range(40 if agent else 2):
            events.append((at, session, agent))
            at += rng.lognormvariate(3, 1) if agent else rng.uniform(900, 3600)
    return sorted(events)


def hits_of_rule(events, capacity, clock, idle):
    held, hits = {}, 0
    for at, session, warm in events:
        clock.now = at
        if session in held:
            hits += 1
            idle.remove(held[session])
        else:
            if len(held) == capacity:
                del held[idle.pop().id]
            held[session] = Entry(session)
        idle.add(held[session], at, warm)
    return hits


def hits_of_lru(events, capacity):
    held, hits = OrderedDict(), 0
    for _, session, _ in events:
        hits += session in held
        held[session] = None
        held.move_to_end(session)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


def test_tool_turns_that_return_soon_are_kept_better_than_by_recency_alone():
    traces = [trace(seed) for seed in range(6)]
    plain = [hits_of_lru(events, 8) for events in traces]
    ours = []
    for events in traces:
        clock = Clock()
        ours.append(hits_of_rule(events, 8, clock, Eviction(clock)))
    assert all(a > b for a, b in zip(ours, plain, strict=True))
    assert sum(ours) > 1.3 * sum(plain)


def test_the_queues_follow_an_obvious_model_under_random_use(clock, idle):
    rng = random.Random(3)
    made, inside = entries(12), {}
    for step in range(3_000):
        clock.now += 1
        entry = rng.choice(made)
        match rng.randrange(4):
            case 0 if entry.id not in inside:
                idle.add(entry, clock.now, warm=False)
                inside[entry.id] = (clock.now, step)
            case 1 if entry.id in inside:
                idle.remove(entry)
                del inside[entry.id]
            case 2 if entry.id in inside:
                idle.demote(entry)
                inside[entry.id] = (float("-inf"), step)
            case 3 if inside:
                coldest = min(inside, key=inside.get)
                assert idle.pop().id == coldest
                del inside[coldest]
        assert len(idle) == len(inside)
    idle.check(made)
