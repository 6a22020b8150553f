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

from engine.cuda import known as module
from engine.cuda.buckets import bucket, sizes
from engine.cuda.chaining import FLAT, GROUP, JOIN, Chaining, Staged
from engine.kernels.sampler_tables import SlotTables
from engine.proposer import LENGTHS
from speculative import ahead

SIZE, TRASH, TOKENS, ROWS, WIDTH = 4, 1200, 80, 9, 30
CPU = torch.device("cpu")


class Queue:
    """Stands for Graphs: notes keys and runs no body; for keys that begin so there is no memory."""

    def __init__(self) -> None:
        self.keys: list[tuple] = []
        self.lacks: list[tuple] = []

    def run(self, key, body, *, must: bool = True) -> None:
        self.keys.append(key)
        if any(key[: len(lack)] == lack for lack in self.lacks):
            raise torch.OutOfMemoryError("CUDA out of memory")


def row_of(chance: random.Random, kind: str) -> Some:
    start = chance.choice([0, 3, 4, 7, 8, 31, 32])
    drafts = chance.randrange(4) if kind in ("drafted", "begun") else 0
    count = {"prompt": 6, "chunk": chance.choice([4, 9]), "drafted": 1 + drafts,
             "begun": 5 + drafts}.get(kind, 1)
    tokens = [chance.randrange(1000) for _ in range(start + count + 1 - drafts)]
    submit = Some(drafts="auto", max_drafts=chance.choice([0, 2, 7]))
    return Some(
        start=start, count=count, last=kind != "chunk", pending=kind == "pending", drafts=drafts,
        draft=tuple(chance.randrange(1000) for _ in range(drafts)),
        seq=Some(submit=submit, tokens=tokens, remaining=chance.choice([1, 4, 50]),
                 blocks=[]),
    )


def planned(rows: list[Some], guesses: int, asleep: bool = False) -> Some:
    return Some(rows=rows, guesses=guesses, asleep=asleep, fresh=[], copies=[],
                tokens=sum(row.count for row in rows), drawing=sum(row.last for row in rows),
                drafts=sum(row.drafts for row in rows),
                reading=any(not row.last or row.count > 1 + row.drafts for row in rows))


def made(drafts: int = 5) -> Chaining:
    ids = np.random.default_rng(0).permutation((ROWS + 1) * WIDTH).reshape(-1, WIDTH)
    slots = Some(table=torch.zeros(ROWS + 1, WIDTH, dtype=torch.int32), count=ROWS,
                 ids=ids.astype(np.int32), tables=SlotTables.allocate(ROWS, 1, CPU))
    return Chaining(
        Some(source="eagle3", prepare=lambda *given: None), Some(), slots, Some(), Queue(),
        tokens=TOKENS, rows=ROWS, drafts=drafts, size=SIZE, trash=TRASH, copies=2)


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
         ["prompt", "chunk", "begun", "drafted", "pending", "plain"]]


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
    staged = chaining.stage(planned(rows, guesses), places, size)
    flat, groups, joins, draws, first, limits = [], [], [], 0, 0, [0]
    for row, place in zip(rows, places, strict=True):
        ids = chaining._slots.ids[place.slot]
        flat += flat_of(row, ids, len(groups), draws)
        if row.last:
            base = row.count - row.drafts - 1
            limit = max(0, min(guesses, row.seq.submit.max_drafts, row.seq.remaining - 2))
            groups.append((first + base, row.start + base, place.slot, limit, 1))
            limits.append(limit)
            draws += row.drafts + 1
        if row.start and row.start % SIZE == 0 and not row.pending:
            block = row.start // SIZE
            joins.append((row.seq.tokens[row.start], row.start - 1, int(ids[block]) * SIZE,
                          int(ids[block - 1])))
        first += row.count
    flat += [(0, None, None, None, TRASH, -1)] * (size - total)
    told(chaining._views(FLAT, size, size), flat)
    groups += [(0, 0, ROWS, -1, 1)] * (staged.groups - len(groups))
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
    chaining.stage(planned(rows, 5), [Some(slot=i) for i in range(len(rows))], size)
    assert len(sent) == 1


