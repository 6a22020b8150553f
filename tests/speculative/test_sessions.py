"""What sessions keep: each text once, within bytes, by tenant.  No votes."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest

from speculative.chains import NO_ID
from speculative.sessions import BRANCHES, FIXED_BYTES, TOKEN_BYTES, Session, Sessions

MUCH = 1 << 30


def draw(size: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(40_000) for _ in range(size)]


def turn(session: Session, prompt: list[int], output: list[int]) -> int:
    """A turn from its beginning to its end; tokens of its prompt that were known."""
    branch, held = session.begin(array("i", prompt))
    session.write(branch, prompt[held:], MUCH)
    session.end(branch, output, MUCH)
    session.drop(branch)
    return held


def spelled(session: Session, branch: list[tuple[int, int, int]]) -> list[int]:
    texts = {session._newest - age: text for age, text in enumerate(session.texts)}
    return [t for number, start, end in branch for t in texts[number].tokens[start:end]]


def test_a_turn_that_begins_with_the_last_one_adds_only_what_is_new():
    session = Session((b"a", b"s"), MUCH)
    first, said, more = draw(500, 1), draw(60, 2), draw(30, 3)
    assert turn(session, first, said) == 0
    assert turn(session, [*first, *said, *more], [1, 2, 3]) == 560
    assert list(session.texts[0].tokens) == [*first, *said, *more, 1, 2, 3]
    assert spelled(session, session.branches[0]) == list(session.texts[0].tokens)


def test_a_history_that_was_changed_is_known_up_to_the_change():
    session = Session((b"a", b"s"), MUCH)
    first, said = draw(500, 1), draw(60, 2)
    turn(session, first, said)
    assert turn(session, [*first, *said[:20], 7, 8], [9]) == 520
    assert list(session.texts[0].tokens[560:]) == [NO_ID, 7, 8, 9]
    assert turn(session, [*first, *said[:20], 7, 8, 9, 10], []) == 523
    assert turn(session, [5, *first], []) == 0


def test_branches_that_run_at_the_same_time_each_keep_their_text():
    session = Session((b"a", b"s"), MUCH)
    trunk = draw(300, 1)
    turn(session, trunk, [])
    branches = {}
    for seed in range(4):
        prompt = [*trunk, *draw(20, 10 + seed)]
        branch, held = session.begin(array("i", prompt))
        assert held == 300
        session.write(branch, prompt[held:], MUCH)
        branches[seed] = (branch, prompt)
    for seed, (branch, prompt) in branches.items():
        said = draw(15, 20 + seed)
        session.end(branch, said, MUCH)
        session.drop(branch)
        assert spelled(session, session.branches[0]) == prompt + said
    for seed, (_, prompt) in branches.items():
        assert session.begin(array("i", [*prompt, *draw(15, 20 + seed), 1]))[1] == 335
    assert len(session.branches) <= BRANCHES


def test_a_full_text_becomes_the_older_one_and_then_goes():
    session = Session((b"a", b"s"), 2 * 1000 * TOKEN_BYTES + FIXED_BYTES)
    for seed in range(12):
        turn(session, draw(300, seed), draw(30, 100 + seed))
        assert len(session.texts) <= 2
        assert all(len(text) < 1000 for text in session.texts)
        assert session.nbytes <= 2 * 1000 * TOKEN_BYTES + FIXED_BYTES
    assert session.begin(array("i", draw(300, 11)))[1] == 300
    assert session.begin(array("i", draw(300, 0)))[1] == 0


def test_a_branch_of_texts_that_were_forgotten_leads_nowhere():
    session = Session((b"a", b"s"), MUCH)
    prompt = draw(300, 1)
    branch, _ = session.begin(array("i", prompt))
    session.write(branch, prompt, MUCH)
    session.clear()
    assert session.begin(array("i", prompt)) == ([], 0)
    session.end(branch, [1, 2, 3], MUCH)
    assert list(session.texts[0].tokens) == [1, 2, 3]
    assert session.begin(array("i", prompt)) == ([], 0)


def test_of_what_has_no_room_the_newest_is_kept_and_nothing_is_laid_along_it():
    session = Session((b"a", b"s"), 2 * 1000 * TOKEN_BYTES + FIXED_BYTES)
    prompt = draw(5000, 1)
    assert turn(session, prompt, []) == 0
    assert list(session.texts[0].tokens) == prompt[4000:]
    assert session.begin(array("i", prompt))[1] == 0
    assert session.begin(array("i", prompt[4000:]))[1] == 0


def test_sessions_of_one_name_in_two_namespaces_are_two():
    sessions = Sessions(1 << 20, 1 << 20)
    ours, theirs = sessions.enter(b"a", b"s"), sessions.enter(b"b", b"s")
    assert ours is not theirs
    assert sessions.enter(b"a", b"s") is ours
    assert sessions.enter(b"a", None) is not sessions.enter(b"a", None)


def test_the_session_that_was_not_used_longest_goes_first():
    sessions = Sessions(1 << 20, 40_000)
    def used(name: bytes) -> Session:
        session = sessions.enter(b"a", name)
        turn(session, draw(600, 1), [])
        sessions.leave(session)
        return session

    first, second = used(b"1"), used(b"2")
    assert used(b"1") is first
    for name in (b"3", b"4", b"5"):
        used(name)
        assert sessions.enter(b"a", b"1") is first
        sessions.leave(first)
    assert used(b"2") is not second
    assert sessions.nbytes <= 40_000


def test_a_session_that_goes_while_it_is_used_is_empty_and_leaves_nothing():
    sessions = Sessions(1 << 20, 30_000)
    old = sessions.enter(b"a", b"old")
    turn(old, draw(500, 1), [])
    for name in range(4):
        other = sessions.enter(b"a", b"%d" % name)
        turn(other, draw(500, 2), [])
        sessions.leave(other)
    assert len(old.texts[0]) == 0
    turn(old, draw(10, 1), [])
    sessions.leave(old)
    assert sessions.nbytes == sum(s.counted for s in sessions._named.values()) <= 30_000
    assert sessions._live == 0


@pytest.mark.parametrize("turns", [1, 40])
def test_bytes_are_told_as_they_are(turns):
    texts = [(draw(200, n), draw(20, n + 1000)) for n in range(turns)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        sessions = Sessions(1 << 20, 1 << 26)
        for name in range(100):
            session = sessions.enter(b"tenant", b"%032d" % name)
            for prompt, output in texts:
                turn(session, prompt, output)
            sessions.leave(session)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert sessions.nbytes == pytest.approx(held, rel=0.2)
