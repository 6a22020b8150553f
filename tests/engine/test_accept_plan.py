"""The acceptance rule with a plan to close the output: what stands of a run, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from engine.accept import Accepted, End, accept


@dataclass
class Planned:
    """A grammar and its closing plan: of a run the tokens of `room` stand, then `instead` comes."""

    refused: tuple[int, ...] = ()
    length: int = 100  # of the output, in tokens
    room: int = 100
    instead: int | None = None
    overridden: int = 0
    accepting: bool = True
    ends: tuple[int, ...] = ()
    seen: list[int] = field(default_factory=list)

    @property
    def finished(self):
        return len(self.seen) >= self.length

    def valid_prefix(self, tokens):
        legal = next((i for i, t in enumerate(tokens) if t in self.refused), len(tokens))
        return min(legal, self.length - len(self.seen))

    def allows(self, token):
        assert token >= 0
        return self.accepting if token in self.ends else token not in self.refused

    def take(self, run, budget):
        assert len(run) <= budget
        kept = min(len(run), self.room - len(self.seen))
        self.seen += run[:kept]
        if kept == len(run):
            return Verdict(kept)
        if self.instead is None:
            return Verdict(kept, ended=True)
        self.seen.append(self.instead)
        self.overridden += 1
        return Verdict(kept, self.instead)


@dataclass
class Verdict:
    kept: int
    forced: int | None = None
    ended: bool = False


def planned(remaining: int = 9, stop_ids=(), **more) -> End:
    both = Planned(**more)
    return End(remaining, stop_ids, both, both)


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("room", range(5))
def test_a_run_ends_at_its_plans_token_whatever_was_right_behind_it(right, room):
    sampled = [1, 2, 3, 4]
    draft = [*sampled[:right], *[9] * (3 - right)]
    run = sampled[: right + 1]
    kept = min(room, len(run))
    over = kept < len(run)
    found = accept(sampled, draft, planned(room=room, instead=8))
    tokens = [*run[:kept], *[8] * over]
    assert found == Accepted(tokens, min(right, kept), "", False, over)
    found = accept(sampled, draft, planned(room=room))
    finish = "length" if over else ""
    assert found == Accepted(run[:kept], min(right, kept), finish, False, False, over)


def test_with_a_plan_every_end_is_as_without_until_the_plan_had_to_speak():
    assert accept([1, 7, 3], [1, 7], planned(stop_ids=[7])) == Accepted([1, 7], 2, "stop", True)
    assert accept([1, 2, 3], [1, 2], planned(length=2)) == Accepted([1, 2], 2, "stop", False)
    assert accept([1, 2, 3], [1, 2], planned(3)) == Accepted([1, 2, 3], 2, "length", False)
    assert accept([1, 2, 3], [1, 2], planned(2)) == Accepted([1, 2], 2, "length", False)
    assert accept([1, -1, 3], [1, 2], planned()) == Accepted([1], 1, "error", False)
    assert accept([1, 2, 3], [1, 2], planned(refused=(2,))) == Accepted([1], 1, "error", False)
    assert accept([7], [], planned(stop_ids=[7], overridden=1)) == Accepted([7], 0, "length", True)
    assert accept([1], [], planned(length=1, overridden=1)) == Accepted([1], 0, "length", False)
    last = planned(length=2, room=1, instead=8)
    assert accept([1, 2, 3], [1, 2], last) == Accepted([1, 8], 1, "length", False, True)


def test_what_stands_behind_the_plans_token_is_not_looked_at():
    end = planned(room=0, instead=8, refused=(2,), stop_ids=[7])
    assert accept([1, 2, 3], [1, 2], end) == Accepted([8], 0, "", False, True)
    end = planned(room=0, instead=8, stop_ids=[7])
    assert accept([1, 7], [1], end) == Accepted([8], 0, "", False, True)


def test_a_grammar_that_broke_is_an_error_and_no_end():
    found = accept([1], [], planned(room=0, accepting=False))
    assert found == Accepted([], 0, "error", False, False, True)


def test_with_a_plan_too_what_was_drawn_without_a_mask_and_is_not_legal_is_drawn_again():
    def lean(**more) -> End:
        return replace(planned(**more), lean=True)

    again = Accepted([1], 1, "", False, undrawn=True)
    assert accept([1, 2, 3], [1, 2], lean(refused=(2,))) == again
    assert accept([1, 2], [1], lean(stop_ids=[2], ends=(2,), accepting=False)) == again
    assert accept([1, 2], [1], lean(stop_ids=[2], ends=(2,))) == Accepted([1, 2], 1, "stop", True)
    assert accept([2, 3], [2], lean(refused=(2,))).finish == "error"
    assert accept([1, -1], [1], lean()).finish == "error"
    # The plan spoke first: what lies behind its token was not looked at.
    assert accept([1, 2, 3], [1, 2], lean(refused=(3,), room=1, instead=8)) == Accepted(
        [1, 8], 1, "", False, True)
    assert accept([1, 2], [1], lean(refused=(2,), length=1)) == Accepted([1], 1, "stop", False)
