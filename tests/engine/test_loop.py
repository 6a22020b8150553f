"""The engine's loop: admission, aborts, deadlines, forks, sessions, fairness.  Not exactness."""

from __future__ import annotations

import random
import time

import pytest

from engine.messages import (
    Abort,
    Grammar,
    Pause,
    Resume,
    Sampling,
    Submit,
    TurnEnd,
)
from engine.proposer import FREE
from tests.driver import Run, answers, make
from tests.proposers import OracleDrafts, RandomDrafts, Steered
from tests.scripted import EOS
from tests.tiny import write_llama

GREEDY = Sampling(temperature=0.0)
JSON = Grammar('start: %json {"type": "object"}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("loop") / "model", max_len=512)


def prompt(length: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(length)]


def test_ten_thousand_random_aborts_leave_the_pool_full(folder):
    engine = make(
        folder, blocks=24, drafts=RandomDrafts(259, 7), max_drafts=3, max_batch_tokens=96,
        mixed_tokens=32, max_sequences=6,
    )
    chance = random.Random(3)
    run = Run(engine)
    alive: list[str] = []
    aborts = number = 0
    while aborts < 10_000:
        while len(alive) < 60:
            number += 1
            name = f"q{number}"
            alive.append(name)
            run.put(
                Submit(
                    name, prompt(chance.randint(1, 300), chance.randrange(5)),
                    chance.randint(1, 40), Sampling(seed=number), n=chance.choice([1, 1, 2, 3]),
                    stop_ids=[EOS], session=chance.choice([None, b"s" * 16, b"t" * 16]),
                    grammar=chance.choice([None, None, None, JSON]),
                    priority=chance.choice([0, 0, 1]),
                )
            )
        for _ in range(chance.randint(20, 55)):
            name = alive.pop(chance.randrange(len(alive)))
            run.put(Abort(name, chance.choice([-1, -1, 0, 1])))
            if chance.random() < 0.7:
                run.put(Abort(name))
            aborts += 1
        if chance.random() < 0.2:
            run.put(TurnEnd(b"s" * 16, chance.random() < 0.5))
        run.step()
    for name in [f"q{i}" for i in range(1, number + 1)]:
        run.put(Abort(name))
    run.drain()
    assert engine.pool.used == 0
    assert engine.pool.free_count + engine.pool.cached == engine.pool.total
    assert not engine.intake.arrived and not engine.intake.compiling
    assert answers(engine, Submit("after", prompt(200), 20, GREEDY))["after", 0]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_aborted_leader_leaves_its_other_choices_running(folder, depth):
    engine = make(folder, depth=depth, max_batch_tokens=16)
    run = Run(engine).put(Submit("r", prompt(100), 8, Sampling(seed=4), n=3))
    run.step()
    run.put(Abort("r", 0)).drain()
    assert ("r", 0) not in run.tokens
    assert run.finish(("r", 1)) == run.finish(("r", 2)) == "length"
    alone = answers(make(folder), Submit("r", prompt(100), 8, Sampling(seed=4), n=3))
    assert run.tokens == {key: alone[key] for key in (("r", 1), ("r", 2))}


def test_choices_fork_after_one_prefill(folder):
    engine = make(folder)
    run = Run(engine).put(Submit("r", prompt(150), 5, Sampling(seed=4), n=4))
    run.step()
    assert len(engine.scheduler.running) == 4
    assert [seq.computed for seq in engine.scheduler.running[1:]] == [149] * 3
    first, *others = engine.scheduler.running
    assert all(seq.blocks[:2] == first.blocks[:2] for seq in others)
    assert len({seq.blocks[2].id for seq in engine.scheduler.running}) == 4
    run.drain()


@pytest.mark.parametrize(
    "bad, code",
    [
        ({"prompt": prompt(500), "max_tokens": 13}, "context_length_exceeded"),
        ({"prompt": [1, 2, 259]}, "invalid_token"),
        ({"prompt": [1, -2]}, "invalid_token"),
        ({"prompt": []}, "invalid_value"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"n": 0}, "invalid_value"),
        ({"grammar": Grammar("start: (")}, "invalid_schema"),
    ],
)
def test_what_can_never_run_is_refused_and_nothing_is_kept(folder, bad, code):
    engine = make(folder)
    fields = {"id": "r", "prompt": [1, 2], "max_tokens": 4, **bad}
    run = Run(engine).put(Submit(**fields)).drain()
    assert run.refused["r"].code == code
    assert len(run.refused["r"].message) > 20
    assert not engine.intake.arrived and engine.pool.used == 0


