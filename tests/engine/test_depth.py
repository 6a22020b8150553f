"""A loop that launches a step before it has read the one before: the same answers, always.

The CPU runner at depth 1 keeps to a GPU's rule: the host learns a step's tokens by `collect` only.
"""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from engine.guessing import MOST_WAIT
from engine.messages import Abort, Grammar, Pause, Resume, Sampling, Submit
from engine.proposer import FREE
from engine.runner import StepTooLarge
from tests.driver import Run, answers, make
from tests.proposers import RandomHead, Steered
from tests.scripted import EOS
from tests.tiny import write_llama

GREEDY = Sampling(temperature=0.0)
JSON = Grammar('start: %json {"type": "object", "x-guidance": {"whitespace_flexible": false}}')
SHORT = Grammar('start: "<a>" ("yes" | "no" | /[0-9]{1,3}/) "</a>"')
DRAWS = [
    GREEDY,
    Sampling(seed=3),
    Sampling(temperature=0.8, top_p=0.8, top_k=40, seed=4),
    Sampling(temperature=0.7, repetition=1.2, frequency=0.4, presence=0.3, seed=5),
    Sampling(temperature=0.9, bias=((EOS, 9.0),), min_tokens=3, seed=6),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("depth") / "model", max_len=512)


def prompt(length: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(length)]


def mixed(chance: random.Random, count: int) -> list[Submit]:
    """Requests of every kind; many share a prefix, many end at an odd place."""
    return [
        Submit(
            f"m{i}",
            [*prompt(chance.choice([0, 64, 70, 130]), 7), *prompt(chance.randint(1, 40), i)],
            chance.choice([1, 2, 3, *(chance.randint(4, 30) for _ in range(3))]),
            chance.choice(DRAWS),
            n=chance.choice([1, 1, 1, 2, 3]),
            stop_ids=chance.choice([[], [EOS], [EOS, *range(0, 256, 16)]]),
            grammar=chance.choice([None, None, None, JSON, SHORT]),
            priority=chance.choice([0, 0, 1]),
        )
        for i in range(count)
    ]


def watched(engine) -> list[int]:
    """At each launch, how many sequences fly: each of them needs a place on the device."""
    seen: list[int] = []
    launch = engine.runner.launch

    def launched(plan):
        seen.append(sum(seq.flying > 0 for seq in engine.scheduler.running))
        return launch(plan)

    engine.runner.launch = launched
    return seen


class Handled:
    """An engine in the hands of somebody who submits, aborts, pauses and resumes at random."""

    def __init__(self, engine, chance: random.Random, submits: list[Submit]) -> None:
        self.run, self.chance = Run(engine), chance
        self.later = list(reversed(submits))
        self.open = {submit.id: submit for submit in submits}
        self.aborted: set[tuple[str, int]] = set()
        self.paused: set[str] = set()

    def to_the_end(self) -> Run:
        engine = self.run.engine
        for _ in range(4000):
            self.meddle()
            self.run.step()
            if self.later or not engine.inbox.empty():
                continue
            if not engine.busy and not engine.intake.compiling:
                return self.run
        raise AssertionError("not done after 4,000 steps")

    def meddle(self) -> None:
        chance, run = self.chance, self.run
        while self.later and chance.random() < 0.4:
            run.put(self.later.pop())
        name = chance.choice(list(self.open))
        if chance.random() < 0.03:
            index = chance.choice([-1, 0, 1])
            run.put(Abort(name, index))
            self.aborted |= {(name, i) for i in range(8) if index in (-1, i)}
        if chance.random() < 0.1:
            run.put(Pause(name))
            self.paused.add(name)
        if self.paused and (chance.random() < 0.3 or not self.later):
            run.put(Resume(self.paused.pop()))


