"""A row's bits on the CPU, in bf16: the same alone, before drafts and beside other sequences."""

from __future__ import annotations

import random

import pytest
import torch

from cache.config import CacheConfig
from engine.batch import Batch
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loop import Engine

pytestmark = pytest.mark.model
BLOCK, EACH = 64, 4  # tokens a block, blocks a sequence
SEQUENCES, PROMPT = 3, 100


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(model="smollm2", device="cpu", cache=CacheConfig(blocks=32))
    made = Engine(config, open_checkpoint("smollm2"))
    made.runner.pages.data.zero_()
    for sequence in range(SEQUENCES):
        forward(made, {sequence: drawn(PROMPT, sequence)}, 0)
    return made


def drawn(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000, 40_000) for _ in range(count)]


def forward(engine, rows: dict[int, list[int]], start: int) -> dict[int, torch.Tensor]:
    """[tokens, vocab] logits of each sequence's tokens, which stand from `start` on."""
    runner = engine.runner
    flat, positions, slots, tables = [], [], [], []
    for sequence, tokens in rows.items():
        table = [1 + sequence * EACH + i for i in range(EACH)]
        ends = range(start, start + len(tokens))
        flat += tokens
        positions += ends
        slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in ends]
        tables.append(table[: (start + len(tokens) - 1) // BLOCK + 1])
    counts = [len(tokens) for tokens in rows.values()]
    ints = torch.tensor
    batch = Batch(ints(flat), ints(positions), ints(slots), [start] * len(rows), counts, tables,
                  torch.arange(len(flat)), counts)  # fmt: skip
    runner.attention.prepare(batch)
    with torch.inference_mode():
        hidden = runner.model.forward(batch, runner.pages.data, runner.attention)
        logits = runner.model.logits(hidden.last)
    return dict(zip(rows, logits.split(counts), strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_of_a_row_do_not_know_its_drafts_nor_its_neighbours(engine, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(3):
            tokens = {i: drawn(16, 100 * seed + i) for i in range(SEQUENCES)}
            alone = forward(engine, {0: tokens[0][:1]}, PROMPT)[0][0]
            for count in (2, 3, 9, 16):  # across a block's edge, too
                beside = forward(engine, {0: tokens[0][:count]}, PROMPT)[0][0]
                assert torch.equal(alone, beside), f"{count} rows"
            crowd = {i: tokens[i][: 1 + 5 * i] for i in range(SEQUENCES)}
            assert torch.equal(alone, forward(engine, crowd, PROMPT)[0][0])
    finally:
        torch.set_num_threads(before)


def test_a_lone_row_needs_its_twin_where_the_library_says_so(engine) -> None:
    layers = engine.runner.model.layers
    if not layers[0].down.differs_alone:
        pytest.skip("this machine's library gives a lone row the same bits")
    tokens = drawn(2, 5)
    right = forward(engine, {0: tokens}, PROMPT)[0][0]
    assert torch.equal(forward(engine, {0: tokens[:1]}, PROMPT)[0][0], right)
    for layer in layers:
        layer.down.differs_alone = False
    try:
        found = [torch.equal(forward(engine, {0: drawn(1, s)}, PROMPT)[0][0],
                             forward(engine, {0: drawn(2, s)}, PROMPT)[0][0]) for s in range(6)]
    finally:
        for layer in layers:
            layer.down.differs_alone = True
    assert not all(found)
