"""Closing plans with the GPU's runner: its newest token and its counts are the host's.

On a CPU by Triton's interpreter.  Everything else of closing plans is test_closing_loop.py's.
"""

from __future__ import annotations

import json
import os
from random import Random

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import engine.build as build  # noqa: E402
from cache.config import CacheConfig  # noqa: E402
from engine.checkpoint import open_checkpoint  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.cuda.runner import CudaRunner  # noqa: E402
from engine.loop import Engine  # noqa: E402
from engine.messages import Grammar, Sampling, Submit  # noqa: E402
from tests.driver import Run  # noqa: E402
from tests.proposers import OracleDrafts  # noqa: E402
from tests.scripted import EOS  # noqa: E402
from tests.tiny import write_llama  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "c": {"type": "string"},
        "d": {"enum": ["mo", "tu", "we"]},
    },
    "required": ["c", "d"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Grammar(f"start: %json {json.dumps(SCHEMA)}")
SHORTEST = len('{"c":"","d":"mo"}')
DRAWS = [
    Sampling(seed=11, logprobs=2),
    Sampling(temperature=0.7, repetition=1.3, frequency=0.4, presence=0.3, seed=13),
    # `m` is drawn first and has no room; were it counted, it could not begin the day.
    Sampling(temperature=0.0, repetition=9.0, frequency=2.0, presence=2.0,
             bias=((ord("m"), 12.0), (ord("t"), 4.0))),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("card") / "model", hidden=32, heads=2, kv_heads=1, head_dim=32,
        intermediate=48, max_len=256, attention_bias=True,
    )


def make(folder, fused: bool, drafts=None) -> Engine:
    """A float32 engine on the CPU's runner, or on the GPU's."""
    config = EngineConfig(
        model=str(folder), dtype="float32", device=DEVICE if fused else "cpu", threads=1,
        cache=CacheConfig(blocks=40), max_sequences=8, max_batch_tokens=64, mixed_tokens=40,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "fused", lambda device: fused)
        patch.setattr(CudaRunner, "compile", lambda *given: None)
        patch.setattr(CudaRunner, "warm", lambda *given: None)
        engine = Engine(config, open_checkpoint(str(folder)), drafts=drafts)
    assert isinstance(engine.runner, CudaRunner) == fused
    return engine


def asks() -> list[Submit]:
    chance = Random(5)
    return [
        Submit(
            f"r{i}", [chance.randrange(256) for _ in range(3 + i)], SHORTEST + i % 2, draw,
            stop_ids=[EOS], grammar=JSON,
        )
        for i, draw in enumerate(DRAWS)
    ]


def ends(run: Run) -> dict:
    assert not run.failed and not run.refused
    return {key: (run.tokens[key], outs[-1].finish, outs[-1].overflow)
            for key, outs in run.outs.items()}


@pytest.fixture(scope="module")
def truth(folder):
    engine = make(folder, False)
    found = {}
    for ask in asks():
        found |= ends(Run(engine).put(ask).drain())
    assert engine.stats().closing_tokens > 2
    assert bytes(found["r2", 0][0]) == b'{"c":"","d":"mo"}'
    return found


@pytest.mark.parametrize("drafts", [False, True])
def test_answers_and_their_ends_are_those_of_the_other_runner(folder, truth, drafts):
    known = {key: tokens for key, (tokens, *_) in truth.items()}
    engine = make(folder, True, OracleDrafts(known, 2) if drafts else None)
    run = Run(engine).put(*asks()).drain()
    assert ends(run) == truth
    assert engine.stats().closing_tokens > 2
    assert engine.scheduler.wasted > 0 or drafts
    for key, outs in run.outs.items():
        if key[0] == "r0":
            assert sum(len(out.logprobs) for out in outs) == len(run.tokens[key])
