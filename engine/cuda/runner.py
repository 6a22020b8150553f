"""The device side of a step on one GPU, running a step ahead of the host.  Chooses no rows.

    launch   integers to the device (one copy), forward graph
    supply   grammar masks to the device
    settle   settle graph: draw, walk drafts, newest token to its slot; results home, event
    collect  wait for the event

All of it is queued on one stream, so that order is the only synchronisation: a slot or a block that
the host gave to another sequence is written by the old one's last step before the new one's first.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection
from threading import Event
from typing import TYPE_CHECKING

import torch

from engine.cuda.chaining import Chaining
from engine.cuda.events import enter, stream
from engine.cuda.flight import CudaFlight, Most
from engine.cuda.forward import Forward, Limits, layer_bytes, noted
from engine.cuda.graphs import Graphs
from engine.cuda.laps import Laps
from engine.cuda.ops import KernelOps
from engine.cuda.picks import EVERY, Picks, overlapping, promised, store_path
from engine.cuda.plain import plain
from engine.cuda.settle import Settling
from engine.cuda.slots import Slots
from engine.cuda.warming import FILTERED, Bucket, Drafted, Drawn, Forwarded, every, ordered, rare
from engine.device import processors
from engine.drafting import guess
from engine.kernels.attention_plan import SHORT, short_tile
from engine.kernels.decode_attention import DecodeScratch
from engine.kernels.decode_attention import workers as attention_workers
from engine.kernels.launch import compiling
from engine.kernels.sampler_tables import refusal
from engine.proposer import LENGTHS, CapturedDraft

if TYPE_CHECKING:
    from cache.pages import Pages
    from engine.messages import Submit
    from engine.model_config import ModelConfig
    from engine.models import Model
    from engine.plan import Plan
    from engine.proposer import AnyDraft, DeviceDraft
    from engine.runner import Flight, Masked
    from engine.sequence import Sequence
    from engine.timeline import Timeline

SPLITS = {32: 64, 64: 128, 128: 256}  # positions of an attention split by head dimension
SCRATCH = 1 << 30  # most bytes of attention scratch
LOADERS = 2  # threads that load kernels: more would wait for Python's lock, and make others wait


class CudaRunner:
    """Runs plans on one model with one pool of pages.

    On a CPU (tests, with Triton's interpreter) it does the same without graphs.
    """

    keeps_history = takes_only = True
    longest = SHORT - 1

    def __init__(
        self, model: Model, shape: ModelConfig, pages: Pages, most: Most,
        head: AnyDraft | None = None, *, capture: bool = False,
    ) -> None:  # fmt: skip
        """`pages` has one block more than the pool gives out: padded tokens write there.

        `capture` graphs, which needs a GPU; a device draft that is no CapturedDraft runs without.
        """
        self.model, self.pages, self.most, self._draft = model, pages, most, head
        self.head: DeviceDraft | None = None  # one that the host must feed
        if head is not None and not isinstance(head, CapturedDraft):
            self.head = head
        self.device = pages.data.device
        on_gpu = self.device.type == "cuda"
        self.depth = 0 if self.head is not None else 1
        self._stream = stream(self.device) if on_gpu else None
        if self._stream is not None:  # weights may still be on their way
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._laps = Laps(self._stream) if self._stream is not None else None
        self._graphs = Graphs(capture and self.head is None)
        self._flights: deque[CudaFlight] = deque()
        self._later: deque[Bucket] = deque()  # to be captured when nobody waits
        self._rare: deque[Bucket] = deque()  # and then to be run once, which loads their kernels
        enter(self._stream)
        with torch.inference_mode():
            if head is not None:
                head.reserve(pages.blocks, pages.size, pages.data.dtype, self.device)
            self._make(shape)

    def _make(self, shape: ModelConfig) -> None:
        most, pages = self.most, self.pages
        dtype, device = pages.data.dtype, self.device
        split = SPLITS[shape.head_dim]
        each = shape.kv_heads * 16 * (shape.head_dim + 2) * 4
        splits, tile = -(-most.max_len // split), short_tile(shape.heads // shape.kv_heads)
        row = -(-SHORT // tile) * splits  # of the largest short row: alone it always fits
        tiles = -(-min(most.drafts + 1, SHORT) // tile)
        items = max(row, min(SCRATCH // each, most.rows * tiles * splits))
        copies = self.depth + 2
        limits = Limits(most.tokens, most.rows, most.max_len, pages.size, split, items, copies)
        layer = layer_bytes(self.model)
        self.picks = picks = Picks(device, store_path(), overlapping(layer), promised(layer))
        self.short = EVERY if picks.promised == EVERY else SHORT
        noted(picks, self.model, shape.head_dim, dtype)
        width = -(-(most.max_len + self.lookahead) // pages.size)
        self.slots = Slots(most.rows, width, shape.vocab, device, self._graphs)
        ops = KernelOps(
            shape, pages.data, self.slots.tables.last, picks,
            DecodeScratch.allocate(items, shape.kv_heads, shape.head_dim, device),
            most=most.tokens, max_len=most.max_len, split=split,
            workers=attention_workers(processors(device), shape.kv_heads),
            taps=len(self._draft.taps) if self._draft is not None else 0,
        )  # fmt: skip
        trash = (pages.blocks - 1) * pages.size
        self.forward = Forward(
            self.model, shape, ops, self.slots, picks, self._graphs, limits, trash
        )
        self.settling = Settling(
            self.model, ops.x, self.forward.tokens, self.slots.tables, picks, self._graphs,
            rows=min(most.tokens, most.rows * (most.drafts + 1)), groups=most.rows,
            vocab=shape.vocab, eps=shape.rms_eps, copies=copies,
        )  # fmt: skip
        self.chaining = Chaining(
            self._draft, self.forward, self.slots, self.settling.results, self._graphs,
            tokens=most.tokens, rows=most.rows, drafts=most.drafts, size=pages.size, trash=trash,
            copies=copies,
        ) if isinstance(self._draft, CapturedDraft) else None

    @property
    def lookahead(self) -> int:
        """Slots that a sequence needs beyond its wanted tokens: the device draft writes ahead."""
        longest = LENGTHS[-1] if isinstance(self._draft, CapturedDraft) else self.most.drafts
        return min(self.most.drafts, longest) + 1 if self._draft is not None else 0

    @property
    def sizes(self) -> Collection[int]:
        """See StepRunner."""
        return self.forward.sizes

    @property
    def blocks(self) -> int:
        """All blocks of the pages but the one that padded tokens write to."""
        return self.pages.blocks - 1

    def lacks(self, submit: Submit) -> str:
        """See StepRunner."""
        return refusal(submit.sampling, submit.stop_ids)

    # ---- the phases ------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """See StepRunner.  Fresh blocks are not cleared: the kernels mask what was not written."""
        lap = self._laps.begin(len(plan.rows)) if self._laps is not None else None
        graphs = len(self._graphs)
        enter(self._stream)
        for source, target in plan.copies:
            self.pages.copy(source, target)
            if self._draft is not None:
                self._draft.copy(source, target)
        if self.chaining is not None:
            self.chaining.known.follow(plan)
        places = self.slots.placed(plan.rows)
        self.slots.upload()
        even = plain(plan.rows, places, self.slots, self.pages.size)
        staged, chain = self.forward.stage(plan.rows, places, even), None
        if lap is not None:
            lap.kind = staged
        try:
            self.forward.run(staged)  # the device computes while the rest is prepared
            draw = self.settling.prepare(plan.rows, places, even)
            # Before a step that flies is committed; where none does, once settle is queued.
            late = (places, staged.size) if not self._flights else None
            if self.chaining is not None and late is None:
                chain = self.chaining.stage(plan, places, staged.size)
        except BaseException:
            self._lose(plan)
            raise
        flight = CudaFlight(plan, draw=draw, plain=even.whole, lap=lap, graphs=graphs, chain=chain,
                            late=late)
        self._flights.append(flight)
        return flight

    @torch.inference_mode()
    def supply(self, flight: Flight, masked: Masked) -> None:
        """See StepRunner."""
        assert isinstance(flight, CudaFlight)
        if flight.draw is not None:
            enter(self._stream)
            self.settling.supply(flight.draw, masked)

    @torch.inference_mode()
    def settle(self, flight: Flight) -> None:
        """See StepRunner."""
        assert isinstance(flight, CudaFlight)
        try:
            enter(self._stream)
            if flight.draw is not None:
                self.settling.stage(flight.draw)
                self.settling.run(flight.draw)
                self.settling.fetch(flight.draw)
            if self._laps is not None and flight.lap is not None:
                self._laps.end(flight.lap)
            if self.chaining is not None:
                self._chain(self.chaining, flight)
            if flight.lap is not None and len(self._graphs) > flight.graphs:
                flight.lap.kind = None  # something was captured, too: nothing to go by
            if self.head is not None:
                self._read(flight)
                taps = self.forward.hidden.taps if self.forward.hidden is not None else None
                assert taps is not None, "the model was built without the draft's taps"
                flight.drafts = guess(self.head, flight.plan, flight.drawn, taps,
                                      self.pages.size,
                                      min(self.most.drafts, flight.plan.guesses))
        except BaseException:
            self._flights.remove(flight)
            self._lose(flight.plan)
            raise

    def _chain(self, chaining: Chaining, flight: CudaFlight) -> None:
        """Draft behind the results, which are on their way home."""
        if flight.late is not None:
            flight.chain = chaining.stage(flight.plan, *flight.late)
        if (chain := flight.chain) is None:
            return
        chaining.run(chain)
        chaining.fetch(chain)
        if self._laps is not None and flight.lap is not None:
            if chain.depth:
                self._laps.chain(flight.lap)
            elif flight.plan.guesses:
                flight.lap.kind = None  # its time says nothing of what chains cost

    def _lose(self, plan: Plan) -> None:
        """Have all rows' sequences written anew: what this step did of them is not known."""
        for row in plan.rows:
            self.slots.forget(row.seq)

    def collect(self, depth: int) -> list[Flight]:
        """See StepRunner."""
        ready: list[Flight] = []
        while len(self._flights) > depth:
            flight = self._flights.popleft()
            if self.head is None:
                self._read(flight)
            ready.append(flight)
        return ready

    def guesses(self, flight: Flight) -> list[list[int]]:
        """See StepRunner."""
        assert isinstance(flight, CudaFlight)
        if self.chaining is None or flight.chain is None or not flight.chain.depth:
            return flight.drafts
        if self._laps is not None and flight.lap is not None:
            flight.chain_s = self._laps.wait_chain(flight.lap)
        return self.chaining.collect(flight.chain, flight.plan)

    def _read(self, flight: CudaFlight) -> None:
        """Wait for a step's results and cut them by row."""
        if self._laps is not None and flight.lap is not None:
            flight.seconds = self._laps.wait(flight.lap)
        tokens: list[int] = []
        if flight.draw is not None:
            tokens, flight.logprobs = self.settling.collect(flight.draw)
        if flight.plain:
            flight.drawn = [[token] for token in tokens]
            return
        begin = 0
        drawn = flight.drawn
        for row in flight.plan.rows:
            end = begin + (len(row.draft) + 1 if row.last else 0)
            drawn.append(tokens[begin:end])
            begin = end

    def forget(self, seq: Sequence) -> None:
        """See StepRunner."""
        self.slots.forget(seq)

    # ---- before the first step -------------------------------------------------------------------

    @torch.inference_mode()
    def largest(self) -> None:
        """Run the largest step, on no rows: what it allocates is what any step may."""
        enter(self._stream)
        self.forward.run(self.forward.empty(self.forward.sizes[-1], chunks=True))
        if self.chaining is not None:
            self.chaining.largest()
        self.settling.run(self.settling.empty(self.settling.sizes[-1], FILTERED, masked=True))

    @torch.inference_mode()
    def compile(self, stop: Event | None = None) -> None:
        """Compile and load every kernel that a plan may need, on all cores, or until `stop` is set.

        The weights are not read: they may be without values.
        """
        threads = os.cpu_count() or 1
        enter(self._stream)
        with compiling(threads, self.device, stop), self._graphs.dry():
            for group, size in self._products():
                self.picks.compile(group, size)
            for bucket in every(*self._sizes):
                self._visit(bucket)

    @torch.inference_mode()
    def load(self, stop: Event | None = None) -> bool:
        """Load what a start launches, if all of that is in Triton's cache; whether it was.

        For a start after one that compiled everything.  Loading takes Python's lock, which weights
        want too, so other kernels come when the engine is idle, or at their first use.
        """
        if not all(self.picks.known(*product) for product in self._products()):
            return False
        self._keep()
        missed, (steps, draws, chains) = Event(), self._sizes
        first = [*ordered(steps, draws, chains)[0], Forwarded(steps[-1], True),
                 Drawn(draws[-1], FILTERED, True), *map(Drafted, chains[-1:])]  # as in `largest`
        enter(self._stream)
        with compiling(LOADERS, self.device, stop, missed), self._graphs.dry():
            for bucket in first:
                if missed.is_set():
                    break
                self._visit(bucket)
        return not missed.is_set()

    @torch.inference_mode()
    def warm(self, timeline: Timeline) -> None:
        """Pick products, capture the first buckets; `timeline` gets a span for each of these.

        Kernels that `compile` has not made ready are compiled one by one.
        """
        enter(self._stream)
        with timeline.span("picks"):
            self.slots.warm()
            for group, size in self._products():
                self.picks.tune(group, size)
            self.picks.save()
        self._keep()
        with timeline.span("graphs"):
            first, later = ordered(*self._sizes)
            for wanted in first:
                self._visit(wanted)
            self._later += later
            self._rare += rare(self.settling.sizes)
            if self._stream is not None:
                self._stream.synchronize()

    @torch.inference_mode()
    def idle(self) -> bool:
        """See StepRunner: capture one bucket, or load what one needs that few requests want."""
        if not (self._later or self._rare):
            return False
        try:
            enter(self._stream)
            if self._later:
                self._visit(self._later.popleft())
            else:
                with self._graphs.dry():
                    self._visit(self._rare.popleft())
            full = self._graphs.full
        except torch.OutOfMemoryError:
            full = True
        if full:  # what is left is tried again where a step needs it
            self._later.clear()
            self._rare.clear()
        return bool(self._later or self._rare)

    def _keep(self) -> None:
        """Use the sizes of a step that measured products make worth it."""
        if self._stream is not None:
            self.forward.keep(lambda size: self.picks.cost("layer", size))

    @property
    def _sizes(self) -> tuple[list[int], list[int], list[int]]:
        """Buckets of flat tokens, of rows that draw, and of sequences that a device drafts for."""
        return (self.forward.sizes, self.settling.sizes,
                self.chaining.sizes if self.chaining is not None else [])

    def _products(self) -> list[tuple[str, int]]:
        """Groups of products, and the rows that they are run with."""
        return [*(("layer", size) for size in self.forward.sizes),
                *(("head", size) for size in self.settling.sizes)]

    def _visit(self, wanted: Bucket) -> None:
        """Run one bucket on no rows, which captures it if it is new."""
        if isinstance(wanted, Forwarded):
            self.forward.run(self.forward.empty(wanted.size, chunks=wanted.chunks))
            if self.chaining is not None and not wanted.chunks:
                self.chaining.warm(wanted.size, draws=False)
        elif isinstance(wanted, Drawn):
            draw = self.settling.empty(wanted.size, wanted.needs, masked=wanted.masked)
            self.settling.run(draw)
        elif self.chaining is not None:
            self.chaining.warm(wanted.size, draws=True)
