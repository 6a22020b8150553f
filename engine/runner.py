"""The device side of a step: forward, then settle (mask, sample, draft).  Chooses no rows.

    launch(forward) -> supply(masks) -> settle -> collect(depth)

The phases are separate so that a GPU can run ahead of the host.  What a step draws and drafts is
read by the host only through `collect`; between the launch and there, the newest token of a
sequence exists on the device alone, and the next step reads it there (`Row.pending`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.cpu import SHORT
from engine.batch import Batch, pack
from engine.drafting import guess, matched
from engine.proposer import DeviceDraft
from engine.sampling import SampleRow, sample

if TYPE_CHECKING:
    from cache.pages import Pages
    from engine.attention import Attention
    from engine.messages import Submit, TokenLogprobs
    from engine.models import Hidden, Model
    from engine.plan import Plan, Row
    from engine.sequence import Sequence


class StepTooLarge(Exception):
    """A plan that the device's buffers cannot hold; the loop plans a smaller one."""


@dataclass
class Flight:
    """One step between launch and commit; all but the plan is there once `collect` returns it."""

    plan: Plan
    drawn: list[list[int]] = field(default_factory=list)  # a row's drafts + 1; empty for a chunk
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # flat over `drawn`;
    # empty when no row asked
    drafts: list[list[int]] = field(default_factory=list)  # a chain a row; see StepRunner.guesses
    seconds: float = 0.0  # from when the device was free for it to its last draw; 0 = not measured
    chain_s: float = 0.0  # what the device draft took behind it; known with its guesses
    alone: bool = False  # launched when all before it was known


class Masked(NamedTuple):
    """The grammar masks of a step, by the tokens of `drawn` in order; the next step's take over."""

    masks: Tensor  # int32 [R, ceil(vocab / 32)] on the CPU
    filled: list[int]  # the rows of it that forbid anything
    only: Mapping[int, int]  # of other rows the one token that may come; empty unless `takes_only`


class StepRunner(Protocol):
    """What the loop asks of a device.  One thread calls; the device runs what it gets in order.

    Each plan goes through launch, perhaps supply, settle, collect, and is settled before the next
    one is launched.  With depth 1 the next one may be launched before this one is collected.
    """

    @property
    def depth(self) -> int:
        """Steps that may fly while the next one is launched: 0, or 1."""

    @property
    def lookahead(self) -> int:
        """Slots that a sequence needs beyond its wanted tokens: a device draft writes ahead."""

    @property
    def short(self) -> int:
        """Tokens of a row up to which its bits do not depend on how many it has."""

    @property
    def keeps_history(self) -> bool:
        """Penalties count tokens on the device; else their rows settle after the last commit."""

    @property
    def longest(self) -> int:
        """Draft tokens that a row may have; on a GPU more had other bits than by themselves."""

    @property
    def takes_only(self) -> bool:
        """A row that only one token may follow needs no mask but that token."""

    @property
    def sizes(self) -> Collection[int]:
        """Flat tokens that steps are padded to, ascending; empty where they are not padded."""

    @property
    def blocks(self) -> int:
        """Blocks of KV that plans may name."""

    def lacks(self, submit: Submit) -> str:
        """What of a request does not fit the device's tables, for the caller to read; else ""."""

    def launch(self, plan: Plan) -> Flight:
        """Copy `plan.copies`, clear `plan.fresh`, start the forward pass.

        Everything that is read of a `Sequence` is read here, or taken from the `Row`: the step
        before may be committed, and change it, between this call and `settle`.

        A row with `pending` computes the token that the newest settled step drew for its sequence.
        Raise OutOfMemoryError or StepTooLarge: then the plan does not fly, but its copies and
        clears are done (they allocate nothing, and cannot be repeated).
        """

    def supply(self, flight: Flight, masked: Masked) -> None:
        """Hand over grammar masks; called only when some row of the plan has one."""

    def settle(self, flight: Flight) -> None:
        """Draw every wanted row's token; keep it for the next launch; draft.

        Raise OutOfMemoryError: then the flight is forgotten, as if it had not been launched.
        """

    def collect(self, depth: int) -> list[Flight]:
        """Flights but the newest `depth`, results on the host, oldest first; waits for them."""

    def guesses(self, flight: Flight) -> list[list[int]]:
        """What a device draft guessed behind each row of a collected flight; [] if there is none.

        Waits for it; `flight.chain_s` is known from then on.  To be asked for once, and for no
        flight whose plan wanted no guesses.
        """

    def forget(self, seq: Sequence) -> None:
        """What is kept of the sequence holds no longer; a flight's row of it counts for nothing.

        It is gone for good, or it goes on with another newest token than the one that was drawn:
        its next row is not `pending`.
        """

    def idle(self) -> bool:
        """Do a little that later steps gain from; return whether there is more of it.

        Called when no step flies and no message is known; the next one waits for it, so it takes
        tens of milliseconds at most.
        """


@dataclass
class CpuFlight(Flight):
    """What the CPU keeps of a step between its phases."""

    batch: Batch = field(kw_only=True)
    hidden: Hidden = field(kw_only=True)
    masks: Tensor | None = None
    began: float = 0.0  # perf_counter


