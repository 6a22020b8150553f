"""The served proposer where steps may run ahead of it, with the runner of a GPU.  No GPU needed."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from engine.cuda.chaining import Chaining
from engine.cuda.runner import CudaRunner
from engine.cycles import Cycles
from engine.guessing import Guessing
from engine.messages import Sampling, Submit
from engine.proposer import ASLEEP, FREE, HOST
from speculative.hybrid import Hybrid
from tests.captured import KnowingChains
from tests.driver import Run
from tests.speculative.test_captured import DEVICE, folder, make  # noqa: F401


@pytest.fixture
def clock(monkeypatch):
    """A step takes 1 ms, one that waits 2; without a device nobody measures it."""
    ended = Cycles.ended

    def timed(self, flight, of):
        ran = ended(self, flight, of)
        return ran._replace(seconds=2e-3 if ran.alone else 1e-3, chain_s=1e-4 * ran.guesses)

    monkeypatch.setattr(Cycles, "ended", timed)


@pytest.mark.usefixtures("clock")
def test_it_waits_where_guesses_are_good_and_runs_ahead_where_not(folder, monkeypatch):  # noqa: F811
    submits = [Submit(f"r{i}", [(7 * i + j) % 200 for j in range(9)], 45,
                      Sampling(temperature=float(i % 2), seed=i)) for i in range(2)]  # fmt: skip
    wanted = Run(make(folder, None, False)).put(*submits).drain().tokens
    texts = {one.sampling.seed: [*one.prompt, *wanted[one.id, 0]] for one in submits}
    waited = {}
    for name, known in (("right", texts), ("wrong", {i: [3] * 99 for i in range(2)})):
        engine = make(folder, KnowingChains(known, 0, DEVICE), True)
        engine.guessing.host = Hybrid(0.002, (), piped=True)
        chosen, ahead = [], Guessing.ahead

        def noted(self, *given, chosen=chosen, ahead=ahead):
            chosen.append(ahead(self, *given))
            return chosen[-1]

        with monkeypatch.context() as patch:
            patch.setattr(Guessing, "ahead", noted)
            for one in submits:  # alone, as of more each way is tried more seldom
                assert Run(engine).put(one).drain().tokens == {(one.id, 0): wanted[one.id, 0]}
        waited[name] = sum(one > 0 for one in chosen) / len(chosen)
        assert {FREE, ASLEEP} & set(chosen)
    assert waited["right"] > 2 * waited["wrong"] > 0


@pytest.mark.usefixtures("clock")
def test_steps_that_wait_for_the_host_alone_let_the_draft_sleep(folder, monkeypatch):  # noqa: F811
    """And verify what the host guessed, as before."""
    ask = Submit("r", [5, 6, 7, 8] * 12, 40, Sampling(temperature=0.0))
    wanted = Run(make(folder, None, False)).put(ask).drain().tokens
    ask = Submit("r", ask.prompt, 40, ask.sampling, predicted=wanted["r", 0])
    engine = make(folder, KnowingChains({0: [3] * 99}, 0, DEVICE), True)
    engine.guessing.host, slept, drafted = Hybrid(0.002, piped=True), [], []
    monkeypatch.setattr(Hybrid, "ahead", lambda *given: HOST)
    launch = CudaRunner.launch

    def noted(self, plan):
        assert not self._flights, "it waits"
        slept.append(plan.asleep)
        drafted.append(sum(len(row.draft) for row in plan.rows))
        return launch(self, plan)

    monkeypatch.setattr(CudaRunner, "launch", noted)
    assert Run(engine).put(ask).drain().tokens == wanted
    assert all(slept) and sum(drafted) >= 20


def test_a_sleeping_draft_reads_prompts(folder, monkeypatch):  # noqa: F811
    """What it slept through it could never make up for: a prompt is hundreds of tokens."""
    engine = make(folder, KnowingChains({0: [3] * 99}, 0, DEVICE), True)
    engine.guessing.host, staged = Hybrid(0.002, (), piped=True), []
    monkeypatch.setattr(Hybrid, "ahead", lambda *given: ASLEEP)
    stage = Chaining.stage

    def noted(self, plan, *given):
        found = stage(self, plan, *given)
        staged.append((max(row.count for row in plan.rows) > 1, found is not None))
        return found

    monkeypatch.setattr(Chaining, "stage", noted)
    Run(engine).put(Submit("r", [*range(90)], 5, Sampling(temperature=0.0))).drain()
    assert {(True, True), (False, False)} == set(staged)
