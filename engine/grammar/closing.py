"""One sequence's promise that its output ends inside its budget.  Searches and samples nothing.

    plan      tokens that are legal now, lead to where the output may end, and fit into the budget
    a token   stands when a plan that fits is found behind it; else the plan's first takes its place

Either way a plan that fits remains, so the promise does not depend on how good the plans are.
Tokens are judged one at a time whatever the run they come in, so drafts change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.grammar.planner import Planner

if TYPE_CHECKING:
    from engine.grammar.state import State

__all__ = ["Closing", "Planner", "Taken"]



@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a run of sampled tokens."""

    kept: int  # of the run
    forced: int | None = None  # the token in place of run[kept]; None when all of the run stands
    ended: bool = False  # the output ends behind the kept ones: here it may, and behind the next
    #                      token there would be no room to


class Closing:
    """One sequence's plan.  `planner` is that of the grammar which `state` stands in."""

    def __init__(self, planner: Planner, state: State) -> None:
        self._planner = planner
        self._state = state
        self._plan: list[int] = []
        self._said: list[int] = []  # the tokens that the state moved over
        self.overridden = 0  # tokens so far that the model did not choose

    def admit(self, budget: int) -> bool:
        """Before the first token: whether the output can end within `budget` tokens."""
        plan = self._planner.start_plan
        if plan is None or len(plan) > budget:
            return False
        self._plan = list(plan)
        return True

    @property
    def plan(self) -> Sequence[int]:
        """The tokens with which the output would end now; empty when it may end at once."""
        return self._plan

    def take(self, run: Sequence[int], budget: int) -> Taken:
        """Take sampled tokens, none of them a stop id and all legal in a row from the state.

        `budget`: tokens that may still come, these included.  The state moves over those that stand
        and over the one that is forced.
        """
        assert len(run) <= budget, f"{len(run)} tokens for a budget of {budget}"
        place = 0
        while place < len(run):
            if along := self._along(run, place):
                moved = self._state.accept_all(run[place : place + along])
                self._said += self._plan[:moved]
                self._plan, place = self._plan[moved:], place + moved
                if moved < along:  # the matcher reached one of its limits
                    return self._override(place)
            elif self._take(run[place], budget - place - 1):
                place += 1
            else:
                return self._override(place)
        return Taken(len(run))

    def clone(self, state: State) -> Closing:
        """The same promise for a copy of the sequence; `state` is the copy's."""
        other = Closing(self._planner, state)
        other._plan, other.overridden = self._plan, self.overridden  # a plan is never changed
        other._said = self._said.copy()
        return other

    def _along(self, run: Sequence[int], start: int) -> int:
        """How many tokens of the run from `start` on are the plan's."""
        plan = self._plan
        most = min(len(plan), len(run) - start)
        for count in range(most):
            if plan[count] != run[start + count]:
                return count
        return most

    def _take(self, token: int, left: int) -> bool:
        """Move over a token that is not the plan's, when one of at most `left` is found behind it.
        """
        state = self._state
        if not state.accept(token):
            return False  # the matcher reached one of its limits
        self._said.append(token)
        found = self._reused(token, left)
        if found is None:
            found = self._planner.full(state, left, self._said)
        if found is None:
            state.rollback(1)
            self._said.pop()
            return False
        self._plan = found
        return True

    def _override(self, place: int) -> Taken:
        if not self._plan or not self._state.accept(self._plan[0]):
            return Taken(place, ended=True)
        forced, self._plan = self._plan[0], self._plan[1:]
        self._said.append(forced)
        self.overridden += 1
        return Taken(place, forced)

    def _reused(self, token: int, left: int) -> list[int] | None:
        """The old plan adapted to the token, where that works and fits."""
        state, plan = self._state, self._plan
        if state.accepting:
            return []
        rest = self._planner.rest(plan, token)
        if rest is not None and len(rest) <= left:
            return rest
        for adapted in self._planner.adapted(plan, token):
            if len(adapted) <= left and state.closes(adapted):
                return adapted
        return None