class Runner:
    """Runs plans on one model with one pool of pages, on the CPU.

    With depth 1 it works as a device does: the next step is launched before the host has seen what
    this one drew, and finds the newest tokens in a store of its own.
    """

    short = SHORT
    keeps_history = False
    takes_only = False
    longest = 1 << 30
    sizes: Collection[int] = ()

    def __init__(
        self,
        model: Model,
        pages: Pages,
        attention: Attention,
        device: torch.device,
        head: DeviceDraft | None = None,
        max_drafts: int = 0,
        depth: int = 0,
    ) -> None:
        self.model, self.pages, self.attention, self.device = model, pages, attention, device
        self.head = head
        self.max_drafts = max_drafts
        self.depth = 0 if head is not None else depth  # a chain hangs on the newest token
        self._flights: deque[CpuFlight] = deque()
        self._last: dict[Sequence, int] = {}  # the newest token of each; empty at depth 0
        if head is not None:
            head.reserve(pages.blocks, pages.size, pages.data.dtype, device)

    @property
    def lookahead(self) -> int:
        """Slots that a sequence needs beyond its wanted tokens: the device draft writes ahead."""
        return self.max_drafts + 1 if self.head is not None else 0

    @property
    def blocks(self) -> int:
        """All blocks of the pages."""
        return self.pages.blocks

    def lacks(self, submit: Submit) -> str:
        """Nothing: there are no tables."""
        return ""

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Run the forward pass of a plan."""
        began = time.perf_counter()
        for source, target in plan.copies:
            self.pages.copy(source, target)
            if self.head is not None:
                self.head.copy(source, target)
        if plan.fresh:
            # A block's stale tail is masked, but masked times NaN is NaN: hand out clean pages.
            self.pages.clear(plan.fresh)
        batch = pack(plan.rows, self.pages.size, self.device)
        for flat, seq in batch.origins:
            batch.tokens[flat] = self._last[seq]
        self.attention.prepare(batch)
        hidden = self.model.forward(batch, self.pages.data, self.attention)
        flight = CpuFlight(plan, batch=batch, hidden=hidden, began=began)
        self._flights.append(flight)
        return flight

    def supply(self, flight: Flight, masked: Masked) -> None:
        """Keep the masks for settle, which reads them at once."""
        assert isinstance(flight, CpuFlight)
        flight.masks = masked.masks

    def settle(self, flight: Flight) -> None:
        """Draw every wanted row's token; let the device draft consume and guess."""
        assert isinstance(flight, CpuFlight)
        try:
            self._settle(flight)
            flight.seconds = time.perf_counter() - flight.began
        except BaseException:
            self._flights.remove(flight)
            raise

    def collect(self, depth: int) -> list[Flight]:
        """Flights that are at least `depth` steps old, results on the host, oldest first."""
        ready: list[Flight] = []
        while len(self._flights) > depth:
            ready.append(self._flights.popleft())
        return ready

    def guesses(self, flight: Flight) -> list[list[int]]:
        """They are there."""
        return flight.drafts

    def forget(self, seq: Sequence) -> None:
        """Drop its newest token."""
        self._last.pop(seq, None)

    def idle(self) -> bool:
        """Nothing: a CPU has no graphs."""
        return False

    @torch.inference_mode()
    def _settle(self, flight: CpuFlight) -> None:
        shares = flight.plan.rows
        rows = [row for share in shares if share.last for row in _sample_rows(share)]
        if rows:
            wanted = flight.hidden.last.index_select(0, flight.batch.logit_rows)
            sampled = sample(self.model.logits(wanted), rows, flight.masks)
            flight.drawn = _split(sampled.tokens, flight.batch.logit_counts)
            flight.logprobs = sampled.logprobs
        else:
            flight.drawn = [[] for _ in shares]
        if self.depth:
            for share, drawn in zip(shares, flight.drawn, strict=True):
                if share.last and not share.seq.gone:
                    self._last[share.seq] = max(drawn[matched(share.draft, drawn)], 0)
        if self.head is not None:
            taps = flight.hidden.taps
            assert taps is not None, "the model was built without the draft's taps"
            flight.drafts = guess(self.head, flight.plan, flight.drawn, taps, self.pages.size,
                                  min(self.max_drafts, flight.plan.guesses))


def _split(tokens: list[int], counts: list[int]) -> list[list[int]]:
    """Cut a flat list into pieces of these lengths."""
    found, begin = [], 0
    for count in counts:
        found.append(tokens[begin : begin + count])
        begin += count
    return found


def _sample_rows(share: Row) -> list[SampleRow]:
    """One entry per token that this share may give."""
    seq = share.seq
    return [
        SampleRow(
            sampling=seq.sampling,
            position=share.position + i,
            choice=seq.index,
            generated=share.position - seq.prompt_len + i,
            stop_ids=seq.submit.stop_ids,
            history=seq.history,
            drafted=share.draft[:i],
        )
        for i in range(share.drafts + 1)
    ]
