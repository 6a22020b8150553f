"""What a step's integers are, whatever lay in the host buffer before.  Runs no kernel.

Steps of rows that decode write only what changed; each is compared with its rows, token by token.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.cuda.plain import plain
from engine.kernels.attention_plan import FEW, LISTED, SHORT, TILES
from engine.messages import Sampling, Submit
from engine.plan import Row
from engine.runner import Masked
from engine.sequence import Sequence
from tests.engine.test_cuda_runner import make
from tests.tiny import write_llama

SIZE, MAX_LEN = 64, 512


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = write_llama(
        tmp_path_factory.mktemp("plain") / "model", hidden=32, heads=2, kv_heads=1, head_dim=32,
        intermediate=32, max_len=MAX_LEN,
    )
    return make(folder, True, blocks=80, max_sequences=100, max_batch_tokens=160).runner


@dataclass
class Staged:
    """A step as the device was told of it."""

    rows: list[Row]
    places: list
    forward: dict
    settle: dict


@torch.inference_mode()
def stage(runner, rows: list[Row]) -> Staged:
    """Send a plan's integers, and read them where the kernels do."""
    places = runner.slots.placed(rows)
    runner.slots.upload()
    first = plain(rows, places, runner.slots, SIZE)
    draw = runner.settling.prepare(rows, places, first)
    staged = runner.forward.stage(rows, places, first)
    runner.settling.stage(draw)
    sent = []
    for half, size in ((runner.forward, staged.size), (runner.settling, draw.size)):
        at = half._buckets[size].layout.device(half._mirror.buffer)
        sent.append({name: values.tolist() for name, values in at.items()})
    return Staged(rows, places, *sent)


def attended(row: Row) -> list[tuple[int, int]]:
    """Start and count of what attention takes for a row: guesses behind a prompt apart."""
    more = len(row.draft)
    if row.count <= SHORT or row.count == 1 + more or not more:
        return [(row.start, row.count)]
    return [(row.start, row.count - more), (row.start + row.count - more, more)]


