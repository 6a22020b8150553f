"""A small target that can be learned, and shards of its own answers, for tests.  Trains nothing."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from engine.checkpoint import open_checkpoint
from engine.messages import Sampling, Submit
from speculative.train import shards
from speculative.train.optimise import Recipe
from speculative.train.shards import Entry, Run
from speculative.train.target import Target
from speculative.train.unroll import head_config
from tests.driver import answers, make
from tests.tiny import llama_tensors, write_llama, write_weights

VOCAB = 259
LAYERS = 8


def target_folder(folder: Path, damping: float = 0.05) -> Path:
    """Its layers add little to the residual, so that what comes next hangs mostly on one token."""
    write_llama(folder, layers=LAYERS, max_len=1024)
    tensors = llama_tensors(layers=LAYERS, hidden=64, q_rows=64, kv_rows=32, intermediate=128,
                            vocab=VOCAB, tied=True, seed=0)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.mul_(damping)
    write_weights(folder, {name: value.float() for name, value in tensors.items()})
    return folder


def fill(
    model: Path, folder: Path, *, count: int, length: int = 80, prompt: int = 6, held_every: int = 8
) -> Run:
    """Two shards of `count` answers each by our engine; every `held_every`-th is held out."""
    checkpoint = open_checkpoint(str(model))
    run = Run(str(model), checkpoint.fingerprint.hex(), VOCAB, 0, count, 256)
    shards.begin(folder, run)
    noise = torch.Generator().manual_seed(5)
    engine = make(model, speculative="off")
    for shard in range(2):
        asked = []
        for number in range(shard * count, (shard + 1) * count):
            ids = torch.randint(0, 256, (prompt,), generator=noise).tolist()
            heat = (0.0, 0.7, 1.0)[number % 3]
            asked.append(Submit(str(number), ids, max_tokens=length - prompt, drafts="off",
                                sampling=Sampling(temperature=heat, seed=(1 << 40) + number)))
        said = answers(engine, *asked)
        found = []
        for one in asked:
            ids = one.prompt + said[one.id, 0]
            number = int(one.id)
            domain = ("chat", "tool")[number // held_every % 2]
            entry = Entry(number, prompt, len(ids), domain, one.sampling.temperature,
                          number % held_every == 0, "", one.sampling.seed)
            found.append((entry, ids))
        shards.write(folder, shard, VOCAB, found)
    engine.close()
    return run


def open_target(model: Path, length: int, dtype: torch.dtype = torch.float64) -> Target:
    """Its weights, for features and distributions."""
    checkpoint = open_checkpoint(str(model))
    config = head_config(checkpoint.config, VOCAB)
    return Target(checkpoint, config.taps, length, dtype, torch.device("cpu"))


RECIPE = Recipe(steps=200, rows=3, length=256, unroll=3, rate=1e-2, hybrid=1.0, decay=0.0)


def chance(vocab: int = VOCAB) -> float:
    """Nats of knowing nothing."""
    return math.log(vocab)


class ShortAsker:
    """Prompts of a few bytes, so that a tiny model's context holds them; an Asker."""

    markers = ('{"name"',)

    def __init__(self, checkpoint) -> None:
        self.asked: list[int] = []

    def __call__(self, asked):
        self.asked += [one.number for one in asked]
        return [(list(f"{one.domain} {one.number}".encode()), None) for one in asked]


class Clock:
    """Seconds that pass when one looks: `each` a step of a planned training, which looks twice."""

    def __init__(self, each: float) -> None:
        self.now, self.each = 0.0, each

    def __call__(self) -> float:
        self.now += self.each / 2
        return self.now
