"""Lay rows out for the sampler kernels and for engine/sampling.py alike.  Asserts nothing."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

from engine.kernels.sampler import Needs, settle  # noqa: E402
from engine.kernels.sampler_tables import (  # noqa: E402
    BIASED,
    FILTERED,
    PENALTIES,
    SCORED,
    Results,
    Rows,
    Scratch,
    SlotParams,
    SlotTables,
)
from engine.messages import Sampling  # noqa: E402
from engine.sampling import History, SampleRow, needs_history  # noqa: E402

POISON = -77


@dataclass
class Group:
    """One sequence's rows: its parameters, and the drafts that make k + 1 rows of it."""

    sampling: Sampling
    stop_ids: list[int] = field(default_factory=list)
    choice: int = 0
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def rows(self) -> list[SampleRow]:
        """What engine/sampling.py is told."""
        history = None
        if needs_history(self.sampling):
            history = History(self.prompt)
            for token in self.output:
                history.add(token)
        length = len(self.prompt) + len(self.output)
        return [
            SampleRow(
                self.sampling, length + i, self.choice, len(self.output) + i, self.stop_ids,
                history, self.drafts[:i],
            )
            for i in range(len(self.drafts) + 1)
        ]


@dataclass
class Rig:
    """A settled step: what went in and what came out."""

    groups: list[Group]
    slots: list[int]
    tables: SlotTables
    rows: Rows
    results: Results

    @property
    def count(self) -> int:
        return sum(len(group.drafts) + 1 for group in self.groups)

    def tokens(self) -> list[int]:
        return self.results.tokens[: self.count].tolist()


def run(
    logits: torch.Tensor, groups: list[Group], masks: torch.Tensor | None = None,
    pad: int = 0, order: random.Random | None = None, everything: bool = False,
) -> Rig:  # fmt: skip
    """Settle the groups on `logits` [rows, V], with `pad` poisoned rows behind the real ones.

    `order` shuffles the slots; `everything` switches on kernels that nobody needs.
    """
    vocab, count = logits.shape[1], len(logits)
    slots = list(range(len(groups) + 2))
    if order is not None:
        order.shuffle(slots)
    slots = slots[: len(groups)]
    tables = SlotTables.allocate(len(groups) + 2, vocab, DEVICE)
    params = SlotParams(tables)
    flags = 0
    for slot, group in zip(slots, groups, strict=True):
        flags |= params.write(
            slot, group.sampling, group.stop_ids, group.choice, group.prompt, group.output
        )
    params.upload()
    rows, masks = lay(groups, slots, count, pad, masks, vocab)
    wide = torch.full((count + pad, vocab), float("nan"), dtype=logits.dtype)
    wide[:count] = logits
    results = Results.allocate(count + pad, len(groups) + pad, DEVICE)
    for tensor in (results.tokens, results.matched, results.own):
        tensor.fill_(POISON)
    scratch = Scratch.allocate(count + pad, vocab, DEVICE)
    needs = Needs(
        shaped=everything or bool(flags & (PENALTIES | BIASED)),
        filters=everything or bool(flags & FILTERED),
        logprobs=everything or bool(flags & SCORED),
    )
    settle(wide.to(DEVICE), rows, tables, masks, scratch, results, needs)
    return Rig(groups, slots, tables, rows, results)


def lay(
    groups: list[Group], slots: list[int], count: int, pad: int, masks: torch.Tensor | None,
    vocab: int,
) -> tuple[Rows, torch.Tensor | None]:  # fmt: skip
    """The step's rows, with wild numbers in the padded ones, and the masks on the device."""
    flat = [token for group in groups for token in (0, *group.drafts)]
    rows = Rows.allocate(count + pad, len(groups) + pad, max(len(flat), 1), DEVICE)
    columns: list[list[int]] = [[] for _ in range(6)]
    starts, sizes, first = [], [], 0
    for slot, group in zip(slots, groups, strict=True):
        starts.append(len(columns[0]))
        sizes.append(len(group.drafts) + 1)
        for i, row in enumerate(group.rows()):
            hold = row.generated < group.sampling.min_tokens
            entry = (slot, row.position, int(hold), len(columns[0]), first, i)
            for column, value in zip(columns, entry, strict=True):
                column.append(value)
        first += sizes[-1]
    assert len(columns[0]) == count, f"{len(columns[0])} rows laid, {count} logits"
    targets = (rows.slot, rows.position, rows.hold, rows.mask, rows.first, rows.offset)
    lists = (*columns, starts, sizes)
    for target, values in zip((*targets, rows.group_row, rows.group_rows), lists, strict=True):
        target.fill_(2**30)
        target[: len(values)] = torch.tensor(values, dtype=torch.int32)
    rows.tokens[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
    rows.count.fill_(count)
    rows.groups.fill_(len(groups))
    if masks is not None:
        masks = masks.clone()
        for row, token in only_tokens(masks).items():
            if row % 2:  # a step says it in one of two ways
                rows.mask[row], masks[row] = ~token, 0
        masks = torch.cat([masks, torch.full((1, masks.shape[1]), -1, dtype=torch.int32)])
        masks = masks.to(DEVICE)
    return rows, masks


def only_tokens(masks: torch.Tensor) -> dict[int, int]:
    """The rows in which one token is legal, and that token."""
    bits = (masks[:, :, None] >> torch.arange(32)) & 1
    found = [row.nonzero().flatten().tolist() for row in bits.reshape(len(masks), -1)]
    return {row: ids[0] for row, ids in enumerate(found) if len(ids) == 1}


def mask_of(allowed: list[set[int] | None], vocab: int) -> torch.Tensor:
    """Bit masks int32 [rows, ceil(vocab / 32)]; None allows everything."""
    width = -(-vocab // 32)
    words = [sum(1 << t for t in (range(vocab) if ids is None else ids)) for ids in allowed]
    packed = b"".join(word.to_bytes(4 * width, "little") for word in words)
    return torch.frombuffer(bytearray(packed), dtype=torch.int32).view(len(words), width)
