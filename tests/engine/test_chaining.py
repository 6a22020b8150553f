"""What a step's drafts are told of it, against a plain loop over its tokens.  Launches nothing."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace as Some

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.cuda.buckets import bucket, sizes
from engine.cuda.chaining import FLAT, GROUP, JOIN, Chaining
from engine.kernels.sampler_tables import SlotTables

SIZE, TRASH, TOKENS, ROWS, WIDTH = 4, 999, 80, 9, 30
CPU = torch.device("cpu")


class Queue:
    """Stands for Graphs: notes keys and runs no body."""

    def __init__(self) -> None:
        self.keys: list[tuple] = []

    def run(self, key, body) -> None:
        self.keys.append(key)


def row_of(chance: random.Random, kind: str) -> Some:
    start = chance.choice([0, 3, 4, 7, 8, 31, 32])
    drafts = chance.randrange(4) if kind == "drafted" else 0
    count = {"prompt": 6, "chunk": chance.choice([4, 9]), "drafted": 1 + drafts}.get(kind, 1)
    tokens = [chance.randrange(1000) for _ in range(start + count + 1 - drafts)]
    submit = Some(drafts="auto", max_drafts=chance.choice([0, 2, 7]))
    return Some(
        start=start, count=count, last=kind != "chunk", pending=kind == "pending", drafts=drafts,
        draft=tuple(chance.randrange(1000) for _ in range(drafts)),
        seq=Some(submit=submit, tokens=tokens, remaining=chance.choice([1, 4, 50])),
    )


def made() -> Chaining:
    ids = np.random.default_rng(0).permutation((ROWS + 1) * WIDTH).reshape(-1, WIDTH)
    slots = Some(table=torch.zeros(ROWS + 1, WIDTH, dtype=torch.int32), count=ROWS,
                 ids=ids.astype(np.int32), tables=SlotTables.allocate(ROWS, 1, CPU))
    return Chaining(
        Some(source="eagle3", prepare=lambda *given: None), Some(), slots, Some(), Queue(),
        tokens=TOKENS, rows=ROWS, drafts=5, size=SIZE, trash=TRASH, copies=2)


def forwarded(chaining: Chaining, rows: list[Some], size: int) -> list[int]:
    """Give it the forward's integers; the flat tokens."""
    tokens = [*(token for row in rows
                for token in [*row.seq.tokens[row.start:], *row.draft][: row.count])]
    for name, values in (("host_tokens", tokens),
                         ("host_positions", [row.start + i for row in rows
                                             for i in range(row.count)])):
        setattr(chaining._forward, name, np.array([*values, *[0] * (size - len(values))], np.int32))
    return tokens


def flat_of(row: Some, ids, group: int, draws: int) -> list[tuple]:
    """(known, group, offset, fresh, after, ends) of each token of a row; None where none is read.
    """
    found = []
    base = row.count - row.drafts - 1
    for i in range(row.count):
        behind = row.start + i + 1
        after = int(ids[behind // SIZE]) * SIZE + behind % SIZE
        ends = int(ids[behind // SIZE - 1]) if behind % SIZE == 0 else -1
        if row.last and i >= base:
            found.append((-1, group, i - base, draws + i - base, after, ends))
        else:
            found.append((row.seq.tokens[behind], None, None, None, after, ends))
    return found


KINDS = [["plain"], ["pending"], ["prompt"], ["chunk"], ["drafted", "plain"],
         ["prompt", "chunk", "drafted", "pending", "plain"]]


@pytest.mark.parametrize("guesses", [0, 2, 5])
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_every_token_and_group_is_told_of_as_a_loop_would(kinds, guesses):
    chaining = made()
    for seed in range(8):  # one after the other in the same buffers
        chance = random.Random(seed)
        rows = [row_of(chance, chance.choice(kinds)) for _ in range(1 + seed)]
        places = [Some(slot=slot) for slot in chance.sample(range(ROWS), len(rows))]
        check(chaining, rows, places, guesses)


def check(chaining: Chaining, rows: list[Some], places: list[Some], guesses: int) -> None:
    size = bucket(sizes(TOKENS), sum(row.count for row in rows))
    total = len(forwarded(chaining, rows, size))
    staged = chaining.stage(Some(rows=rows, guesses=guesses), places, size)
    flat, groups, joins, draws, first, limits = [], [], [], 0, 0, [0]
    for row, place in zip(rows, places, strict=True):
        ids = chaining._slots.ids[place.slot]
        flat += flat_of(row, ids, len(groups), draws)
        if row.last:
            base = row.count - row.drafts - 1
            limit = max(0, min(guesses, row.seq.submit.max_drafts, row.seq.remaining - 2))
            groups.append((first + base, row.start + base, place.slot, limit))
            limits.append(limit)
            draws += row.drafts + 1
        if row.start and row.start % SIZE == 0 and not row.pending:
            block = row.start // SIZE
            joins.append((row.seq.tokens[row.start], row.start - 1, int(ids[block]) * SIZE,
                          int(ids[block - 1])))
        first += row.count
    flat += [(0, None, None, None, TRASH, -1)] * (size - total)
    told(chaining._views(FLAT, size, size), flat)
    groups += [(0, 0, ROWS, -1)] * (staged.groups - len(groups))
    told(chaining._views(GROUP, staged.groups, 1), groups)
    joins += [(0, 0, TRASH, 0)] * (staged.joined - len(joins))
    told(chaining._views(JOIN, staged.joined, 1), joins)
    assert staged.count == sum(row.last for row in rows)
    assert staged.groups == bucket(sizes(ROWS), max(1, staged.count))
    deepest = max(limits)
    assert staged.depth == (min(d for d in chaining.depths if d >= deepest) if deepest else 0)


def told(at: dict[str, torch.Tensor], wanted: list[tuple]) -> None:
    found = [*zip(*(at[name].tolist() for name in at), strict=True)]
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert all(b is None or a == b for a, b in zip(one, other, strict=True)), (one, other)


def test_an_array_of_groups_has_one_address_in_every_bucket_of_tokens():
    chaining = made()
    for names in (GROUP, JOIN):
        each = [chaining._views(names, 2, flat) for flat in sizes(TOKENS)]
        for name in names:
            assert len({at[name].data_ptr() for at in each}) == 1


def test_a_step_costs_one_copy(monkeypatch):
    chaining, sent = made(), []
    monkeypatch.setattr(chaining._mirror, "send", lambda *given: sent.append(given))
    rows = [row_of(random.Random(i), kind) for i, kind in enumerate(KINDS[-1])]
    size = bucket(sizes(TOKENS), sum(row.count for row in rows))
    forwarded(chaining, rows, size)
    chaining.stage(Some(rows=rows, guesses=5), [Some(slot=i) for i in range(len(rows))], size)
    assert len(sent) == 1


def test_warming_tells_of_no_row():
    chaining = made()
    for draws, size in ((False, 16), (True, 8)):
        chaining._mirror.buffer.fill_(7)
        chaining.warm(size, draws)
        if draws:
            told(chaining._views(GROUP, size, 1), [(0, 0, ROWS, -1)] * size)
        else:
            told(chaining._views(FLAT, size, size), [(0, None, None, None, TRASH, -1)] * size)
    assert chaining._graphs.keys == [("extend", 16), *(("chain", 8, d) for d in chaining.depths)]
