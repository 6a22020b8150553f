"""What a grammar dictates behind a long prompt is verified by a step launched ahead.  No GPU."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from engine.kernels.attention_plan import SHORT
from engine.proposer import ASLEEP, FREE, HOST
from speculative.hybrid import Hybrid
from tests.captured import KnowingChains
from tests.driver import Run, make
from tests.exact import preempt_some
from tests.proposers import AdversarialDrafts, OracleDrafts
from tests.scripted import EOS
from tests.speculative.test_captured import DEVICE
from tests.speculative.test_captured import make as make_device
from tests.speculative.test_opening import (  # noqa: F401
    OPENING,
    ask,
    asks,
    few_programs,
    folder,
    truth,
)


def planned(engine) -> list:
    """Its rows from now on, by step, each with what else flew when it was launched."""
    rows, launch = [], engine.runner.launch

    def noted(plan):
        rows.append((engine._out, plan.rows))
        return launch(plan)

    engine.runner.launch = noted
    return rows


def always(engine, *answers: int) -> None:
    """The proposer says these by turns."""
    turns, host = itertools.cycle(answers), engine.guessing.host
    host.ahead = lambda load, most: next(turns)


def long(number: int = 0, **more):
    one = ask(number, **more)
    return msgspec.structs.replace(one, prompt=one.prompt * 4)


@pytest.mark.parametrize("answer", [HOST, 0, FREE], ids=["host", "waits", "free"])
def test_the_step_behind_a_long_prompt_is_launched_with_it(folder, answer):  # noqa: F811
    wanted = Run(make(folder)).put(long()).drain().tokens
    engine = make(folder, drafts=Hybrid(0.1, piped=True), max_drafts=31, depth=1,
                  max_batch_tokens=300)
    always(engine, answer)
    rows, run = planned(engine), Run(engine).put(long())
    assert run.drain().tokens == wanted
    (_, (prompt,)), (flew, (second,)), *_ = rows
    assert prompt.last and not prompt.draft and flew == 1 and second.pending
    assert bytes(second.draft) == OPENING[1 : engine.runner.short - 1]
    assert engine.guessing.matched["forced"] == engine.guessing.verified["forced"]
    assert len(rows) <= len(wanted["r0", 0]) - len(second.draft)
    assert any(flew for flew, _ in rows[2:]) == (answer == FREE), "later ones as was asked"


@pytest.mark.parametrize("depth", [0, 1])
def test_several_that_wait_for_each_other_begin_as_ever(folder, depth):  # noqa: F811
    """One answers already: the step with the other's prompt waits for what is guessed for it."""
    engine = make(folder, drafts=Hybrid(0.1, piped=depth > 0), max_drafts=31, depth=depth,
                  max_batch_tokens=300)
    always(engine, 0)
    free = msgspec.structs.replace(asks()[4], max_tokens=30)
    wanted = Run(make(folder)).put(free, long()).drain().tokens
    rows, run = planned(engine), Run(engine).put(free)
    while not run.outs:
        run.step()
    assert run.put(long()).drain().tokens == wanted
    assert not any(row.pending and row.draft for _, plan in rows for row in plan)


@pytest.mark.parametrize("batch", [20, 70, 300])
@pytest.mark.parametrize("answers", [[FREE], [HOST], [FREE, 0, FREE, HOST, FREE]], ids=str)
def test_right_and_wrong_guesses_forks_and_preemption_change_nothing(
    folder, truth, batch, answers):  # noqa: F811
    early = 0
    for drafts in (Hybrid(0.1, piped=True), OracleDrafts(truth),
                   AdversarialDrafts(truth, 259, EOS)):
        for disturb in (None, preempt_some):
            engine = make(folder, drafts=drafts, max_drafts=16, max_batch_tokens=batch, depth=1,
                          max_sequences=8)
            engine.guessing._short = engine.scheduler.short_row = 8  # all prompts are longer
            always(engine, *answers)
            rows = planned(engine)
            run = Run(engine).put(*asks()).drain(disturb=disturb)
            assert run.tokens == truth and not run.failed and engine.pool.used == 0
            early += sum(row.pending and len(row.draft) > 0 for _, plan in rows for row in plan)
    assert early or answers != [FREE], "what waits for those that are guessed for has none"