def test_a_step_that_is_slept_through_sends_nothing_and_is_a_gap_for_later_chains(monkeypatch):
    chaining, sent = made(), []
    rows = [row_of(random.Random(1), "plain")]
    rows[0].seq.submit.max_drafts, rows[0].seq.remaining = 7, 50
    rows[0].seq.blocks = [Some(id=int(block)) for block in chaining._slots.ids[3]]
    forwarded(chaining, rows, 1)
    plan = planned(rows, 0, asleep=True)
    chaining.known.follow(plan)
    with monkeypatch.context() as patch:
        patch.setattr(chaining._mirror, "send", lambda *given: sent.append(given))
        assert chaining.stage(plan, [Some(slot=3)], 1) is None
    assert not sent
    rows[0].start += 1
    rows[0].seq.tokens.append(1)
    forwarded(chaining, rows, 1)
    chaining.known.follow(plan := planned(rows, 2))
    chaining.stage(plan, [Some(slot=3)], 1)
    assert chaining._views(GROUP, 1, 1)["begin"].tolist() == [rows[0].start + 1]


@pytest.mark.parametrize("before", [[], ["plain"], ["drafted", "pending"]], ids="+".join)
def test_a_sleeping_draft_is_told_of_prompts_alone(before):
    chaining = made()
    for seed in range(12):
        chance = random.Random(seed)
        kinds = [chance.choice(before) for _ in range(min(seed, 5)) if before]
        kinds += [chance.choice(["prompt", "chunk", "begun"]) for _ in range(1 + seed % 3)]
        rows = [row_of(chance, kind) for kind in kinds]
        places = [Some(slot=slot) for slot in chance.sample(range(ROWS), len(rows))]
        size = bucket(sizes(TOKENS), sum(row.count for row in rows))
        total = len(forwarded(chaining, rows, size))
        slots = [int(chaining._slots.ids[place.slot][(row.start + i) // SIZE]) * SIZE
                 + (row.start + i) % SIZE
                 for row, place in zip(rows, places, strict=True) for i in range(row.count)]
        chaining._forward.host_slots = np.array(slots, np.int32)
        staged = chaining.stage(planned(rows, 0, asleep=True), places, size)
        assert staged is not None and staged.depth == 0 and staged.flat == size
        flat, joins, group, draws = [], [], 0, 0
        for row, place in zip(rows, places, strict=True):
            ids, read = chaining._slots.ids[place.slot], row.count > 1 + row.drafts
            slept = [(0, None, None, None, TRASH, -1)] * row.count
            flat += flat_of(row, ids, group, draws) if read else slept
            if read and row.start and row.start % SIZE == 0:
                block = row.start // SIZE
                joins.append((row.seq.tokens[row.start], row.start - 1, int(ids[block]) * SIZE,
                              int(ids[block - 1])))
            group, draws = group + row.last, draws + row.last * (row.drafts + 1)
            gap = chaining.known.begins(ids[None], np.array([row.start], np.int32))[0]
            assert gap == (1 if read else row.start + 1)
        told(chaining._views(FLAT, size, size), flat + [(0, None, None, None, TRASH, -1)]
             * (size - total))
        joins += [(0, 0, TRASH, 0)] * (staged.joined - len(joins))
        told(chaining._views(JOIN, staged.joined, 1), joins)
        chaining.known._from[:] = 0


def test_beside_many_a_sleeping_draft_reads_no_prompt(monkeypatch):
    chaining, slots = made(), [7, 8, 9, 10, 11, 12, 40]
    rows = [row_of(random.Random(1), kind) for kind in ("prompt", "plain")]
    for busy, read in ((2, True), (1, False)):
        monkeypatch.setattr(module, "BUSY", busy)
        forwarded(chaining, rows, 8)
        chaining._forward.host_slots = np.array(slots, np.int32)
        staged = chaining.stage(planned(rows, 0, asleep=True), [Some(slot=0), Some(slot=1)], 8)
        assert (staged is not None) == read


def test_warming_tells_of_no_row():
    chaining = made()
    for draws, size in ((False, 16), (True, 8)):
        chaining._mirror.buffer.fill_(7)
        chaining.warm(size, draws)
        if draws:
            told(chaining._views(GROUP, size, 1), [(0, 0, ROWS, -1, 1)] * size)
            told(chaining._views(JOIN, size, 1), [(0, 0, TRASH, 0)] * size)
        else:
            told(chaining._views(FLAT, size, size), [(0, None, None, None, TRASH, -1)] * size)
    assert chaining._graphs.keys == [
        ("extend", 16), ("join", 8), *(("chain", 8, d) for d in chaining.depths)]


@pytest.mark.parametrize("drafts, depths", [(1, [1]), (4, [1, 2, 3]), (7, [1, 2, 3, 5, 7]),
                                            (64, [1, 2, 3, 5, 7])])
def test_no_graph_is_for_a_chain_that_nobody_asks_for(drafts, depths):
    """Of a host's drafts `drafts` may be many; a longer chain than there is becomes the longest."""
    chaining = made(drafts)
    assert chaining.depths == depths == [one for one in LENGTHS if 0 < one <= drafts]
    assert ahead.LENGTHS is LENGTHS
    rows = [row_of(random.Random(1), "plain")]
    rows[0].seq.submit.max_drafts = rows[0].seq.remaining = 100
    forwarded(chaining, rows, 1)
    staged = chaining.stage(planned(rows, drafts), [Some(slot=0)], 1)
    assert staged.depth == depths[-1]
    chaining.run(staged)
    assert chaining._graphs.keys[-1] == ("chain", 1, depths[-1])


def staged_of(chaining: Chaining, guesses: int) -> Staged:
    """A step of two rows, one of which begins a block."""
    chance = random.Random(4)
    rows = [row_of(chance, "plain"), row_of(chance, "plain")]
    for row, start in zip(rows, (8, 9), strict=True):
        row.start, row.seq.tokens = start, [*range(start + 1)]
        row.seq.submit.max_drafts = row.seq.remaining = 50
    forwarded(chaining, rows, 2)
    return chaining.stage(planned(rows, guesses), [Some(slot=3), Some(slot=1)], 2)


def test_a_chain_without_memory_is_left_out_alone_and_not_tried_again(caplog):
    chaining = made()
    keys = chaining._graphs.keys
    chaining._graphs.lacks = [("chain", 2, 3)]
    for turn in range(3):
        keys.clear()
        staged = staged_of(chaining, 3)
        chaining.run(staged)
        # Then the next shorter one is made, which has room.
        assert staged.depth == (2 if turn else 0)
        assert keys == [("join", 1), ("extend", 2), ("chain", 2, 2 if turn else 3)]
        if not turn:
            chaining.fetch(staged)
            assert staged.home == 0, "nothing is sent home"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "3 tokens are drafted for 2 sequences" in caplog.text
    assert "--gpu-memory-utilization" in caplog.text
    other = staged_of(chaining, 2)
    chaining.run(other)
    assert other.depth == 2 and keys[-1] == ("chain", 2, 2)
    keys.clear()
    chaining.warm(2, True)
    assert ("chain", 2, 3) not in keys and ("chain", 2, 5) in keys


@pytest.mark.parametrize("name", ["join", "extend"])
def test_rows_that_cannot_be_made_cost_a_step_its_chain_and_nothing_else(name, caplog):
    chaining = made()
    chaining._graphs.lacks = [(name,)]
    for _ in range(3):
        staged = staged_of(chaining, 3)
        chaining.run(staged)
        assert staged.depth == 0 and ("extend", 2) in chaining._graphs.keys
    assert len(caplog.records) == 1 and repr(name) in caplog.text
    chaining._graphs.lacks = []
    staged = staged_of(chaining, 3)
    chaining.run(staged)
    assert staged.depth == 3


def test_an_error_that_is_not_about_memory_is_still_one(monkeypatch):
    chaining = made()

    def broken(key, body, **more) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(chaining._graphs, "run", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        chaining.run(staged_of(chaining, 3))


def test_the_largest_step_runs_every_pass_and_says_when_memory_does_not_do(caplog):
    chaining = made()
    chaining.largest()
    assert chaining._graphs.keys == [("join", ROWS), ("extend", TOKENS), ("chain", ROWS, 5)]
    for lack in chaining._graphs.keys[:]:
        chaining._graphs.lacks = [lack]
        with pytest.raises(torch.OutOfMemoryError):
            chaining.largest()
    assert not caplog.records
