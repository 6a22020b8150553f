"""A step that its drafts make too large for the device's buffers.  On a CPU by the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.cuda import runner as cuda_runner
from engine.messages import Submit
from tests.driver import answers
from tests.engine.test_cuda_runner import (
    GREEDY,
    folder,  # noqa: F401
    make,
    prompt,
    truth,  # noqa: F401
)
from tests.proposers import OracleDrafts


def test_guesses_that_make_a_step_too_large_are_dropped_and_nobody_yields(
    folder, truth, monkeypatch  # noqa: F811
):
    """Later ones are shorter, and grow again."""
    asks = [Submit(f"r{i}", prompt(70, i), 60, GREEDY) for i in range(6)]
    known = truth(*asks)
    monkeypatch.setattr(cuda_runner, "SCRATCH", 1)  # so that there is room for one row
    drafts = OracleDrafts(known)
    engine = make(folder, True, max_batch_tokens=160, mixed_tokens=75, drafts=drafts)
    assert engine.config.max_drafts > 8
    monkeypatch.setattr("engine.guessing.RECOVER", 1)
    caps = []
    retreat = engine.guessing.retreat
    engine.guessing.retreat = lambda *seqs: (retreat(*seqs), caps.append(engine.guessing._cap))
    assert answers(engine, *asks) == known
    assert caps and engine.scheduler.preemptions == 0
    assert engine.guessing.accepted > 60 and engine.guessing._cap > min(caps)
