"""Sessions: gaps, pins, branches, ends, bounds.  The pool's own rules are in test_blocks.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache import prefix
from cache.blocks import BlockPool
from cache.config import CacheConfig
from cache.sessions import BRANCHES, OPEN_TURNS, SessionTable

ROOT = prefix.root(b"tenant")
SIZE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pool(clock):
    return BlockPool(total=20, size=SIZE, clock=clock)


@pytest.fixture
def table(pool, clock):
    made = SessionTable(pool, CacheConfig(), clock)
    yield made
    made.check()


def prompt(blocks, start=0):
    return list(range(start, start + blocks * SIZE))


def start(table, key, tokens):
    """A request of session `key` is admitted and computed; return its blocks."""
    pool = table._pool
    if key is not None:
        table.touch(key)
    blocks = pool.match(ROOT, tokens, len(tokens))
    pool.share(blocks)
    parent = blocks[-1].key if blocks else ROOT
    for at in range(len(blocks) * SIZE, len(tokens) - SIZE + 1, SIZE):
        blocks += pool.take(1)
        parent = pool.publish(blocks[-1], parent, tokens[at : at + SIZE])
    return blocks


def finish(table, key, blocks):
    table.turn(key, blocks)
    table._pool.release(blocks)
    table.check()


def turn(table, key, tokens, tool_call):
    """One whole turn; return its blocks, all idle now unless others use them."""
    blocks = start(table, key, tokens)
    finish(table, key, blocks)
    if key is not None:
        table.turn_ended(key, tool_call)
    table.check()
    return blocks


def hits(table, tokens):
    return len(table._pool.match(ROOT, tokens, len(tokens)))


def squeeze(table, leave):
    """Take and give back blocks until only `leave` published ones are left."""
    pool = table._pool
    taken = pool.take(pool.available - leave)
    pool.release(taken)
    table.check()


def test_a_tool_turn_is_pinned_and_outlives_everything_younger(table, clock):
    turn(table, b"agent", prompt(6), tool_call=True)
    clock.now += 50
    turn(table, b"chat", prompt(6, 500), tool_call=False)
    assert table.pinned == 1
    squeeze(table, leave=6)
    assert hits(table, prompt(6)) == 6 and hits(table, prompt(6, 500)) == 0


@pytest.mark.parametrize(
    ("gaps", "expected_s"),
    [
        ([], 60),
        ([1, 1, 1], 10),
        ([10], 30),
        ([20, 20, 20], 60),
        ([40, 10], 93),
        ([9999], 150),
        ([9999, 1, 1, 1, 1, 1, 1], 55.589),
    ],
)
def test_a_pin_lasts_three_usual_gaps_within_its_limits(table, clock, gaps, expected_s):
    for gap in gaps:
        turn(table, b"a", prompt(2), tool_call=True)
        clock.now += gap
    turn(table, b"a", prompt(2), tool_call=True)
    clock.now += expected_s - 0.01
    assert table.pinned == 1
    clock.now += 0.02
    assert table.pinned == 0
    assert table._pool.idle.pinned == 0


def test_gaps_after_plain_answers_teach_nothing(table, clock):
    turn(table, b"a", prompt(2), tool_call=False)
    clock.now += 3000
    assert table.touch(b"a").gap_s is None


def test_only_the_first_request_after_a_tool_call_tells_its_gap(table, clock):
    turn(table, b"a", prompt(2), tool_call=True)
    clock.now += 5
    assert table.touch(b"a").gap_s == 5
    clock.now += 20
    assert table.touch(b"a").gap_s == 5


def test_a_prefix_shared_with_an_agent_stays_warm_when_a_chat_used_it_last(table, clock):
    turn(table, b"agent", prompt(4), tool_call=True)
    chat = turn(table, b"chat", [*prompt(2), *prompt(2, 500)], tool_call=False)
    assert [block.warm for block in chat] == [True, True, False, False]


def test_turns_that_never_got_a_name_do_not_pile_up_in_a_session(table):
    for _ in range(3 * BRANCHES):
        finish(table, b"a", start(table, b"a", prompt(2)))
    table.turn_ended(b"a", tool_call=True)
    assert table._pool.idle.pinned == 2


def test_a_pin_never_blocks_an_allocation(table):
    turn(table, b"a", prompt(12), tool_call=True)
    pool = table._pool
    assert pool.available == 20
    assert len(pool.take(20)) == 20 and pool.idle.pinned == 0


def test_pins_hold_at_most_their_share_and_the_oldest_gives_way(table, clock):
    for number in range(3):
        turn(table, b"%d" % number, prompt(6, 100 * number), tool_call=True)
        clock.now += 1
    assert table.pinned == 2 and table._pool.idle.pinned == 12
    assert hits(table, prompt(6)) == 6  # unpinned, not gone
    squeeze(table, leave=12)
    assert hits(table, prompt(6)) == 0 and hits(table, prompt(6, 200)) == 6


def test_the_next_turn_supersedes_the_pin_of_the_one_it_continues(table, clock):
    turn(table, b"a", prompt(4), tool_call=True)
    clock.now += 5
    turn(table, b"a", prompt(6), tool_call=False)
    assert table.pinned == 0


def test_a_waiting_request_keeps_its_pin_until_it_is_served(table, clock):
    turn(table, b"a", prompt(4), tool_call=True)
    table.touch(b"a")
    turn(table, b"b", prompt(6, 500), tool_call=False)
    squeeze(table, leave=4)
    assert hits(table, prompt(4)) == 4


def test_another_branch_of_the_session_keeps_its_own_pin(table, clock):
    turn(table, b"a", prompt(4), tool_call=True)
    turn(table, b"a", prompt(4, 300), tool_call=True)  # a sub-agent under the same key
    assert table._pool.idle.pinned == 8 and table.pinned == 1
    turn(table, b"a", prompt(5, 300), tool_call=False)
    assert table._pool.idle.pinned == 4


def test_all_choices_of_a_turn_are_pinned_and_branches_are_bounded(pool, clock):
    table = SessionTable(pool, CacheConfig(pin_share=1.0), clock)
    running = [start(table, b"a", [*prompt(1), *prompt(1, 100 * n)]) for n in range(BRANCHES + 2)]
    for blocks in running:
        finish(table, b"a", blocks)
    table.turn_ended(b"a", tool_call=True)
    table.check()
    assert pool.idle.pinned == BRANCHES + 1


def test_an_ended_sessions_private_tail_leaves_first_and_shared_blocks_stay(table, clock):
    clock.now += 1
    turn(table, b"a", prompt(6), tool_call=True)
    turn(table, b"b", [*prompt(2), *prompt(2, 500)], tool_call=False)
    clock.now += 1000
    turn(table, b"c", prompt(4, 900), tool_call=False)
    table.ended(b"a")
    squeeze(table, leave=11)
    assert hits(table, prompt(6)) == 5  # the deepest first
    squeeze(table, leave=8)
    assert hits(table, prompt(6)) == 2
    assert hits(table, [*prompt(2), *prompt(2, 500)]) == 4 == hits(table, prompt(4, 900))
    assert len(table) == 2 and table.pinned == 0


def test_blocks_that_one_session_used_in_many_turns_are_still_private(table, clock):
    for length in (2, 4, 6):
        turn(table, b"a", prompt(length), tool_call=True)
    turn(table, b"old", prompt(4, 500), tool_call=False)
    table.ended(b"a")
    squeeze(table, leave=4)
    assert hits(table, prompt(6)) == 0 and hits(table, prompt(4, 500)) == 4


def test_the_pinned_branches_of_one_session_are_bounded(pool, clock):
    table = SessionTable(pool, CacheConfig(pin_share=1.0), clock)
    for number in range(BRANCHES + 4):
        turn(table, b"a", prompt(1, 100 * number), tool_call=True)
    assert pool.idle.pinned == BRANCHES and table.pinned == 1


def test_without_a_share_of_the_pool_nothing_is_pinned(pool, clock):
    table = SessionTable(pool, CacheConfig(pin_share=0.0), clock)
    turn(table, b"a", prompt(3), tool_call=True)
    assert table.pinned == 0 and pool.idle.pinned == 0


def test_blocks_that_a_request_without_session_used_are_not_private(table, clock):
    turn(table, b"a", prompt(4), tool_call=False)
    turn(table, None, prompt(2), tool_call=False)
    clock.now += 10
    turn(table, b"b", prompt(4, 500), tool_call=False)
    table.ended(b"a")
    squeeze(table, leave=6)
    assert hits(table, prompt(4)) == 2


def test_a_late_end_of_turn_cannot_pin_for_an_ended_session(table):
    blocks = start(table, b"a", prompt(4))
    finish(table, b"a", blocks)
    table.ended(b"a")
    table.turn_ended(b"a", tool_call=True)
    assert table.pinned == 0 and table._pool.idle.pinned == 0 and len(table) == 0
    table.touch(b"a")  # the session begins anew
    table.turn_ended(b"a", tool_call=True)
    assert table._pool.idle.pinned == 0


def test_a_session_that_ends_while_it_runs_leaves_its_blocks_in_use(table):
    blocks = start(table, b"a", prompt(4))
    table.turn(b"a", blocks)
    table.ended(b"a")
    assert all(block.users == 1 and block.owner is None for block in blocks)
    table._pool.release(blocks)


def test_unknown_sessions_are_ignored(table):
    table.turn_ended(b"never", tool_call=True)
    table.ended(b"never")
    blocks = start(table, None, prompt(2))
    finish(table, b"never", blocks)
    assert len(table) == 0 and blocks[0].shared


@pytest.mark.parametrize("note", ["turn_ended", "ended"])
def test_a_stale_session_never_touches_blocks_that_others_reuse(table, clock, note):
    blocks = start(table, b"old", prompt(16))
    finish(table, b"old", blocks)  # its end of turn is still to come
    squeeze(table, leave=0)
    turn(table, b"new", prompt(16, 500), tool_call=False)
    places = [(b.place, b.pins, b.time, b.warm, b.owner) for b in blocks]
    if note == "ended":
        table.ended(b"old")
    else:
        table.turn_ended(b"old", tool_call=True)
    assert places == [(b.place, b.pins, b.time, b.warm, b.owner) for b in blocks]


def test_a_private_equal_counts_as_the_published_block(table):
    pool = table._pool
    table.touch(b"a")
    first, second = pool.take(2)
    pool.publish(first, ROOT, prompt(1))
    pool.publish(second, ROOT, prompt(1))
    finish(table, b"a", [second])
    table.turn_ended(b"a", tool_call=True)
    assert first.pins == 1 and second.pins == 0
    pool.release([first])
    squeeze(table, leave=1)
    assert hits(table, prompt(1)) == 1


def test_idle_rows_are_dropped_and_their_blocks_may_find_a_new_owner(table, clock):
    blocks = turn(table, b"a", prompt(2), tool_call=False)
    clock.now += 86_400.5
    table.touch(b"b")
    assert len(table) == 1 and blocks[0].owner is None and not blocks[0].shared
    turn(table, b"b", prompt(2), tool_call=False)
    assert blocks[0].owner is table.touch(b"b")


def test_the_table_is_bounded_and_drops_the_least_recently_used(pool, clock):
    table = SessionTable(pool, replace(CacheConfig(), max_sessions=3), clock)
    turn(table, b"a", prompt(2), tool_call=True)
    for key in (b"b", b"c", b"a", b"d"):
        table.touch(key)
    table.check()
    assert len(table) == 3 and table.touch(b"a").requests == 3
    for number in range(5):
        table.touch(b"%d" % number)
    assert table.pinned == 0 and pool.idle.pinned == 0


def test_turns_whose_end_nobody_names_are_bounded(table):
    blocks = start(table, None, prompt(1))
    for number in range(OPEN_TURNS + 10):
        table.touch(b"%d" % number)
        table.turn(b"%d" % number, blocks)
    assert len(table._open) == OPEN_TURNS
    table._pool.release(blocks)


def test_what_is_remembered_about_blocks_is_bounded_by_the_pool(table, clock):
    for number in range(40):
        turn(table, b"%d" % number, prompt(3, 100 * number), tool_call=True)
        clock.now += 1
    assert sum(len(row.blocks) for row in table._rows.values()) <= 20


@pytest.mark.parametrize(
    ("setting", "value"),
    [("blocks", -1), ("kv_bytes", 0), ("pin_min_s", 0), ("pin_min_s", 151), ("pin_default_s", 5),
     ("pin_max_s", 9), ("pin_share", 1.5), ("pin_share", float("nan")), ("max_sessions", 0),
     ("session_idle_s", 0)],
)  # fmt: skip
def test_an_impossible_setting_is_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=rf"cache\.{setting}|pin_min_s"):
        replace(CacheConfig(), **{setting: value}).check()


def test_the_pool_has_as_many_blocks_as_fit_or_as_were_asked_for():
    assert CacheConfig(kv_bytes=1000).pool_blocks(300) == 3
    assert CacheConfig(blocks=7).pool_blocks(10**12) == 7
    with pytest.raises(ValueError, match=r"--cache\.kv-bytes 64000 or more"):
        CacheConfig(kv_bytes=999).pool_blocks(1000)


def test_what_is_left_of_the_device_counts_only_when_nothing_was_asked_for():
    assert CacheConfig().pool_blocks(1 << 20) == 1024
    assert CacheConfig().pool_blocks(300, 1000) == 3
    assert CacheConfig(kv_bytes=600).pool_blocks(300, 10**9) == 2
    assert CacheConfig(blocks=5).pool_blocks(300, 10**9) == 5
    assert not CacheConfig().given
    assert CacheConfig(kv_bytes=600).given
    assert CacheConfig(blocks=5).given
    with pytest.raises(ValueError, match=r"999 bytes are left.*--cache\.kv-bytes 64000"):
        CacheConfig().pool_blocks(1000, 999)