def test_an_id_that_is_running_is_refused_and_the_first_goes_on(folder):
    engine = make(folder)
    run = Run(engine).put(Submit("r", [1], 6, GREEDY), Submit("r", [2], 6, GREEDY)).drain()
    assert run.refused["r"].code == "duplicate_request"
    assert len(run.tokens["r", 0]) == 6


@pytest.mark.parametrize("depth", [0, 1])
def test_a_deadline_ends_what_runs_and_what_waits(folder, depth):
    engine = make(folder, depth=depth, max_sequences=1)
    late = Submit("late", prompt(10), 400, GREEDY, deadline_s=0.05)
    queued = Submit("queued", prompt(10, 2), 400, GREEDY, deadline_s=0.05)
    run = Run(engine).put(late, queued, Submit("free", prompt(10, 3), 5, GREEDY))
    run.step()
    time.sleep(0.06)
    run.drain()
    assert {run.failed[name].code for name in ("late", "queued")} == {"deadline_exceeded"}
    assert run.finish(("free", 0)) == "length"
    assert engine.pool.used == 0


def test_a_new_prompt_never_stalls_a_running_stream(folder):
    engine = make(folder, max_batch_tokens=64, mixed_tokens=16)
    run = Run(engine).put(*(Submit(f"r{i}", [i + 1], 60, GREEDY) for i in range(3)))
    run.step()
    run.step()
    run.put(Submit("long", prompt(300), 4, GREEDY))
    while not run.tokens.get(("long", 0)):
        before = {key: len(tokens) for key, tokens in run.tokens.items()}
        computed = {seq.key: seq.computed for seq in engine.scheduler.running}
        run.step()
        for key, count in before.items():
            if key[0] != "long":
                assert len(run.tokens[key]) == count + 1, "a stream missed a step"
        for seq in engine.scheduler.running:
            if seq.key == ("long", 0):
                assert seq.computed - computed.get(seq.key, 0) <= 16
    run.drain()


def test_short_prompts_pass_long_ones_but_nobody_waits_for_ever(folder):
    engine = make(folder, max_batch_tokens=32, max_sequences=1)
    run = Run(engine).put(
        Submit("long", prompt(400), 2, GREEDY), Submit("short", prompt(8, 2), 2, GREEDY)
    )
    run.drain()
    order = list(run.tokens)
    assert order == [("short", 0), ("long", 0)]
    run.put(Submit("old", prompt(400, 5), 2, GREEDY))
    run.step()
    old = engine.scheduler.find("old")[0]
    new = Submit("new", prompt(8, 6), 2, GREEDY)
    # A second later: longer than the prompt is worth.
    engine.intake.arrived["new"] = old.arrival_s + 1.0
    engine.intake._start(new, None)
    assert engine.scheduler.find("old")[0].order < engine.scheduler.find("new")[0].order
    run.drain()


def test_logprobs_are_the_targets_with_and_without_drafts(folder):
    ask = Submit("a", prompt(40), 25, Sampling(temperature=0.8, seed=3, logprobs=3))
    plain = Run(make(folder)).put(ask).drain()
    known = dict(plain.tokens)
    drafted = Run(make(folder, drafts=OracleDrafts(known), max_drafts=5)).put(ask).drain()
    flat = [[e for out in run.outs["a", 0] for e in out.logprobs] for run in (plain, drafted)]
    assert len(flat[0]) == len(flat[1]) == 25
    for one, two in zip(*flat, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=1e-9)
        assert [i for i, _ in one.top] == [i for i, _ in two.top]
    assert len(drafted.outs["a", 0]) < 25


