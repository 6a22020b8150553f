"""What the attention kernels know about a step's rows, on the device.  Neither plans nor launches.

A step has S rows on one flat token axis.  Row r covers the flat tokens first[r] .. first[r] +
count[r] - 1, which stand at the positions start[r] .. start[r] + count[r] - 1 of the sequence in
slot[r].  All fields may be views of one static buffer that a single copy a step fills: nothing here
changes its address, so a captured graph reads whatever the last copy brought.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Rows, block table and work lists of a step; int32, contiguous in the last axis.

    Every number up to the two totals must be in range when a kernel runs; what lies beyond the
    totals, and table entries beyond a row's last position, may be stale (but no id is negative).
    """

    table: Tensor  # [slots, width] block ids by sequence slot
    slot: Tensor  # [S] row of `table`
    first: Tensor  # [S] flat index of the row's first token
    start: Tensor  # [S] position of the row's first token
    count: Tensor  # [S] tokens of the row; 0 for a row that is not there
    short_items: Tensor  # [2, W] see attention_plan.fill_short
    short_total: Tensor  # [1]
    chunk_items: Tensor  # [2, C] see attention_plan.fill_chunks
    chunk_total: Tensor  # [1]

    @classmethod
    def allocate(
        cls,
        *,
        slots: int,
        width: int,
        rows: int,
        short_items: int,
        chunk_items: int,
        device: torch.device | str,
    ) -> AttentionMeta:
        """Zeroed arrays: no rows, no work.  All extents count elements and are at least 1."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            table=zeros(slots, width),
            slot=zeros(rows),
            first=zeros(rows),
            start=zeros(rows),
            count=zeros(rows),
            short_items=zeros(2, short_items),
            short_total=zeros(1),
            chunk_items=zeros(2, chunk_items),
            chunk_total=zeros(1),
        )
