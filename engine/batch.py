"""A plan as flat tensors: one token axis for chunks, decodes, verifications.  Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.plan import Row
    from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """N flat tokens of S rows; host lists where the host alone reads them."""

    tokens: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64: block.id * size + offset
    starts: list[int]  # [S] position of a row's first token
    counts: list[int]  # [S] tokens of a row, in flat order
    tables: list[list[int]]  # [S] block ids that hold positions 0 .. start + count - 1
    logit_rows: torch.Tensor  # [R] int64: flat tokens whose logits are wanted
    logit_counts: list[int]  # [S] how many of those belong to a row (0 for a chunk in the middle)
    origins: tuple[tuple[int, Sequence], ...] = ()  # flat tokens that are still zero: the device
    # alone knows them, as the newest of these sequences


def pack(rows: list[Row], size: int, device: torch.device) -> Batch:
    """Lay the rows end to end; `size` is tokens a block."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    tables: list[list[int]] = []
    origins: list[tuple[int, Sequence]] = []
    for row in rows:
        seq, start, stop = row.seq, row.start, row.start + row.count
        if row.pending:
            origins.append((len(tokens), seq))
            tokens += (0, *row.draft)
        elif row.count == 1:
            tokens.append(seq.tokens[start])
        else:
            tokens += seq.tokens[start:stop]
            tokens += row.draft
        ids = [block.id for block in seq.blocks[: -(-stop // size)]]
        if row.count == 1:
            positions.append(start)
            slots.append(ids[-1] * size + start % size)
        else:
            positions += range(start, stop)
            slots += [ids[p // size] * size + p % size for p in range(start, stop)]
        tables.append(ids)
        if row.last:
            logit_rows += range(len(tokens) - row.drafts - 1, len(tokens))
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        starts=[row.start for row in rows],
        counts=[row.count for row in rows],
        tables=tables,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        logit_counts=[row.drafts + 1 if row.last else 0 for row in rows],
        origins=tuple(origins),
    )