@pytest.mark.parametrize("depth", [0, 1])
def test_a_choice_without_a_legal_token_fails_alone(folder, monkeypatch, depth):
    engine = make(folder, depth=depth)
    fill = type(engine._masks).fill

    def close(self, requests, *given):
        masks = fill(self, requests, *given)
        for row, state, _ in requests:
            if state.steps == 3:
                masks[row] = 0
        return masks

    monkeypatch.setattr(type(engine._masks), "fill", close)
    run = Run(engine).put(
        Submit("bad", prompt(9), 30, GREEDY, grammar=JSON), Submit("good", prompt(9, 2), 30, GREEDY)
    ).drain()
    assert run.failed["bad"].code == "grammar_failed"
    assert run.finish(("good", 0)) == "length" and engine.pool.used == 0
    assert engine._compiler.cached(JSON) is None, "what broke is not given to the next request"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failing_choice_takes_its_request_along_and_nothing_else(folder, monkeypatch, depth):
    """Its other choice has a row in the same step, on a block's edge."""
    engine = make(folder, depth=depth)
    fill = type(engine._masks).fill

    def close(self, requests, *given):
        masks = fill(self, requests, *given)
        if requests and requests[0][1].steps == 4:
            masks[requests[0][0]] = 0
        return masks

    monkeypatch.setattr(type(engine._masks), "fill", close)
    bad = Submit("bad", prompt(59), 30, Sampling(seed=2), n=2, grammar=JSON)
    run = Run(engine).put(bad, Submit("good", prompt(9, 2), 30, GREEDY)).drain()
    assert run.failed["bad"].code == "grammar_failed"
    assert run.finish(("good", 0)) == "length" and engine.pool.used == 0
    assert not engine.intake.arrived


def test_a_grammar_that_breaks_the_compiler_is_refused(folder, monkeypatch):
    engine = make(folder)

    def panic(grammar):
        raise BaseException("panic")

    monkeypatch.setattr(engine._compiler, "_compile", panic)
    run = Run(engine).put(Submit("r", [1], 4, grammar=Grammar('start: "a"'))).drain()
    assert run.refused["r"].code == "grammar_failed" and not engine.intake.arrived


def test_a_known_grammar_does_not_wait_for_the_pool(folder):
    engine = make(folder)
    answers(engine, Submit("a", prompt(5), 4, GREEDY, grammar=JSON))
    run = Run(engine).put(Submit("b", prompt(5), 4, GREEDY, grammar=JSON))
    run.step()
    assert run.tokens["b", 0] and not engine.intake.compiling
    run.drain()


def test_an_id_that_comes_back_while_its_first_grammar_compiles_runs_the_second_prompt(folder):
    engine = make(folder)
    first = Submit("r", prompt(5), 4, GREEDY, grammar=Grammar('start: "first"'))
    second = Submit("r", prompt(6), 6, GREEDY, grammar=Grammar('start: "second"'))
    run = Run(engine).put(first, Abort("r"), second).drain()
    assert bytes(run.tokens["r", 0]) == b"second"


def test_drafts_never_take_a_stream_or_a_prompt_its_share(folder):
    engine = make(
        folder, max_batch_tokens=40, mixed_tokens=16, max_sequences=12, max_drafts=8,
        drafts=RandomDrafts(259, 5),
    )
    run = Run(engine).put(*(Submit(f"r{i}", [i + 1], 60, GREEDY) for i in range(10)))
    run.step()
    run.step()
    run.put(Submit("late", prompt(160), 2, GREEDY))
    for _ in range(12):
        before = {key: len(tokens) for key, tokens in run.tokens.items()}
        plans = []
        engine.runner.launch = _spy(engine.runner.launch, plans)
        run.step()
        assert plans[0].tokens <= 40
        assert all(len(run.tokens[key]) > count for key, count in before.items())
        del engine.runner.launch
        if ("late", 0) in run.tokens:
            break
    assert ("late", 0) in run.tokens  # 160 tokens at 16 a step: drafts have not starved it
    run.drain()


