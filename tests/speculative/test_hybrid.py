"""Choosing and splicing: whose tokens stand where in a chain, and who learns from which part."""

from __future__ import annotations

import pytest

from engine.proposer import Load, Ran, Turn
from speculative.forced import ForcedDrafts
from speculative.hybrid import DEVICE, Hybrid

FREE = 1e-9
TEXT = [*range(10, 30), 5, 6, 7, *range(10, 18)]  # its end stands at the beginning, too


def turn(
    tokens=TEXT, *, forced=(), key=("r", 0), limit=8, predicted=(), mode="auto", guessed=(),
    legal=None,
) -> Turn:  # fmt: skip
    return Turn(key, tokens, len(tokens), limit, None, b"", lambda: list(forced), predicted, mode,
                guessed, legal)  # fmt: skip


def test_what_the_grammar_dictates_goes_first_and_what_followed_it_before_goes_behind() -> None:
    (draft,) = Hybrid(FREE).propose([turn(forced=[18, 19])])
    assert draft.tokens == [18, 19, 20, 21, 22, 23, 24, 25]
    assert list(draft.sources) == ["forced"] * 2 + ["suffix"] * 6


def test_without_a_grammar_the_suffix_speaks_and_without_both_nobody() -> None:
    one, other = Hybrid(FREE).propose([turn(), turn(list(range(40)), key=("s", 0))])
    assert one.tokens[:3] == [18, 19, 20] and set(one.sources) == {"suffix"}
    assert other.tokens == []


def test_a_prediction_is_told_apart() -> None:
    (draft,) = Hybrid(FREE).propose([turn(list(range(40)), predicted=[90, 91, 92])])
    assert draft.tokens and draft.tokens == [90, 91, 92][: len(draft.tokens)]
    assert set(draft.sources) == {"prediction"}


@pytest.mark.parametrize(
    ("mode", "sources"),
    [("auto", {"forced", "suffix"}), ("suffix", {"suffix"}), ("forced", {"forced"}),
     ("eagle3", set())],
)  # fmt: skip
def test_a_request_may_name_one_source(mode: str, sources: set[str]) -> None:
    (draft,) = Hybrid(FREE).propose([turn(forced=[18, 19], mode=mode)])
    assert set(draft.sources) == sources


def test_no_chain_is_longer_than_its_limit_and_dear_rows_get_none() -> None:
    for limit in range(1, 6):
        (draft,) = Hybrid(FREE).propose([turn(forced=[18, 19, 20], limit=limit)])
        assert len(draft.tokens) == limit == len(draft.sources)
    (draft,) = Hybrid(50.0).propose([turn(forced=[18, 19, 20])])
    assert draft.tokens == []


def below(most: int):
    """Of a grammar that takes the ids below `most` alone."""
    return lambda tokens: next((i for i, t in enumerate(tokens) if t >= most), len(tokens))


def test_what_the_grammar_would_refuse_takes_no_row_from_others() -> None:
    (draft,) = Hybrid(FREE).propose([turn(forced=[18, 19], legal=below(22))])
    assert draft.tokens == [18, 19, 20, 21] and draft.sources[2:] == ("suffix",) * 2
    (draft,) = Hybrid(FREE).propose([turn(guessed=[18, 60, 61, 62, 63, 64], legal=below(22))])
    assert draft.tokens == [18, 19, 20, 21], "the device's chain is judged as well"
    (draft,) = Hybrid(FREE).propose([turn(list(range(40)), guessed=[7, 60], legal=below(22))])
    assert draft.tokens == [7] and draft.sources == ("eagle3",)
    assert Hybrid(FREE).begin(turn(forced=[18], legal=below(20)), True).tokens == [18, 19]


def test_texts_are_asked_no_more_behind_what_only_the_end_follows() -> None:
    hybrid, asked = Hybrid(FREE), []
    guess = hybrid._suffix.guess
    hybrid._suffix.guess = lambda *given: (asked.append(given[1]), guess(*given))[1]
    for _ in range(60):
        (draft,) = hybrid.propose([turn(forced=[18, 19], legal=below(20))])
        assert draft.tokens == [18, 19]
    assert 16 <= len(asked) <= 20
    (draft,) = hybrid.propose([turn(forced=[18], legal=below(21))])
    assert draft.tokens == [18, 19, 20], "behind another token they are"


