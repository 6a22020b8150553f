"""The engine: messages in, one step at a time, messages out.  Knows no sockets; see server.py.

    receive -> plan -> launch -> supply -> settle -> collect -> commit -> propose

With a runner of depth 1 the device stays a step ahead: a step is planned and launched before the
one before it is collected.  Only rows that need the host (a mask behind an unknown token) make the
loop collect and commit that one first, while the forward pass already runs.  When a closing plan
replaces the token that such a step was launched with, its row is computed in vain (Row.vain).

One thread owns it.  Other threads only put messages into `inbox`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from engine import outs
from engine.accept import Accepted, accept
from engine.build import build
from engine.cuda.buckets import sizes
from engine.cycles import Cycles
from engine.device import pick
from engine.failures import no_memory, no_token
from engine.guessing import Guessing, counted
from engine.intake import Intake
from engine.messages import (
    DRAFT_PLACES,
    Failed,
    Out,
    Stats,
    Step,
    ToGateway,
    TokenLogprobs,
)
from engine.pace import Pace
from engine.proposer import ASLEEP, FREE, HOST, AnyDraft, HostDrafts, head_maker, proposer
from engine.runner import Masked, StepRunner, StepTooLarge
from engine.scheduler import Scheduler
from engine.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.blocks import Block
    from engine.checkpoint import Checkpoint
    from engine.config import EngineConfig
    from engine.grammar.state import State
    from engine.plan import Plan, Row
    from engine.runner import Flight
    from engine.sequence import Sequence

log = logging.getLogger("engine.loop")

TOO_LARGE = (torch.OutOfMemoryError, StepTooLarge)  # what a step may fail with and the engine live
QUIET_S = 0.25  # without a step: a shorter pause is a client about to send its next request


class Engine:
    """One model replica: its scheduler, its runner, its open requests."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        drafts: HostDrafts | None = None,
        head: AnyDraft | None = None,
        progress: Callable[[int, int], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Load the model and make everything; `progress(done, total)` counts its tensors.

        `timeline` gets a span for each part.  Raise BadConfig, BadCheckpoint or BadWeights.
        """
        timeline = timeline or Timeline()
        kind = timeline.run("device", pick, config.device).type
        config = config.resolved(kind)
        drafts = drafts or proposer(config, kind)
        maker = head_maker(config, kind) if head is None else None
        drafting = any(one is not None for one in (drafts, head, maker))
        parts = build(config, checkpoint, head, progress, timeline, drafting, maker)
        self.config = config
        self.guessing = Guessing(
            drafts, parts.head, min(config.max_drafts, parts.runner.longest), parts.hello.vocab,
            parts.runner.short, piped=parts.runner.depth > 0,
        )
        self.hello = replace(parts.hello, draft_sources=self.guessing.sources)
        self.runner: StepRunner = parts.runner
        self.pool, self.sessions = parts.pool, parts.sessions
        steps = list(parts.runner.sizes) or sizes(config.max_batch_tokens)
        pace = Pace(steps, config.max_gap_s, config.mixed_tokens)
        self.scheduler = Scheduler(
            parts.pool, parts.sessions, config, pace, parts.runner.lookahead, parts.runner.short
        )
        self.intake = Intake(
            parts.hello, self.scheduler, parts.sessions, parts.compiler, self._forget,
            parts.runner.lacks, self.guessing.begin, self.guessing.ended,
        )
        self.inbox = self.intake.inbox
        self._compiler, self._masks = parts.compiler, parts.masks
        self._threads = parts.threads
        self._idle = False  # the last step found nothing to run: all that is left is paused
        self._out = 0  # steps that were launched and not committed
        self._number = 0
        self._generated = 0
        self._substituted = self._closed_early = self._unopened = self._redrawn = 0
        self._told = 0.0  # when the last Stats left
        self._ran = 0.0  # when the last step was launched
        self._guessed: Flight | None = None  # committed, and its chains are still to come
        self._cycles = Cycles(parts.runner.depth > 0)
        self.meanwhile: Callable[[], None] = lambda: None  # see Stepping

    # ---- the loop's three calls ------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to do, or after `timeout_s`."""
        if self._out or (self.busy and not self._idle):
            return
        quiet = time.monotonic() - self._ran > QUIET_S and self.intake.waits
        if not (quiet and self.runner.idle()):  # with more of that, look again at once
            self.intake.wait(timeout_s)

    def step(self) -> list[ToGateway]:
        """Handle every message that is here, run at most one step, return the replies."""
        self._take()
        replies = self.intake.receive()
        self._threads.update(time.monotonic())
        if self.scheduler.short:
            self._collect(0, replies)
        plan = self.scheduler.plan()
        self._idle = not plan.rows and not self._out
        if plan.rows:
            self._ran = time.monotonic()
            self._run(plan, replies)
        else:
            self._collect(0, replies)
            self._cycles.paused()
        return replies + self._heartbeat()

    def drain(self) -> list[ToGateway]:
        """Commit every step that flies: the host then knows all that the device does."""
        replies: list[ToGateway] = []
        self._collect(0, replies)
        self._take()
        return replies

    def close(self) -> None:
        """Stop the grammar pool."""
        self._compiler.close()

    @property
    def busy(self) -> bool:
        """Some sequence can run, or a step is under way."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._out)

    @property
    def exposed(self) -> bool:
        """See Stepping.  Of one sequence: with more, telling of an end later costs more."""
        waits = self._out or self._idle or self._guessed is not None
        return not waits and self.busy and self.scheduler.active == 1

    # ---- one step --------------------------------------------------------------------------------

    def _run(self, plan: Plan, replies: list[ToGateway]) -> None:
        """Fly the plan, or a smaller one while the device has no room for it.

        A request whose lone row does not fit ends; nobody else loses anything.
        """
        victims = 1
        while plan.rows:
            try:
                return self._fly(plan, replies)
            except TOO_LARGE as error:
                log.warning("a step of %d tokens was too large: %s", plan.tokens, error)
            self.scheduler.cancel(plan)
            self._collect(0, replies)  # preemption needs to know all that the device does
            left = [row.seq for row in plan.rows if not row.seq.gone]
            if any(row.draft for row in plan.rows):  # nobody is to yield to guesses
                self.guessing.retreat(left, self.scheduler.waiting)
                plan = self.scheduler.plan()
                continue
            if left and len(plan.rows) == 1:
                request = left[0].submit.id
                self.intake.abort(request)
                replies.append(no_memory(request))
            self.scheduler.retreat(left[1:], victims)
            victims *= 2
            plan = self.scheduler.plan()

    def _fly(self, plan: Plan, replies: list[ToGateway]) -> None:
        """Take a plan through the phases; collect what is old enough."""
        ahead = self.guessing.ahead(plan, self.scheduler)
        plan.guesses, plan.asleep = max(ahead, 0), ahead in (ASLEEP, HOST)
        flight = self.runner.launch(plan)
        self.meanwhile()
        flight.alone = not self._out
        self._out += 1
        try:
            if self._out > 1 and self._needs_host(plan):
                self._collect(1, replies)
            if plan.masked:
                self._supply(flight)
            self.runner.settle(flight)
        except TOO_LARGE:
            self._out -= 1
            raise
        self._collect(self.runner.depth if ahead in (FREE, ASLEEP) else 0, replies)

    def _needs_host(self, plan: Plan) -> bool:
        """Whether some row cannot be settled before the host knows what the step before drew."""
        if any(row.pending for row in plan.masked):
            return True
        return not self.runner.keeps_history and any(
            row.pending and row.seq.history is not None for row in plan.rows
        )

    def _collect(self, depth: int, replies: list[ToGateway]) -> None:
        """Commit all flights but the newest `depth`."""
        flights = self.runner.collect(depth)
        for flight in flights:
            self._out -= 1
            self.scheduler.pace.observe(flight.plan.tokens, flight.seconds)
            ran, before = self._cycles.ended(flight, len(flights)), self._generated
            replies += self._commit(flight)
            if ran.seconds and not self.guessing.rests:
                self.guessing.ran(ran._replace(tokens=self._generated - before))
            if flight.plan.guesses:
                self._guessed = flight
            else:
                self.guessing.propose(self.scheduler)

    def _take(self) -> None:
        """Take what the device has drafted meanwhile: replies are sent before it is waited for."""
        flight, self._guessed = self._guessed, None
        if flight is None:
            return
        self.guessing.prepare(self.scheduler)
        for row, chain in zip(flight.plan.rows, self.runner.guesses(flight), strict=False):
            seq = row.seq
            if chain and not (seq.gone or seq.finish or row.vain):
                self.guessing.take(seq, chain)
        self._cycles.drafted(flight)
        self.guessing.propose(self.scheduler)

    # ---- supply, commit --------------------------------------------------------------------------

    def _supply(self, flight: Flight) -> None:
        """Masks for all k + 1 rows of every constrained sequence, in one native call."""
        wanted: list[tuple[int, State, tuple[int, ...]]] = []
        lean: set[int] = set()
        at = 0
        for row in flight.plan.rows:
            if not row.last:
                continue
            seq, count = row.seq, len(row.draft) + 1
            if seq.grammar is not None and not seq.gone:
                if self._is_lean(row):
                    lean.add(len(wanted))
                wanted.append((at, seq.grammar, row.draft))
            at += count
        if wanted:
            masks, apart = self._masks, self.runner.takes_only
            rows = masks.fill(wanted, at, lean, apart)
            self.runner.supply(flight, Masked(rows, masks.filled, masks.only))

    def _is_lean(self, row: Row) -> bool:
        """Whether rows behind the first that is not forced go without a mask, if they are not.

        A mask costs the host tens to hundreds of microseconds, mostly for a token that was drawn
        without it, too: the largest of all logits, if it is legal, is the largest of those that
        are.  Where it is not, the place is drawn again; that costs a step's tokens, which on a CPU
        are dearer than masks.
        """
        return self.runner.depth > 0 and bool(row.draft) and row.seq.greedy

    def _commit(self, flight: Flight) -> list[ToGateway]:
        gained: list[Out] = []
        failed: dict[str, Failed] = {}
        unsound: list[Block] = []  # NaN in KV would fail every request that finds it
        scheduler, at, lone = self.scheduler, 0, 0
        alone = not flight.logprobs  # tokens are all that the step gave
        for row, drawn in zip(flight.plan.rows, flight.drawn, strict=True):
            seq = row.seq
            if seq.gone or row.replaced != seq.replaced:  # as Row.vain says
                scheduler.wasted += 1
            elif not row.last:
                scheduler.commit(row, None)
            elif alone and seq.free and not seq.draft and (token := drawn[0]) >= 0:
                finish = scheduler.commit_one(row, token)
                gained.append(outs.of_one(seq, token, finish))
                lone += 1
                if finish:
                    self._forget(seq)
            else:
                accepted = accept(drawn, row.draft, seq.end(lean=self._is_lean(row)))
                found = flight.logprobs[at : at + len(accepted.tokens)] if flight.logprobs else ()
                scores = [entry for entry in found if entry is not None]
                if accepted.forced and scores:
                    scores[-1] = outs.scored(accepted.tokens[-1], scores[-1])
                held = seq.blocks
                out = self._gain(row, accepted, scores)
                if out.tokens or out.finish:
                    gained.append(out)
                if accepted.finish == "error":
                    token = (*drawn, 0)[len(accepted.tokens)]
                    failure = failed[seq.submit.id] = no_token(seq, token, self.hello.vocab)
                    unsound += held if failure.code == "model_failed" else ()
                    self._compiler.forget(seq.submit.grammar)
            at += len(drawn)
        self._generated += lone
        self._number += 1
        replies: list[ToGateway] = [Step(self._number, gained)] if gained else []
        for request, failure in failed.items():  # only now: its other choices had rows of this step
            self.intake.abort(request)
            replies.append(failure)
        self.pool.discard(unsound)
        return replies

    def _gain(self, row: Row, accepted: Accepted, logprobs: list[TokenLogprobs]) -> Out:
        """Book what a row gave."""
        seq = row.seq
        if seq.history is not None:
            for token in accepted.tokens:
                seq.history.add(token)
        self._generated += len(accepted.tokens)
        if row.draft:
            self.guessing.booked(row, accepted)
        self.scheduler.commit(row, accepted)
        if accepted.forced:
            self._substituted += 1
        if accepted.forced or (accepted.undrawn and seq.history is not None):
            self.runner.forget(seq)  # it holds another newest token, and has counted that one
        self._redrawn += accepted.undrawn
        overflow = outs.overflow(seq, accepted)
        self._closed_early += overflow == "closed"
        self._unopened += overflow == "unopened"
        if seq.finish:
            self._forget(seq)
        return outs.of_run(seq, accepted, logprobs, overflow)

    def _forget(self, seq: Sequence) -> None:
        """A sequence is over: take it out everywhere."""
        self.scheduler.drop(seq)
        self.runner.forget(seq)
        self.guessing.forget(seq)
        if seq.submit.id not in self.scheduler.living:
            self.intake.ended(seq.submit.id)

    # ---- heartbeat -------------------------------------------------------------------------------

    def _heartbeat(self) -> list[ToGateway]:
        now = time.monotonic()
        if now - self._told < (self.config.stats_s if self.busy else self.config.heartbeat_s):
            return []
        self._told = now
        return [self.stats()]

    def stats(self) -> Stats:
        """Gauges and counters as of now."""
        scheduler, pool, guessing = self.scheduler, self.pool, self.guessing
        return Stats(
            step=self._number,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            compiling=len(self.intake.compiling),
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_total=pool.total,
            prompt_tokens=self.intake.prompt_tokens,
            generated_tokens=self._generated,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            drafts=guessing.rounds,
            drafted_tokens=guessing.drafted,
            accepted_tokens=guessing.accepted,
            sessions=len(self.sessions),
            sessions_pinned=self.sessions.pinned,
            closing_refusals=self.intake.refused,
            closing_tokens=self._substituted,
            closed_early=self._closed_early,
            unopened=self._unopened,
            redrawn=self._redrawn,
            draft_sources=counted(guessing.verified, guessing.matched),
            draft_places=guessing.places[:DRAFT_PLACES],
        )