def check_forward(runner, step: Staged) -> None:
    """Each token is where its row says, and what follows is nobody's."""
    at, flat, lines = step.forward, 0, []
    for row, place in zip(step.rows, step.places, strict=True):
        seq = row.seq
        for start, count in attended(row):
            lines.append((place.slot, flat + start - row.start, start, count))
        ids = [*seq.tokens[row.start : row.position], *row.draft]
        for j in range(row.count):
            position = row.start + j
            block = seq.blocks[position // SIZE].id
            assert at["positions"][flat] == position
            assert at["kv"][flat] == block * SIZE + position % SIZE
            token, origin = (0, place.slot) if row.pending else (ids[j], -1)
            assert (at["tokens"][flat], at["origin"][flat]) == (token, origin)
            flat += 1
    trash = (runner.pages.blocks - 1) * SIZE
    for name, rest in (("tokens", 0), ("origin", -1), ("positions", 0), ("kv", trash)):
        assert set(at[name][flat:]) <= {rest}
    names = "slot", "first", "start", "count"
    assert [*zip(*(at[name][: len(lines)] for name in names), strict=True)] == lines
    for name in names:
        assert not any(at[name][len(lines) :])


def check_items(runner, step: Staged) -> None:
    """The short rows' splits, each once; chunks only where rows are long."""
    at, split = step.forward, runner.forward.limits.split
    (total,) = at["short_total"]
    items = [(item // TILES, part) for item, part in zip(*at["short_items"], strict=True)][:total]
    lines = [line for row in step.rows for line in attended(row)]
    ends = {i: start for i, (start, count) in enumerate(lines) if count == 1}
    assert [one for one in items if one[0] in ends] == [
        (i, part) for i, end in ends.items() for part in range(end // split + 1)
    ]
    assert {i for i, _ in items} == {i for i, (_, count) in enumerate(lines) if count <= SHORT}
    assert (at["chunk_total"][0] > 0) == any(count > SHORT for _, count in lines)


def check_settle(step: Staged) -> None:
    """Each drawn token's slot, position, and whether stop ids are held back."""
    at, flat, drawn = step.settle, 0, 0
    for row, place in zip(step.rows, step.places, strict=True):
        flat += row.count
        if not row.last:
            continue
        first = flat - 1 - len(row.draft)
        for offset in range(len(row.draft) + 1):
            position = row.position + offset
            assert at["picked"][drawn] == first + offset
            assert (at["slot"][drawn], at["first"][drawn]) == (place.slot, first)
            assert (at["position"][drawn], at["offset"][drawn]) == (position, offset)
            assert bool(at["hold"][drawn]) == (position < place.least)
            drawn += 1
    assert at["count"] == [drawn] and not any(at["picked"][drawn:])
    assert not any(at["mask"])
    assert at["groups"] == [sum(row.last for row in step.rows)]


def sequence(name: str, chance: random.Random, first_block: int) -> Sequence:
    tokens = [chance.randrange(256) for _ in range(MAX_LEN)]
    sampling = Sampling(temperature=0.0, min_tokens=chance.choice([0, 0, 4]))
    seq = Sequence(Submit(name, tokens[:20], 400, sampling), 0, b"", 0.0, tokens, 0.0)
    seq.blocks = [SimpleNamespace(id=first_block + i) for i in range(MAX_LEN // SIZE)]
    return seq


def rows_of(chance: random.Random, seqs: list[Sequence], starts: dict[str, int]) -> list[Row]:
    """Mostly rows that decode, as the scheduler orders them; now and then drafts and chunks."""
    kind = chance.choice(["plain"] * 6 + ["known", "drafts", "chunk", "opening"])
    rows = []
    for seq in seqs:
        start = starts[seq.submit.id]
        draft = (5, 6, 7) if kind == "drafts" and chance.random() < 0.4 else ()
        rows.append(Row(seq, start, 1 + len(draft), True, kind == "plain", draft))
        starts[seq.submit.id] = (start + 1) % (MAX_LEN - 40)
    if kind == "chunk":
        count = chance.choice([1, 5, SHORT + 4])
        rows[-1] = Row(rows[-1].seq, rows[-1].start, count, chance.random() < 0.5)
    for i in range(len(rows) // 2 if kind == "opening" else 0):
        draft = tuple(range(chance.choice([1, 3, 9])))
        own = chance.choice([2, SHORT - 4, SHORT - len(draft), SHORT, SHORT + 4])
        rows[-1 - i] = Row(rows[-1 - i].seq, rows[-1 - i].start, own + len(draft), True, False,
                           draft)
    return rows


def way(rows: list[Row]) -> str:
    """Which of the ways to write a step it goes."""
    lines = sum(len(attended(row)) for row in rows)
    first = len([*takewhile(lambda row: row.count == 1 and row.last, rows)])
    if lines <= FEW or first == len(rows):
        return "plain" if first == len(rows) else "few"
    if lines - first <= FEW:
        return "few behind plain" if first else "listed"
    return "listed" if lines - first <= LISTED else "many"


def test_whatever_a_buffer_held_the_device_is_told_each_row(runner):
    chance = random.Random(3)
    seqs = [sequence(f"s{i}", chance, 8 * i % 72) for i in range(LISTED + 7)]
    starts = {seq.submit.id: chance.choice([20, 60, 250]) for seq in seqs}
    running, kept, chunks, parted, ways = seqs[:4], 0, 0, 0, Counter[str]()
    for _ in range(800):
        if chance.random() < 0.1:
            running = chance.sample(seqs, chance.choice([*range(1, 13), 20, len(seqs) - 1]))
        rows = rows_of(chance, running, starts)
        if all(row.count == 1 and row.last for row in rows):
            kept += 1
        elif not any(row.last for row in rows):
            continue
        drawn = sum(1 + len(row.draft) for row in rows if row.last)
        if sum(row.count for row in rows) > runner.most.tokens or drawn > runner.settling.rows:
            continue
        chunks += any(row.count > SHORT for row in rows)
        parted += any(len(attended(row)) > 1 for row in rows)
        ways[way(rows)] += 1
        step = stage(runner, rows)
        check_forward(runner, step)
        check_items(runner, step)
        check_settle(step)
    assert kept > 400 and chunks > 10 and parted > 10
    assert all(ways[one] > 5 for one in ("few", "few behind plain", "listed", "many")), ways


@torch.inference_mode()
def test_masks_of_a_step_are_gone_in_the_next_one_of_its_buffer(runner):
    chance = random.Random(5)
    seqs = [sequence(f"m{i}", chance, 8 * i) for i in range(3)]
    for at in range(8):
        rows = [Row(seq, 20 + at, 1, True) for seq in seqs]
        places = runner.slots.placed(rows)
        draw = runner.settling.prepare(rows, places, plain(rows, places, runner.slots, SIZE))
        masks = torch.full((3, runner.settling._masks.shape[1]), -1, dtype=torch.int32)
        filled, only = [1] if at % 2 else [], {2: 5, 0: 0} if at % 3 == 0 else {}
        runner.settling.supply(draw, Masked(masks, filled, only))
        held = runner.settling._buckets[draw.size].hosts[draw.staged]["mask"]
        assert held[:3].tolist() == [-1 if only else 0, len(filled), -6 if only else 0]
        assert draw.masked == bool(filled or only)