@pytest.mark.parametrize("blocks", [9, 14, 256])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_the_answers_are_those_of_depth_0(folder, blocks, seed):
    chance = random.Random(seed)
    submits = mixed(chance, 18)
    expected = answers(make(folder, prefix_caching=False), *submits)
    engine = make(
        folder, depth=1, blocks=blocks, max_batch_tokens=chance.choice([24, 64, 512]),
        mixed_tokens=chance.choice([9, 40]), max_sequences=chance.choice([3, 8, 20]),
    )
    most = watched(engine)
    handled = Handled(engine, chance, submits)
    run = handled.to_the_end()
    assert max(most) <= engine.config.max_sequences
    assert not run.failed and not run.refused
    for submit in submits:
        for key in ((submit.id, index) for index in range(submit.n)):
            if run.finish(key):
                assert run.tokens[key] == expected[key]
            else:
                assert key in handled.aborted, f"{key} never finished"
                assert run.tokens.get(key, []) == expected[key][: len(run.tokens.get(key, []))]
    assert engine.pool.used == 0 and not engine.intake.arrived
    assert engine.scheduler.wasted > 0


def test_a_device_of_depth_1_really_runs_ahead(folder):
    engine = make(folder, depth=1)
    run = Run(engine).put(Submit("r", prompt(20), 9, GREEDY))
    given = []
    for _ in range(4):
        run.step()
        given.append(len(run.tokens.get(("r", 0), [])))
        (seq,) = engine.scheduler.running
        assert (seq.flying, seq.pending) == ((20, 1) if not given[-1] else (1, 1))
    assert given == [0, 1, 2, 3]
    run.drain()
    assert run.tokens == answers(make(folder), Submit("r", prompt(20), 9, GREEDY))
    assert engine.scheduler.wasted == 0  # max_tokens is known ahead: nothing is computed in vain


def test_a_stop_that_nobody_could_foresee_costs_one_row(folder):
    ask = Submit("r", prompt(20), 30, GREEDY)
    text = answers(make(folder), ask)["r", 0]
    stop = text[6]
    ask = Submit("r", prompt(20), 30, GREEDY, stop_ids=[stop])
    engine = make(folder, depth=1)
    assert answers(engine, ask)["r", 0] == text[: text.index(stop) + 1]
    assert engine.scheduler.wasted == 1


@pytest.mark.timed
def test_the_loop_sleeps_only_when_nothing_flies(folder):
    engine = make(folder, depth=1)
    run = Run(engine).put(Submit("r", prompt(20), 50, GREEDY))
    run.step()
    run.put(Pause("r"))
    started = time.monotonic()
    engine.wait(5.0)
    run.step()
    engine.wait(5.0)  # the paused request's step may have been read by now, or fly
    run.step()
    assert time.monotonic() - started < 4.0
    assert len(run.tokens["r", 0]) == 1
    (seq,) = engine.scheduler.running
    assert not seq.flying and not seq.pending
    started = time.monotonic()
    engine.wait(0.05)
    assert time.monotonic() - started > 0.04
    run.put(Resume("r")).drain()


@pytest.mark.parametrize("steps", range(1, 6))
def test_an_abort_with_a_step_out_gives_everything_back(folder, steps):
    engine = make(folder, depth=1)
    run = Run(engine).put(Submit("r", prompt(100), 50, Sampling(seed=1), n=3))
    for _ in range(steps):
        run.step()
    run.put(Abort("r"))
    run.step()
    assert engine.pool.used == 0 and not engine.intake.arrived and not engine.busy
    assert engine.scheduler.wasted > 0 and not engine.runner._last
    after = Submit("after", prompt(100), 12, GREEDY)
    assert answers(engine, after) == answers(make(folder), after)


def test_blocks_that_a_wasted_row_still_writes_to_serve_their_next_owner(folder):
    """The pool has room for one of them only, so each takes over what the one before it had."""
    asks = [Submit(f"r{i}", prompt(150, i), 40, Sampling(seed=i)) for i in range(6)]
    expected = answers(make(folder, prefix_caching=False), *asks)
    engine = make(folder, depth=1, blocks=4, prefix_caching=False)
    run = Run(engine)
    for number, ask in enumerate(asks):
        run.put(ask)
        for _ in range(3 + number):
            run.step()
        run.put(Abort(ask.id))
    run.drain()
    assert engine.scheduler.wasted > 0
    assert answers(engine, *asks) == expected


