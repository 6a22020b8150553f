"""Feed a device draft with a settled step, and take its guesses.  Verifies nothing.

Both runners share it: the host already knows what was drawn.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch import Batch
from engine.proposer import DeviceDraft, Features

if TYPE_CHECKING:
    from engine.plan import Plan


def guess(
    head: DeviceDraft, plan: Plan, drawn: list[list[int]], taps: Tensor, size: int, max_drafts: int
) -> list[list[int]]:
    """Extend the draft on the step's true features, then guess up to `max_drafts` tokens a row.

    `drawn` are the target's tokens of each row, `taps` [N, taps * hidden] what the tapped layers
    gave for the flat tokens, `size` is tokens a block.
    """
    true = features(plan, drawn, taps, size, max_drafts, head.source)
    head.extend(true)
    depth = int(true.limits.max())
    steps = [head.step(true, i) for i in range(depth)]
    if not steps:
        return [[] for _ in plan.rows]
    chains = torch.stack(steps, dim=1).tolist()
    limits = true.limits.tolist()
    return [chain[:limit] for chain, limit in zip(chains, limits, strict=True)]


def matched(draft: tuple[int, ...], drawn: list[int]) -> int:
    """How many draft tokens the target drew too: the device's half of engine/accept.py."""
    count = 0
    while count < len(draft) and draft[count] == drawn[count]:
        count += 1
    return count


def features(
    plan: Plan, drawn_rows: list[list[int]], taps: Tensor, size: int, max_drafts: int, source: str
) -> Features:
    """The rows whose features are true: whole chunks, and the accepted part of verified rows.

    A request that wants no drafts of this `source` is extended, and drafts nothing.
    """
    rows: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, counts, tables, last, limits, first = [], [], [], [], [], []
    begin = 0
    for share, drawn in zip(plan.rows, drawn_rows, strict=True):
        seq, right = share.seq, 0
        if share.last:
            right = matched(share.draft, drawn)
            known = [*seq.tokens, *share.draft[:right], max(drawn[right], 0)]
        else:
            known = seq.tokens
        count = share.count - (share.drafts - right)
        ids = [block.id for block in seq.blocks]
        rows += range(begin, begin + count)
        tokens += known[share.start + 1 : share.start + count + 1]
        positions += range(share.start, share.start + count)
        after = range(share.start + 1, share.start + count + 1)
        slots += [ids[p // size] * size + p % size for p in after]
        first.append(known[share.start])
        starts.append(share.start)
        counts.append(count)
        tables.append(ids)
        last.append(len(rows) - 1)
        wanted = share.last and seq.submit.drafts in ("auto", source)
        most = min(max_drafts, seq.submit.max_drafts, seq.remaining - right - 2)
        limits.append(max(0, most) if wanted else 0)
        begin += share.count
    device = taps.device
    ints = partial(torch.tensor, dtype=torch.int64, device=device)
    seqs = [share.seq for share in plan.rows]
    return Features(
        batch=Batch(
            ints(tokens), ints(positions),
            ints(slots), starts, counts, tables, ints([]), [0] * len(counts),
        ),
        hidden=taps.index_select(0, ints(rows)),
        first=ints(first),
        last=ints(last),
        seeds=ints([_signed(seq.sampling.seed) for seq in seqs]),
        choices=ints([seq.index for seq in seqs]),
        temperatures=torch.tensor([seq.sampling.temperature for seq in seqs], device=device),
        limits=ints(limits),
    )


def _signed(seed: int) -> int:
    """The same 64 bits as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63
