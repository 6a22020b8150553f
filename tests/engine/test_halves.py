"""Two halves of the sequences take turns: who has a row when, and that no answer changes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from engine.halves import half
from engine.messages import Abort, Submit
from engine.proposer import FREE, HALVES
from tests.driver import Run, answers, make
from tests.exact import preempt_some, requests
from tests.proposers import OracleDrafts, Steered
from tests.tiny import write_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("halves") / "model", max_len=512)


def some(flying: int, ready: int) -> tuple[list, list]:
    running = [SimpleNamespace(pending=int(i < flying)) for i in range(flying + ready)]
    return running, running[flying:]


@pytest.mark.parametrize(("flying", "ready", "taken"), [
    (0, 1, 1), (0, 2, 1), (0, 7, 4), (4, 3, 3), (3, 4, 4), (1, 30, 16), (5, 0, 0), (0, 0, 0),
])  # fmt: skip
def test_a_half_is_of_those_that_do_not_fly_and_at_most_half_of_all(flying, ready, taken):
    running, wanted = some(flying, ready)
    assert half(running, running) == half(wanted, running) == wanted[:taken]


def steps_of(engine, submits, say) -> list[list[int]]:
    """The rows that draw in each step, by request's number, until all have ended."""
    seen: list[list[int]] = []
    launch = engine.runner.launch

    def noted(plan):
        seen.append([int(row.seq.submit.id[1:]) for row in plan.rows if row.last])
        return launch(plan)

    engine.runner.launch = noted
    engine.guessing.host.say = say
    run = Run(engine).put(*submits).drain()
    assert not run.failed
    return seen


def asks(count: int, most: int = 40) -> list[Submit]:
    return [Submit(f"r{i}", [7 * i + j for j in range(6)], most, requests("greedy", "free", 1)[0]
                   .sampling) for i in range(count)]  # fmt: skip


def test_halves_alternate_are_equal_and_one_flies_while_the_other_is_guessed_for(folder):
    engine = make(folder, drafts=Steered({}, lambda: HALVES), depth=1)
    flying = []
    propose = engine.guessing.propose

    def noted(scheduler):
        flying.append(sum(seq.pending > 0 for seq in scheduler.running))
        propose(scheduler)

    engine.guessing.propose = noted
    seen = [one for one in steps_of(engine, asks(6), lambda: HALVES) if one][4:30]
    assert all(len(one) == 3 for one in seen)
    for one, other in itertools.pairwise(seen):
        assert not set(one) & set(other)
    assert flying.count(3) > 20


def test_one_sequence_and_other_ways_have_whole_steps(folder):
    engine = make(folder, drafts=Steered({}, lambda: HALVES), depth=1)
    assert all(len(one) == 1 for one in steps_of(engine, asks(1), lambda: HALVES))
    for way in (0, FREE):
        engine = make(folder, drafts=Steered({}, lambda: way), depth=1)
        assert sum(len(one) == 4 for one in steps_of(engine, asks(4), lambda way=way: way)) > 30


@pytest.mark.parametrize("draw", ["greedy", "hot", "greedy-penalised"])
@pytest.mark.parametrize("grammar", ["free", "json", "tight"])
def test_taking_turns_changes_no_answer(folder, draw, grammar):
    """Whatever way comes before and behind, with forks, aborts and lost blocks."""
    submits = requests(draw, grammar, 2)
    plain = make(folder)
    truth = {key: text for one in submits for key, text in answers(plain, one).items()}
    ways = [HALVES, HALVES, HALVES, 0, HALVES, FREE, HALVES, HALVES, FREE, 0]
    number = [0]

    def say() -> int:
        number[0] += 1
        return ways[number[0] // 3 % len(ways)]

    for drafts, disturb in ((OracleDrafts(truth), None), (OracleDrafts(truth, 3), preempt_some)):
        host = Steered(truth, say)
        host.guess = drafts.guess
        engine = make(folder, drafts=host, max_drafts=5, depth=1)
        left = Submit("left", [1, 2, 3], 60, submits[0].sampling)
        run = Run(engine).put(*submits, left)
        for _ in range(7):
            engine.wait(5.0)
            run.step()
        run.put(Abort("left")).drain(disturb=disturb)
        run.tokens.pop(("left", 0), None)
        assert run.tokens == truth and not run.failed and engine.pool.used == 0
        assert engine.guessing.accepted > 5
