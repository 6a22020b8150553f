"""The served proposer where steps may run ahead of it, with the runner of a GPU.  No GPU needed."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from engine.cuda.runner import CudaRunner
from engine.guessing import Guessing
from engine.messages import Sampling, Submit
from engine.proposer import ASLEEP, FREE
from speculative.hybrid import Hybrid
from tests.captured import KnowingChains
from tests.driver import Run
from tests.speculative.test_captured import DEVICE, folder, make  # noqa: F401


@pytest.fixture
def clock(monkeypatch):
    """Steps have a length, which without a device nobody measures, and each a thousandth of it."""
    ticks = itertools.count()
    monkeypatch.setattr("engine.cycles.time.perf_counter", lambda: next(ticks) * 1e-3)
    read = CudaRunner._read

    def timed(self, flight) -> None:
        read(self, flight)
        flight.seconds = 1e-3

    monkeypatch.setattr(CudaRunner, "_read", timed)


@pytest.mark.usefixtures("clock")
def test_it_waits_where_guesses_are_good_and_runs_ahead_where_not(folder, monkeypatch):  # noqa: F811
    """Waiting costs nothing by this clock: right chains are all that decides."""
    submits = [Submit(f"r{i}", [(7 * i + j) % 200 for j in range(9)], 70,
                      Sampling(temperature=float(i % 2), seed=i)) for i in range(3)]  # fmt: skip
    wanted = Run(make(folder, None, False)).put(*submits).drain().tokens
    texts = {one.sampling.seed: [*one.prompt, *wanted[one.id, 0]] for one in submits}
    waited = {}
    for name, known in (("right", texts), ("wrong", {i: [3] * 99 for i in range(3)})):
        engine = make(folder, KnowingChains(known, 0, DEVICE), True)
        engine.guessing.host = Hybrid(0.002, (), piped=True)
        chosen, ahead = [], Guessing.ahead

        def noted(self, *given, chosen=chosen, ahead=ahead):
            chosen.append(ahead(self, *given))
            return chosen[-1]

        with monkeypatch.context() as patch:
            patch.setattr(Guessing, "ahead", noted)
            assert Run(engine).put(*submits).drain().tokens == wanted
        waited[name] = sum(one > 0 for one in chosen) / len(chosen)
        assert {FREE, ASLEEP} & set(chosen)
    assert waited["right"] > 0.5 > 2 * waited["wrong"] > 0
