"""How seldom a proposer is asked while nobody is to guess.  Runs no model."""

from __future__ import annotations

from types import SimpleNamespace as Some

import pytest

from engine.guessing import Guessing
from engine.proposer import ASLEEP, FREE

REST = 16


class Asked:
    """A proposer that notes what it is asked, and says the same every time."""

    source, sources = "s", ("s",)

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.loads = []

    def ahead(self, load, most):
        self.loads.append(load)
        return self.answer

    @property
    def holds(self):
        return REST if self.answer == ASLEEP and self.loads[-1].rows > 1 else 1

    def propose(self, turns, beside=0):
        raise AssertionError("nobody is to guess")


def asked(answer: int, *plans: Some) -> tuple[Guessing, list]:
    host = Asked(answer)
    guessing = Guessing(host, None, 7, 100)
    scheduler = Some(reads=0, waiting=[], active=2, running=[Some(pending=True)])
    for plan in plans:
        assert guessing.ahead(plan, scheduler) == answer
        guessing.propose(scheduler)
    return guessing, host.loads


def plan(drawing: int, masked: int = 0) -> Some:
    return Some(drawing=drawing, masked=[None] * masked, rows=[])


def test_one_answer_holds_for_many_steps_of_several_and_the_next_time_hears_how_many():
    guessing, loads = asked(ASLEEP, *[plan(8)] * (2 * REST + 1))
    assert [load.steps for load in loads] == [1, REST, REST]
    assert guessing.rests == REST - 1


@pytest.mark.parametrize("other", [plan(1), plan(8, 1)], ids=["alone", "with a grammar"])
def test_a_step_of_another_kind_is_asked_about_at_once(other):
    guessing, loads = asked(ASLEEP, plan(8), plan(8), plan(8), other, other, plan(8))
    assert [(load.rows, load.steps) for load in loads] == [
        (8, 1), (other.drawing, 3), (other.drawing, 1), (8, 1)]
    assert guessing.rests == REST - 1


def test_an_answer_but_that_one_is_asked_for_each_time():
    guessing, loads = asked(FREE, *[plan(8)] * 5)
    assert [load.steps for load in loads] == [1] * 5 and not guessing.rests


@pytest.mark.parametrize("piped", [True, False])
def test_where_all_is_known_nobody_waits_if_steps_can_run_ahead(piped):
    guessing = Guessing(Asked(3), None, 7, 100, piped=piped)
    submit = Some(drafts="auto", max_drafts=7)
    early = Some(last=True, seq=Some(early=True, remaining=50, submit=submit))
    scheduler = Some(reads=0, waiting=[], active=1, running=[])
    only = Some(drawing=1, masked=[], rows=[early])
    assert guessing.ahead(only, scheduler) == (FREE if piped else 3)
    late = Some(last=True, seq=Some(early=False, remaining=50, submit=submit))
    assert guessing.ahead(Some(drawing=2, masked=[], rows=[early, late]), scheduler) == 3
