"""The device side of a step: forward, then settle (mask, sample, draft).  Chooses no rows.

    launch(forward) -> supply(masks) -> settle -> collect(depth)

The phases are separate so that a GPU can run ahead of the host: on the CPU `collect(0)` returns
the step just launched.  What a step draws and drafts is read by the host only through `collect`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch import Batch, pack
from engine.proposer import DeviceDraft, Features
from engine.sampling import Sampled, SampleRow, sample

if TYPE_CHECKING:
    from cache.pages import Pages
    from engine.attention import Attention
    from engine.models import Hidden, Model
    from engine.scheduler import Plan, Row


@dataclass(slots=True)
class Flight:
    """One step between launch and commit."""

    plan: Plan
    batch: Batch
    hidden: Hidden
    masks: Tensor | None = None  # int32 [R, ceil(vocab / 32)], or None when no row has a grammar
    sampled: Sampled | None = None
    drafts: list[list[int]] = field(default_factory=list)  # a chain per row of the plan

    def drawn(self) -> list[list[int]]:
        """The target's tokens of each row, one more than its drafts; empty for chunks."""
        assert self.sampled is not None, "a flight was read before it was settled"
        tokens, begin, found = self.sampled.tokens, 0, []
        for count in self.batch.logit_counts:
            found.append(tokens[begin : begin + count])
            begin += count
        return found


class Runner:
    """Runs plans on one model with one pool of pages."""

    def __init__(
        self,
        model: Model,
        pages: Pages,
        attention: Attention,
        device: torch.device,
        head: DeviceDraft | None = None,
        max_drafts: int = 0,
    ) -> None:
        self.model, self.pages, self.attention, self.device = model, pages, attention, device
        self.head = head
        self.max_drafts = max_drafts
        self._flights: deque[Flight] = deque()
        if head is not None:
            head.reserve(pages.blocks, pages.size, pages.data.dtype, device)

    @property
    def lookahead(self) -> int:
        """Slots that a sequence needs beyond its wanted tokens: the device draft writes ahead."""
        return self.max_drafts + 1 if self.head is not None else 0

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Start the forward pass of a plan."""
        for source, target in plan.copies:
            self.pages.copy(source, target)
            if self.head is not None:
                self.head.copy(source, target)
        if plan.fresh:
            # A block's stale tail is masked, but masked times NaN is NaN: hand out clean pages.
            self.pages.clear(plan.fresh)
        batch = pack(plan.rows, self.pages.size, self.device)
        self.attention.prepare(batch)
        hidden = self.model.forward(batch, self.pages.data, self.attention)
        flight = Flight(plan, batch, hidden)
        self._flights.append(flight)
        return flight

    def supply(self, flight: Flight, masks: Tensor | None) -> None:
        """Hand over what the host computed while the forward pass ran."""
        flight.masks = masks

    @torch.inference_mode()
    def settle(self, flight: Flight) -> None:
        """Draw every wanted row's token; let the device draft consume and guess."""
        rows = [row for share in flight.plan.rows if share.last for row in _sample_rows(share)]
        if rows:
            wanted = flight.hidden.last.index_select(0, flight.batch.logit_rows)
            flight.sampled = sample(self.model.logits(wanted), rows, flight.masks)
        else:
            flight.sampled = Sampled([], [], [])
        if self.head is not None:
            flight.drafts = self._draft(self.head, flight)

    def collect(self, depth: int) -> list[Flight]:
        """Flights that are at least `depth` steps old, results on the host, oldest first."""
        ready = []
        while len(self._flights) > depth:
            ready.append(self._flights.popleft())
        return ready

    def _draft(self, head: DeviceDraft, flight: Flight) -> list[list[int]]:
        """Extend the draft on this step's true features, then guess `max_drafts` tokens a row."""
        assert flight.hidden.taps is not None, "the model was built without the draft's taps"
        features = _features(flight, self.pages.size, self.max_drafts)
        head.extend(features)
        depth = int(features.limits.max())
        steps = [head.step(features, i) for i in range(depth)]
        if not steps:
            return [[] for _ in flight.plan.rows]
        chains = torch.stack(steps, dim=1).tolist()
        limits = features.limits.tolist()
        return [chain[:limit] for chain, limit in zip(chains, limits, strict=True)]


def matched(draft: list[int], drawn: list[int]) -> int:
    """How many draft tokens the target drew too: the device's half of engine/accept.py."""
    count = 0
    while count < len(draft) and draft[count] == drawn[count]:
        count += 1
    return count


def _sample_rows(share: Row) -> list[SampleRow]:
    """One entry per token that this share may give."""
    seq = share.seq
    return [
        SampleRow(
            sampling=seq.sampling,
            position=len(seq.tokens) + i,
            choice=seq.index,
            generated=seq.generated + i,
            stop_ids=seq.submit.stop_ids,
            history=seq.history,
            drafted=seq.draft[:i],
        )
        for i in range(share.drafts + 1)
    ]


def _features(flight: Flight, size: int, max_drafts: int) -> Features:
    """The rows whose features are true: whole chunks, and the accepted part of verified rows."""
    rows: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, counts, tables, last, limits = [], [], [], [], []
    begin = 0
    for share, drawn in zip(flight.plan.rows, flight.drawn(), strict=True):
        seq, right = share.seq, 0
        if share.last:
            right = matched(seq.draft[: share.drafts], drawn)
            known = [*seq.tokens, *seq.draft[:right], max(drawn[right], 0)]
        else:
            known = seq.tokens
        count = share.count - (share.drafts - right)
        ids = [block.id for block in seq.blocks]
        rows += range(begin, begin + count)
        tokens += known[share.start + 1 : share.start + count + 1]
        positions += range(share.start, share.start + count)
        after = range(share.start + 1, share.start + count + 1)
        slots += [ids[p // size] * size + p % size for p in after]
        starts.append(share.start)
        counts.append(count)
        tables.append(ids)
        last.append(len(rows) - 1)
        limits.append(max(0, min(max_drafts, seq.remaining - right - 2)) if share.last else 0)
        begin += share.count
    device = flight.batch.tokens.device
    ints = partial(torch.tensor, dtype=torch.int64, device=device)
    assert flight.hidden.taps is not None
    seqs = [share.seq for share in flight.plan.rows]
    return Features(
        batch=Batch(
            ints(tokens), ints(positions),
            ints(slots), starts, counts, tables, ints([]), [0] * len(counts),
        ),
        hidden=flight.hidden.taps.index_select(0, ints(rows)),
        last=ints(last),
        seeds=ints([_signed(seq.sampling.seed) for seq in seqs]),
        choices=ints([seq.index for seq in seqs]),
        temperatures=torch.tensor([seq.sampling.temperature for seq in seqs], device=device),
        limits=ints(limits),
    )


def _signed(seed: int) -> int:
    """The same 64 bits as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63