class Heard:
    """A suffix source that only notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def observe(self, key, verified: int, matched: int) -> None:
        self.told.append((verified, matched))


@pytest.mark.parametrize(
    ("verified", "matched", "suffix", "right"),
    [
        (8, 8, [(6, 6)], True),
        (5, 4, [(3, 2)], True),
        (3, 2, [(1, 0)], True),
        (2, 2, [], True),  # nothing of the suffix was judged
        (2, 1, [], False),  # what stands behind a miss says nothing
        (1, 0, [], False),
    ],
)
def test_each_source_learns_from_its_own_part(verified, matched, suffix, right) -> None:
    hybrid = Hybrid(FREE)
    (draft,) = hybrid.propose([turn(forced=[18, 19])])
    assert hybrid._suffix is not None and hybrid._forced is not None
    hybrid._suffix = heard = Heard()
    before = hybrid._forced.guess(turn(forced=[1]), 1)[1]
    hybrid.observe(("r", 0), draft.sources, verified, matched)
    assert heard.told == suffix
    assert (hybrid._forced.guess(turn(forced=[1]), 1)[1] > before) is right


def test_what_was_drawn_before_a_draft_was_verified_is_nobodys_part() -> None:
    """The first of two forced tokens was drawn by the step before."""
    hybrid = Hybrid(FREE)
    draft = hybrid.begin(turn(forced=[18, 19], predicted=[20, 21]), True)
    assert draft.sources[:2] == ("forced", "forced") and len(draft.tokens) > 3
    assert hybrid._suffix is not None and hybrid._forced is not None
    hybrid._suffix, before = Heard(), hybrid._forced.guess(turn(forced=[1]), 1)[1]
    hybrid.observe(("r", 0), draft.sources[1:], 2, 1)  # the second stood, what follows did not
    assert hybrid._suffix.told == [(1, 0)]
    assert hybrid._forced.guess(turn(forced=[1]), 1)[1] > before


def test_forced_tokens_are_trusted_as_far_as_they_were_right() -> None:
    source = ForcedDrafts()
    for _ in range(500):
        source.observe(4, 2)
    _, survival = source.guess(turn(forced=[1, 2, 3]), 3)
    assert survival[0] == pytest.approx(0.5, abs=0.01) and survival[2] == survival[0] ** 3


def test_what_ended_is_forgotten() -> None:
    hybrid = Hybrid(FREE)
    hybrid.propose([turn(), turn(key=("s", 1))])
    hybrid.forget(("r", 0))
    hybrid.forget(("r", 0))
    assert hybrid._suffix is not None and list(hybrid._suffix._choices) == [("s", 1)]
    hybrid.observe(("r", 0), ["suffix"] * 3, 3, 1)  # a late word about it does no harm


FRESH = list(range(40))  # nothing in it stood there before


def test_what_the_device_guessed_is_taken_where_the_texts_know_less() -> None:
    (draft,) = Hybrid(FREE).propose([turn(FRESH, guessed=[50, 51, 52])])
    assert draft.tokens == [50, 51, 52] and set(draft.sources) == {"eagle3"}
    (draft,) = Hybrid(FREE).propose([turn(guessed=[50, 51])])  # a long match is likelier to last
    assert draft.tokens[0] == 18 and set(draft.sources) == {"suffix"}


def test_it_goes_on_behind_what_the_grammar_dictates_if_it_guessed_that_too() -> None:
    agreed, other = Hybrid(FREE).propose([
        turn(FRESH, forced=[50, 51], guessed=[50, 51, 52]),
        turn(FRESH, forced=[50, 51], guessed=[50, 60, 52], key=("s", 0)),
    ])  # fmt: skip
    assert agreed.tokens == [50, 51, 52]
    assert list(agreed.sources) == ["forced", "forced", "eagle3"]
    assert other.tokens == [50, 51] and set(other.sources) == {"forced"}


def test_the_device_is_believed_as_far_as_it_was_right_place_by_place() -> None:
    hybrid = Hybrid(FREE)
    for _ in range(300):
        (draft,) = hybrid.propose([turn(FRESH, guessed=[50, 51, 52])])
        hybrid.observe(("r", 0), draft.sources, 2, 1)  # the first is always right, the second never
    first, second, third, *_ = hybrid._device.chances
    assert first > 0.9 and second < 0.1 and third == DEVICE[2]
    dear = hybrid.propose([turn(FRESH, guessed=[50, 51, 52])])
    assert dear[0].tokens[:1] == [50]


def test_what_was_prepared_is_proposed_and_nothing_of_it_for_a_text_that_went_on() -> None:
    one, other, asked = Hybrid(FREE), Hybrid(FREE), []

    def forced(run):
        return lambda: asked.append(run) or run

    def longer(run, more=()):
        return Turn(("r", 0), [*TEXT, *more], len(TEXT), 8, None, b"", forced(run))

    wanted = other.propose([longer([18, 19])])
    asked.clear()
    one.prepare([longer([18, 19])])
    assert one.propose([longer([9])]) == wanted and asked == [[18, 19]]
    one.prepare([longer([18, 19])])
    (draft,) = one.propose([longer([7], more=[18])])
    assert draft.tokens[0] == 7


@pytest.mark.parametrize("piped", [False, True])
def test_steps_with_grammars_are_timed_apart_only_where_the_host_is_timed_too(piped: bool) -> None:
    """A step's own time knows no masks: what is learned of one kind holds for the other."""
    made = Hybrid(FREE, piped=piped)
    for rows in (1, 9):  # a row more costs as much as the first
        made.timed(Ran(rows, rows * 0.01))
    for masked in (False, True):
        made.ahead(Load(1, masked=masked), 0)
        (draft,) = made.propose([turn(forced=[18, 19])])
        assert bool(draft.tokens) == (piped and masked)


def test_steps_that_were_slept_through_count_for_the_kind_that_chose_to_sleep() -> None:
    hybrid = Hybrid(FREE, piped=True)
    plain, masked = hybrid._ahead
    before = plain._turn, masked._turn
    hybrid.ahead(Load(8), 7)
    hybrid.ahead(Load(8, masked=True, steps=15), 7)
    hybrid.ahead(Load(8, steps=1), 7)
    assert (plain._turn - before[0], masked._turn - before[1]) == (16, 1)