def test_a_first_token_that_was_cut_otherwise_makes_the_rest_a_miss(folder, truth):  # noqa: F811
    """The grammar dictates letters; which tokens spell them the model chooses."""

    class Shifted(Hybrid):
        def begin(self, turn, waits):
            draft = super().begin(turn, waits)
            return draft._replace(tokens=draft.tokens[:1] + draft.tokens[2:],
                                  sources=draft.sources[1:])

    engine = make(folder, drafts=Shifted(0.1, piped=True), max_drafts=16, depth=1)
    engine.guessing._short = engine.scheduler.short_row = 8
    engine.guessing._keep = lambda seq, draft, source: (
        setattr(seq, "draft", draft.tokens), setattr(seq, "sources", draft.sources))
    always(engine, HOST)
    rows, run = planned(engine), Run(engine).put(ask())
    assert run.drain().tokens == {("r0", 0): truth["r0", 0]}
    (_, _), (_, (early,)), *_ = rows
    wrong = engine.guessing.verified["forced"] - engine.guessing.matched["forced"]
    assert early.pending and wrong == len(early.draft) > 4


def test_a_step_that_is_too_large_leaves_no_draft_behind(folder, truth):  # noqa: F811
    from engine.runner import StepTooLarge

    engine = make(folder, drafts=Hybrid(0.1, piped=True), max_drafts=16, depth=1)
    engine.guessing._short = engine.scheduler.short_row = 8
    always(engine, HOST)
    launch, failed = engine.runner.launch, []

    def too_large(plan):
        if any(row.pending and row.draft for row in plan.rows):
            failed.append(plan)
            raise StepTooLarge("no room")
        return launch(plan)

    engine.runner.launch = too_large
    assert Run(engine).put(ask()).drain().tokens == {("r0", 0): truth["r0", 0]}
    assert len(failed) == 1


@pytest.mark.parametrize("answers", [[HOST], [FREE], [0, HOST, 2, FREE, ASLEEP]], ids=str)
def test_the_runner_of_a_gpu_reads_the_first_token_where_it_lies(
    folder, truth, answers):  # noqa: F811
    engine = make_device(folder, KnowingChains({n: [3] * 400 for n in range(9)}, 0, DEVICE), True,
                         max_drafts=16, max_batch_tokens=96)
    engine.guessing.host = Hybrid(0.002, piped=True)
    engine.guessing._short = engine.scheduler.short_row = 8  # as of a model with large layers
    always(engine, *answers)
    rows, run = planned(engine), Run(engine)
    for number in (0, 2):
        run.put(ask(number)).drain()
    assert run.tokens == {(f"r{n}", 0): truth[f"r{n}", 0] for n in (0, 2)}
    assert any(row.pending and len(row.draft) > 5 for _, plan in rows for row in plan)


@pytest.mark.parametrize("answers", [[HOST], [FREE], [0, HOST, 2, FREE, ASLEEP]], ids=str)
def test_where_every_size_has_the_same_bits_the_prompts_own_step_verifies_it(
    folder, truth, answers):  # noqa: F811
    engine = make_device(folder, KnowingChains({n: [3] * 400 for n in range(9)}, 0, DEVICE), True,
                         max_drafts=16, max_batch_tokens=96, mixed_tokens=96)
    engine.guessing.host = Hybrid(0.002, piped=True)
    always(engine, *answers)
    rows, run = planned(engine), Run(engine)
    for number in (0, 2, 3):  # of 9, 61 and 100 tokens; the last is two chunks
        run.put(ask(number)).drain()
    assert run.tokens == {(f"r{n}", 0): truth[f"r{n}", 0] for n in (0, 2, 3)}
    ends = [row for _, plan in rows for row in plan if row.last and row.count > 1 + row.drafts]
    assert [(row.count - row.drafts, row.drafts) for row in ends] == [(9, 16), (61, 16), (4, 16)]
    assert not any(row.pending and row.draft for _, plan in rows for row in plan)
    assert engine.guessing.matched["forced"] >= 3 * 16


def test_no_row_of_a_gpu_has_more_drafts_than_leave_it_short(folder):  # noqa: F811
    """In a longer one a token had other bits than by itself, whatever is asked for."""
    engine = make_device(folder, KnowingChains({n: [3] * 400 for n in range(9)}, 0, DEVICE), True,
                         max_drafts=40, max_batch_tokens=96)
    engine.guessing.host = Hybrid(0.002, piped=True)
    rows, run = planned(engine), Run(engine)
    said = run.put(ask(3)).drain().tokens["r3", 0]
    run.put(msgspec.structs.replace(ask(3), id="again", predicted=said)).drain()
    assert run.tokens["again", 0] == said
    longest = max(row.drafts for _, plan in rows for row in plan)
    assert longest <= SHORT - 1 == engine.guessing._most