def test_a_flying_sequence_is_never_preempted_and_the_next_plan_waits(folder):
    asks = [Submit(f"r{i}", prompt(60, i), 90, GREEDY) for i in range(4)]
    engine = make(folder, depth=1, blocks=8, prefix_caching=False)
    short = []
    run = Run(engine).put(*asks)
    while engine.busy or not engine.inbox.empty():
        run.step()
        short.append(engine.scheduler.short)
    assert any(short) and engine.scheduler.preemptions > 0
    assert run.tokens == answers(make(folder, prefix_caching=False), *asks)


def test_who_flies_keeps_a_place_on_the_device_though_paused_or_behind_a_resumed_one(folder):
    engine = make(folder, depth=1, max_sequences=2)
    most = watched(engine)
    asks = [Submit(f"r{i}", prompt(20, i), 30, GREEDY) for i in range(4)]
    run = Run(engine).put(*asks[:3])
    for message in (Pause("r0"), Pause("r1"), asks[3], Resume("r0"), Resume("r1"), Pause("r3")):
        for _ in range(3):
            run.step()
        run.put(message)
    run.step()
    run.put(Resume("r3")).drain()
    assert set(most) <= {1, 2} and len(engine.scheduler.running) == 0
    assert run.tokens == answers(make(folder), *asks)


def test_drafts_of_the_device_keep_the_loop_at_depth_0(folder):
    ask = Submit("r", prompt(30), 20, GREEDY)
    expected = answers(make(folder), ask)
    engine = make(folder, depth=1, head=RandomHead(64, 259, (0, 1)), max_drafts=4)
    assert engine.runner.depth == 0
    assert answers(engine, ask) == expected


@pytest.mark.parametrize("way", ["free", "waits", "either"])
def test_all_wait_for_drafts_of_the_host_or_all_run_ahead(folder, way):
    asks = [Submit(name, prompt(30, i), 40, GREEDY) for i, name in enumerate("dp")]
    expected, chance = answers(make(folder), *asks), random.Random(2)
    known = {key: tokens for key, tokens in expected.items() if key[0] == "d"}
    host = Steered(known, {"free": lambda: FREE, "waits": lambda: 0,
                           "either": lambda: chance.choice([FREE, FREE, 0])}[way])  # fmt: skip
    engine = make(folder, depth=1, drafts=host, max_drafts=4)
    said, pending, ahead = [0], [], engine.guessing.ahead

    def noted(plan, scheduler):
        for row in plan.rows:
            # Only behind a prompt something is guessed before it is known what is drawn there.
            assert not row.pending or (said[-1] == FREE and (not row.draft or row.start == 30))
            pending.append(row.pending > 0)
        said.append(ahead(plan, scheduler))
        return said[-1]

    engine.guessing.ahead = noted
    assert answers(engine, *asks) == expected
    if way == "free":  # two at once: nobody is asked for, or looked at until one is left alone
        # Known are the prompts, and the token behind what was guessed behind one.
        assert sum(pending) == len(pending) - 3 and not host.asked and len(host.looks) <= 1
    else:
        assert engine.guessing.matched["oracle"] > 10 and 2 in host.asked
        # Each one's last token may run ahead: no draft fits before it.
        assert sum(pending) <= 2 if way == "waits" else sum(pending) > 20


@pytest.mark.parametrize(("worth", "count"), [(0.0, 1), (2.0, 1), (0.0, 2)])
def test_one_that_is_alone_is_looked_at_less_and_less_where_nothing_is_found(folder, worth, count):
    asks = [Submit(f"r{i}", prompt(30, i), 200, GREEDY) for i in range(count)]
    host = Steered({}, lambda: FREE, worth)
    assert answers(make(folder, depth=1, drafts=host), *asks) == answers(make(folder), *asks)
    gaps = [after - before for before, after in itertools.pairwise(host.looks)]
    assert not host.asked and (count == 1 or not host.looks)
    if worth:
        assert len(gaps) > 190 and set(gaps) == {1}
    elif count == 1:
        assert gaps == sorted(gaps) and gaps[:2] == [2, 4] and gaps[-5:] == [MOST_WAIT + 1] * 5