def _spy(launch, plans):
    def seen(plan):
        plans.append(plan)
        return launch(plan)

    return seen


@pytest.mark.parametrize("depth", [0, 1])
def test_a_paused_request_keeps_its_pages_and_gets_no_rows(folder, depth):
    alone = answers(make(folder), Submit("slow", prompt(70), 30, GREEDY))
    engine = make(folder, depth=depth, max_sequences=1)
    run = Run(engine).put(Submit("slow", prompt(70), 30, GREEDY))
    for _ in range(5):
        run.step()
    held = engine.pool.used
    run.put(Pause("slow"), Submit("other", prompt(9, 2), 6, GREEDY))
    before = len(run.tokens["slow", 0]) + depth  # what flew when the pause came still lands
    for _ in range(10):
        run.step()
    assert len(run.tokens["slow", 0]) == before and engine.pool.used == held
    assert run.finish(("other", 0)) == "length"  # its slot was free for somebody else
    started = time.monotonic()
    engine.wait(0.05)  # nothing can run: no spinning
    assert time.monotonic() - started > 0.04
    run.put(Resume("slow")).drain()
    assert run.tokens["slow", 0] == alone["slow", 0] and not engine.scheduler.paused


@pytest.mark.parametrize("depth", [0, 1])
def test_a_fork_that_is_paused_before_its_first_step_still_gets_its_copy(folder, depth):
    ask = Submit("r", prompt(90), 8, Sampling(seed=4), n=2)
    engine = make(folder, depth=depth)
    run = Run(engine).put(ask)
    while len(engine.scheduler.running) < 2:
        run.step()
    run.put(Pause("r"))
    for _ in range(3):  # steps without a row
        run.step()
    run.put(Resume("r")).drain()
    assert run.tokens == answers(make(folder), ask)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_paused_request_lends_its_blocks_to_those_that_wait(folder, depth):
    alone = answers(make(folder), Submit("slow", prompt(200), 20, GREEDY))
    engine = make(folder, depth=depth, blocks=8)
    run = Run(engine).put(Submit("slow", prompt(200), 20, GREEDY))
    run.step()
    run.put(Pause("slow"), Submit("big", prompt(400, 2), 4, GREEDY))
    for _ in range(12):
        run.step()
    assert run.finish(("big", 0)) == "length"
    run.put(Resume("slow"), Pause("unknown")).drain()
    assert run.tokens["slow", 0] == alone["slow", 0] and not engine.scheduler.paused


def test_a_stop_id_inside_an_accepted_run_ends_it_there(folder):
    ask = Submit("a", prompt(30), 30, GREEDY)
    free = answers(make(folder), ask)["a", 0]
    stop = free[10]
    cut = free[: free.index(stop) + 1]
    ask = Submit("a", prompt(30), 30, GREEDY, stop_ids=[stop])
    engine = make(folder, drafts=OracleDrafts({("a", 0): free}), max_drafts=8)
    run = Run(engine).put(ask).drain()
    assert run.tokens["a", 0] == cut
    assert run.outs["a", 0][-1].stopped and run.finish(("a", 0)) == "stop"


@pytest.mark.parametrize("ahead", [0, FREE])
def test_only_a_lone_step_that_is_waited_for_leaves_the_device_exposed(folder, ahead):
    """Then replies are told behind the next launch; in every other case at once."""
    engine = make(folder, drafts=Steered({}, lambda: ahead), depth=1)
    launched: list[bool] = []
    engine.meanwhile = lambda: launched.append(engine.busy)
    run = Run(engine).put(Submit("a", prompt(9), 6, GREEDY))
    seen = []
    while not run.finish(("a", 0)):
        run.step()
        seen.append(engine.exposed)
    assert seen[-1] is False and launched and all(launched)
    assert sum(seen) == (4 if ahead == 0 else 0)  # behind the last but one nobody takes a draft
    run.put(*(Submit(name, prompt(9), 6, GREEDY) for name in "bc"))
    while not (run.finish(("b", 0)) and run.finish(("c", 0))):
        run.step()
        assert not engine.exposed
