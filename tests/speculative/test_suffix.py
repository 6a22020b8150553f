"""Suffix drafts as the engine asks for them: sources, tenants, bytes, edits.  Runs no model."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.proposer import Key, Turn
from speculative.suffix import COUNTED, PIECE, Guess, SuffixDrafts
from speculative.voting import FLOOR


def draw(size: int, seed: int, vocab: int = 40_000) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(size)]


class Seq:
    """A sequence as the engine holds it: one list that grows."""

    def __init__(
        self, drafts: SuffixDrafts, prompt: list[int], key: Key = ("r", 0),
        session: bytes | None = None, namespace: bytes = b"t", predicted: tuple[int, ...] = (),
    ) -> None:
        self.drafts, self.tokens = drafts, list(prompt)
        self.given = (len(prompt), 8, session, namespace, list, predicted)
        self.key = key

    def guess(self, ahead: tuple[int, ...] | list[int] = (), limit: int = 8) -> Guess:
        guess = self.drafts.guess(Turn(self.key, self.tokens, *self.given), ahead, limit)
        assert len(guess.tokens) == len(guess.survival) <= limit
        assert guess.survival == sorted(guess.survival, reverse=True)
        assert all(FLOOR <= chance < 1 for chance in guess.survival)
        assert 0 <= guess.predicted <= len(guess.tokens)
        return guess

    def say(self, *tokens: int) -> Seq:
        self.tokens += tokens
        return self

    def end(self, *tokens: int) -> None:
        self.guess()
        self.say(*tokens)
        self.drafts.forget(self.key)


def test_what_the_prompt_says_is_drafted():
    text = draw(200, 1)
    seq = Seq(SuffixDrafts(), [*text, 5, *text[40:44]])
    assert seq.guess().tokens == text[44:52]
    assert seq.guess(limit=3).tokens == text[44:47]


def test_what_the_output_said_is_drafted_and_a_run_goes_on():
    seq = Seq(SuffixDrafts(), draw(50, 1))
    seq.guess()
    said = draw(30, 2)
    for token in said:
        seq.say(token).guess()
    assert seq.say(5, *said[:3]).guess().tokens == said[3:11]
    assert seq.say(6, 7, 8, 6, 7, 8, 6, 7).guess().tokens == [8, 6, 7, 8, 6, 7, 8, 6]


def test_nothing_is_drafted_from_a_single_token():
    seq = Seq(SuffixDrafts(), [1, 2, 3, 4, 9, 3])
    assert seq.guess() == Guess([], [])


def test_a_longer_match_wins_over_a_newer_one_and_is_kept_as_it_grows():
    text = draw(100, 1)
    seq = Seq(SuffixDrafts(), [*text, *([5, *text[28:30], 6] * 30), *text[20:29]])
    assert seq.guess().tokens == text[29:37]
    assert seq.say(text[29]).guess().tokens == text[30:38]


def test_a_long_match_in_the_prompt_wins_over_many_short_ones_in_the_output():
    text = draw(100, 1)
    seq = Seq(SuffixDrafts(), text)
    seq.guess()
    seq.say(*[text[28], text[29], 6] * 12, *text[20:30])
    assert seq.guess().tokens == text[30:38]


def test_a_turn_drafts_what_earlier_turns_said():
    drafts = SuffixDrafts()
    prompt, said = draw(100, 1), draw(60, 2)
    Seq(drafts, prompt, ("1", 0), b"s").end(*said)
    later = Seq(drafts, [7, 8, *said[10:13]], ("2", 0), b"s")
    assert later.guess().tokens == said[13:21]
    assert Seq(drafts, [7, 8, *said[10:13]], ("3", 0)).guess().tokens == []


def test_a_history_that_comes_back_is_not_indexed_again():
    drafts = SuffixDrafts()
    prompt, said = draw(3000, 1), draw(60, 2)
    Seq(drafts, prompt, ("1", 0), b"s").end(*said)
    before = drafts.nbytes
    new = Seq(drafts, [*prompt, *said, 1, 2, 3], ("2", 0), b"s")
    new.end(4)
    text, = drafts._sessions.enter(b"t", b"s").texts
    assert list(text.tokens) == [*prompt, *said, 1, 2, 3, 4]
    assert drafts.nbytes == before


def test_choices_of_a_request_share_its_prompt():
    drafts = SuffixDrafts()
    prompt = draw(3000, 1)
    choices = [Seq(drafts, prompt, ("r", n), b"s") for n in range(8)]
    sizes = []
    for choice in choices:
        choice.guess()
        sizes.append(drafts.nbytes)
    assert sizes[-1] - sizes[0] < 8 * 4000 < sizes[0]
    for n, choice in enumerate(choices):
        choice.say(50_000 + n, 60_000 + n, 70_000 + n).end()
    text, = drafts._sessions.enter(b"t", b"s").texts
    assert len(text) == 3000 + 8 * 3 + 7  # a mark before each but the first
    for n in range(8):
        probe = Seq(drafts, [50_000 + n, 60_000 + n], ("x", n), b"s")
        assert probe.guess().tokens == [70_000 + n]


def test_branches_of_one_session_draft_from_each_other():
    drafts = SuffixDrafts()
    trunk, tool = draw(400, 1), draw(50, 2)
    first = Seq(drafts, [*trunk, *tool], ("1", 0), b"s")
    first.guess()
    second = Seq(drafts, [*trunk, 9, *tool[:4]], ("2", 0), b"s")
    assert second.guess().tokens == tool[4:12]
    first.end(1, 2, 3)
    second.end(4, 5, 6)
    third = Seq(drafts, [*trunk, *tool, 1, 2, 3, 8, 4, 5], ("3", 0), b"s")
    assert third.guess().tokens == [6]


def test_a_probe_of_another_tenant_finds_nothing():
    drafts = SuffixDrafts()
    secret = draw(400, 1)
    live = Seq(drafts, secret, ("live", 0), b"s", b"victim")
    live.say(*draw(50, 2)).guess()
    Seq(drafts, secret, ("done", 0), b"s", b"victim").end(*draw(50, 3))
    Seq(drafts, secret, ("alone", 0), None, b"victim").end(*draw(50, 3))
    for session in (b"s", None, b""):
        for key in ("done", "live", "probe"):
            for at in range(30, 400, 40):  # apart: a tenant may find its own probes
                probe = Seq(drafts, secret[at - 30 : at], (key, 1), session, b"thief")
                assert probe.guess().tokens == []
                probe.drafts.forget(probe.key)
    # The same probes by the tenant itself find it, so they could have.
    own = Seq(drafts, secret[100:130], ("own", 0), b"s", b"victim")
    assert own.guess().tokens == secret[130:138]
    assert Seq(drafts, secret[100:130], ("own", 1), None, b"victim").guess().tokens == []


def test_what_another_source_drafted_is_read_on_from_without_being_said():
    text = draw(200, 1)
    drafts, plain = SuffixDrafts(), SuffixDrafts()
    seq, other = Seq(drafts, [*text, *text[24:44]]), Seq(plain, [*text, *text[24:44]])
    assert seq.guess() == other.guess()
    assert seq.guess(text[44:47]).tokens == text[47:55]
    assert seq.guess([text[90], text[91]]).tokens == text[92:100]
    assert seq.guess([39_999, 39_998]).tokens == []
    assert seq.guess(text[44:60]).tokens == text[60:68]
    assert seq.guess() == other.guess()


def test_a_kind_of_guess_that_fails_is_believed_less_and_one_that_holds_more():
    drafts = SuffixDrafts()
    text = draw(200, 1)
    seq = Seq(drafts, [*text, *text[40:44]])
    first = seq.guess().survival[0]
    for _ in range(30):
        seq.guess()
        drafts.observe(seq.key, 8, 0)
    bad = seq.guess().survival[0]
    assert bad < first / 2
    for _ in range(200):
        seq.guess()
        drafts.observe(seq.key, 2, 2)
    assert seq.guess().survival[0] > first


def test_only_what_was_looked_at_is_learned_and_a_guess_counts_once():
    drafts, same = SuffixDrafts(), SuffixDrafts()
    text = draw(200, 1)
    pair = [Seq(d, [*text, *text[40:44]]) for d in (drafts, same)]
    for seq in pair:
        seq.guess()
    drafts.observe(("r", 0), 0, 0)
    drafts.observe(("nobody", 0), 5, 5)
    assert pair[0].guess() == pair[1].guess()
    drafts.observe(("r", 0), 1, 1)
    same.observe(("r", 0), 1, 1)
    drafts.observe(("r", 0), 8, 0)
    assert pair[0].guess() == pair[1].guess()


EDITS = {60: ([900], 1), 130: ([901, 902, 903], 1), 200: ([], 4), 280: ([904] * 7, 0),
         350: ([905, 906], 5)}


def edited(text: list[int]) -> tuple[list[int], list[bool]]:
    """The text with five places changed, and which of its tokens are the old ones."""
    new: list[int] = []
    kept: list[bool] = []
    at = 0
    while at < len(text):
        if at in EDITS:
            put, gone = EDITS[at]
            new += put
            kept += [False] * len(put)
            at += gone
        new.append(text[at])
        kept.append(True)
        at += 1
    return new, kept


@pytest.mark.parametrize("repetitive", [False, True])
def test_a_prediction_is_followed_through_five_edits(repetitive):
    old = draw(400, 1, 30 if repetitive else 30_000)
    new, kept = edited(old)
    seq = Seq(SuffixDrafts(), draw(50, 2), predicted=tuple(old))
    right = said = 0
    for token, is_old in zip(new, kept, strict=True):
        guess = seq.guess(limit=4)
        hit = guess.tokens[:1] == [token]
        right += hit and is_old
        said += bool(hit and guess.predicted and is_old)
        seq.drafts.observe(seq.key, min(1, len(guess.tokens)), int(hit))
        seq.say(token)
    assert right > 0.85 * sum(kept)
    assert said > 0.85 * sum(kept)


def test_a_prediction_is_drafted_at_once_and_told_apart():
    text = draw(100, 1)
    seq = Seq(SuffixDrafts(), draw(50, 2), predicted=tuple(text))
    guess = seq.guess()
    assert guess.tokens == text[:8][: len(guess.tokens)] != []
    assert guess.predicted == len(guess.tokens)
    other = draw(60, 3)
    assert seq.say(*other, 1, *other[:3]).guess()[::2] == (other[3:11], 0)


def test_an_output_without_its_prediction_stops_drafting_it():
    seq = Seq(SuffixDrafts(), draw(50, 2), predicted=tuple(draw(100, 1)))
    for token in draw(6, 9):
        seq.say(token).guess()
    assert seq.guess().tokens == []


def test_of_a_sequence_that_ended_only_its_session_is_left():
    drafts = SuffixDrafts()
    for n in range(5):
        seq = Seq(drafts, draw(500, n), (f"{n}", 0), predicted=(1, 2, 3))
        seq.end(*draw(600, n))
    drafts.forget(("never", 0))
    drafts.forget(("0", 0))
    assert drafts.nbytes == 0
    assert not drafts._choices
    assert not drafts._requests
    Seq(drafts, draw(500, 1), session=b"s").end()
    assert 0 < drafts.nbytes < 500 * 20 + 2000


def test_bytes_stay_bounded_with_many_sessions_and_the_newest_are_kept():
    drafts = SuffixDrafts(session_bytes=40_000, total_bytes=300_000)
    for n in range(60):
        seq = Seq(drafts, draw(1000, n), (f"{n}", 0), b"%d" % n)
        seq.end(*draw(100, 1000 + n))
        assert 0 < drafts.nbytes <= 300_000
    newest, oldest = draw(1000, 59)[30:40], draw(1000, 0)[30:40]
    assert Seq(drafts, newest, ("x", 0), b"59").guess().tokens
    assert not Seq(drafts, oldest, ("x", 1), b"0").guess().tokens


def test_bytes_stay_bounded_with_one_session_that_never_ends():
    drafts = SuffixDrafts(session_bytes=60_000, total_bytes=10 << 20)
    history: list[int] = []
    for n in range(30):
        history += draw(200, n)
        seq = Seq(drafts, history, (f"{n}", 0), b"s")
        seq.end(*(said := draw(100, 100 + n)))
        history += said
        assert drafts.nbytes <= 60_000 + 2000
    assert Seq(drafts, draw(100, 129)[:30], ("x", 0), b"s").guess().tokens == draw(100, 129)[30:38]


def test_bytes_stay_bounded_with_more_that_live_than_fit():
    drafts = SuffixDrafts(session_bytes=100_000, total_bytes=200_000)
    seqs = [Seq(drafts, draw(1500, n), (f"{n}", 0), b"%d" % n if n % 2 else None)
            for n in range(30)]
    for _ in range(3):
        for seq in seqs:
            seq.guess()
            seq.say(*draw(COUNTED, len(seq.tokens)))
    fixed = 30 * 5000  # objects of sequences that live: their number is the scheduler's
    assert drafts.nbytes <= 200_000 + fixed
    for seq in seqs:
        seq.end()
    assert drafts.nbytes <= 200_000


def test_bytes_are_told_as_they_are():
    texts = [draw(2000, n) for n in range(40)]
    drafts = SuffixDrafts()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n, text in enumerate(texts):
            drafts.guess(Turn((f"{n}", 0), text, 1990, 8, b"%d" % n, b"t", list, ()), (), 8)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert drafts.nbytes == pytest.approx(held, rel=0.2)


def test_a_long_prompt_is_indexed_over_several_calls():
    drafts = SuffixDrafts()
    prompt = draw(3 * PIECE + 100, 1)
    seq = Seq(drafts, prompt, session=b"s")
    session = None
    for calls in range(1, 5):
        seq.guess()
        session = session or seq.drafts._requests["r"].session
        assert len(session.texts[0]) == min(len(prompt), calls * PIECE)
    assert seq.say(*prompt[-40:-30]).guess().tokens == prompt[-30:-22]


def test_a_key_that_comes_back_as_another_sequence_starts_anew():
    drafts = SuffixDrafts()
    text = draw(100, 1)
    Seq(drafts, text, ("r", 0)).guess()
    assert Seq(drafts, text[:20] * 2, ("r", 0), b"s", b"other").guess().tokens == text[:8]
    short = Seq(drafts, text[:9], ("r", 0))
    assert short.guess().tokens == []
    short.say(*text[:5]).guess()
    del short.tokens[-3:]  # never done by the engine
    short.guess()
    drafts.forget(("r", 0))
    assert not drafts._requests


odd = st.integers(-(2**70), 2**70) | st.integers(-1, 3) | st.integers(0, 3)
steps = st.lists(st.tuples(
    st.integers(0, 5), st.lists(odd, max_size=70), st.lists(odd, max_size=4), st.integers(1, 8),
    st.integers(0, 9), st.booleans(),
), max_size=25)


@settings(max_examples=150, deadline=None)
@given(steps=steps, prompts=st.lists(st.lists(odd, min_size=1, max_size=80), min_size=6,
                                     max_size=6))
def test_no_ids_make_it_fail_and_the_same_calls_give_the_same_guesses(steps, prompts):
    def run() -> list[Guess]:
        drafts = SuffixDrafts(session_bytes=4000, total_bytes=12_000)
        made = [Seq(drafts, p, (f"{n // 2}", n), (None, b"a", b"b")[n % 3], b"t",
                    tuple(prompts[n - 1][:30])) for n, p in enumerate(prompts)]
        guesses = []
        for who, new, ahead, limit, matched, end in steps:
            guesses.append(made[who].guess(ahead, limit))
            assert all(0 <= token < 2**31 for token in guesses[-1].tokens)
            drafts.observe(made[who].key, limit, matched)
            made[who].say(*new)
            if end:
                made[who].end(*ahead)
            for session in drafts._sessions._named.values():
                for text in session.texts:
                    text.check()
        for seq in made:
            drafts.forget(seq.key)
        assert drafts.nbytes <= 12_000
        assert drafts._sessions._live == 0
        return guesses

    assert run() == run()


def test_it_needs_no_torch():
    code = "import sys, speculative.suffix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