# ---- a step that the device has no room for ------------------------------------------------------


class Cramped:
    """Makes a phase of a runner raise as long as a plan has more than so many tokens or rows."""

    def __init__(self, runner, phase: str, error: Exception, *, tokens=10**9, rows=10**9) -> None:
        self.runner, self.error, self.tokens, self.rows = runner, error, tokens, rows
        self.raised = 0
        self.phase = {"launch": "forward", "settle": "logits"}[phase]
        self.real = getattr(runner.model, self.phase)
        self.plan = None
        launch = runner.launch

        def seen(plan):
            self.plan = plan
            return launch(plan)

        runner.launch = seen
        setattr(runner.model, self.phase, self)

    def __call__(self, *args):
        if self.plan.tokens > self.tokens or len(self.plan.rows) > self.rows:
            self.raised += 1
            raise self.error
        return self.real(*args)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("phase", ["launch", "settle"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), StepTooLarge("small")])
def test_a_step_without_room_is_made_smaller_and_loses_nothing(folder, depth, phase, error):
    chance = random.Random(5)
    asks = mixed(chance, 12)
    expected = answers(make(folder, prefix_caching=False), *asks)
    engine = make(folder, depth=depth)
    cramped = Cramped(engine.runner, phase, error, rows=4)
    run = Run(engine)
    for ask in asks:
        run.put(ask)
        run.step()
    run.drain()
    assert cramped.raised > 0 and not run.failed
    assert run.tokens == expected
    assert engine.pool.used == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_never_fits_ends_alone_with_a_typed_error(folder, depth):
    engine = make(folder, depth=depth, max_batch_tokens=512, mixed_tokens=400)
    Cramped(engine.runner, "launch", torch.OutOfMemoryError("full"), tokens=100)
    good = Submit("good", prompt(20), 30, GREEDY)
    run = Run(engine).put(good)
    for _ in range(3):
        run.step()
    run.put(Submit("huge", prompt(300), 4, GREEDY)).drain()
    assert run.failed["huge"].code == "engine_overloaded"
    assert run.tokens["good", 0] == answers(make(folder), good)["good", 0]
    assert engine.pool.used == 0 and not engine.intake.arrived


def test_ten_thousand_random_aborts_leave_the_pool_full_at_depth_1(folder):
    engine = make(
        folder, depth=1, blocks=24, max_batch_tokens=96, mixed_tokens=32, max_sequences=6
    )
    chance = random.Random(4)
    run = Run(engine)
    alive: list[str] = []
    aborts = number = 0
    while aborts < 10_000:
        while len(alive) < 60:
            number += 1
            alive.append(f"q{number}")
            run.put(
                Submit(
                    f"q{number}", prompt(chance.randint(1, 300), chance.randrange(5)),
                    chance.randint(1, 40), Sampling(seed=number), n=chance.choice([1, 1, 2, 3]),
                    stop_ids=[EOS], grammar=chance.choice([None, None, None, JSON]),
                    priority=chance.choice([0, 0, 1]),
                )
            )
        for _ in range(chance.randint(20, 55)):
            name = alive.pop(chance.randrange(len(alive)))
            run.put(Abort(name, chance.choice([-1, -1, 0, 1])), Abort(name))
            aborts += 1
        for _ in range(chance.choice([1, 1, 2])):
            run.step()
    run.put(*(Abort(name) for name in alive)).drain()
    assert engine.pool.used == 0 and not engine.intake.arrived and not engine.runner._last
    assert engine.pool.free_count + engine.pool.cached == engine.pool.total
    assert answers(engine, Submit("after", prompt(200), 20, GREEDY))["after", 0]
