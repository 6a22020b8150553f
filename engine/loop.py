"""The engine: messages in, one step at a time, messages out.  Knows no sockets; see server.py.

    receive -> plan -> launch -> supply -> settle -> collect -> commit -> propose

One thread owns it.  Other threads only put messages into `inbox`.
"""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cache.prefix as prefix
from engine.accept import Accepted, accept
from engine.admission import refusal
from engine.build import build
from engine.device import pick
from engine.grammar.matcher import Compiled, GrammarRefused, State
from engine.messages import (
    Abort,
    Admitted,
    Failed,
    Out,
    Pause,
    Refused,
    Resume,
    SessionEnd,
    Stats,
    Step,
    Submit,
    ToEngine,
    ToGateway,
    TurnEnd,
)
from engine.proposer import DeviceDraft, HostDrafts, Turn
from engine.sampling import History, needs_history
from engine.scheduler import PATIENCE, Plan, Row, Scheduler
from engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from engine.checkpoint import Checkpoint
    from engine.config import EngineConfig
    from engine.runner import Flight

log = logging.getLogger("engine.loop")

# Steps that the device runs ahead of the host.  A CPU has nothing to run ahead with; a deeper loop
# must also plan around the rows that are in flight.
DEPTH = 0


@dataclass(frozen=True, slots=True)
class _CompileDone:
    """From the grammar pool to the loop."""

    submit: Submit
    result: Compiled | GrammarRefused


class Engine:
    """One model replica: its scheduler, its runner, its open requests."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        drafts: HostDrafts | None = None,
        head: DeviceDraft | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the model and make everything; `progress(done, total)` counts its tensors.

        Raise BadConfig, BadCheckpoint or BadWeights.
        """
        config = config.resolved(pick(config.device).type)
        parts = build(config, checkpoint, head, progress)
        self.config = config
        self.hello = parts.hello
        self.runner = parts.runner
        self.pool, self.sessions = parts.pool, parts.sessions
        self.scheduler = Scheduler(parts.pool, parts.sessions, config, parts.runner.lookahead)
        self.inbox: queue.SimpleQueue[ToEngine | _CompileDone] = queue.SimpleQueue()
        self._compiler, self._masks = parts.compiler, parts.masks
        self._threads = parts.threads
        self._drafts = drafts
        self._compiling: dict[str, Submit] = {}
        self._arrived: dict[str, float] = {}  # request id -> monotonic seconds, while it lives
        self._early: list[ToEngine | _CompileDone] = []  # taken by wait(), not yet handled
        self._idle = False  # the last step found nothing to run: all that is left is paused
        self._number = 0
        self._prompt_tokens = self._generated = 0
        self._rounds = self._drafted = self._accepted = 0
        self._told = 0.0  # when the last Stats left

    # ---- the loop's three calls ------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to do, or after `timeout_s`."""
        if self._early or (self.busy and not self._idle):
            return
        try:
            self._early.append(self.inbox.get(timeout=timeout_s))
        except queue.Empty:
            return

    def step(self) -> list[ToGateway]:
        """Handle every message that is here, run at most one step, return the replies."""
        replies = self._receive()
        self._threads.update(time.monotonic())
        plan = self.scheduler.plan()
        self._idle = not plan.rows
        if plan.rows:
            flight = self.runner.launch(plan)
            self.runner.supply(flight, self._supply(plan))
            self.runner.settle(flight)
        for done in self.runner.collect(DEPTH):
            replies += self._commit(done)
            self._propose()
        return replies + self._heartbeat()

    def close(self) -> None:
        """Stop the grammar pool."""
        self._compiler.close()

    @property
    def busy(self) -> bool:
        """Some sequence can run."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    # ---- receive ---------------------------------------------------------------------------------

    def _receive(self) -> list[ToGateway]:
        replies: list[ToGateway] = []
        messages, self._early = self._early, []
        while True:
            try:
                messages.append(self.inbox.get_nowait())
            except queue.Empty:
                break
        for message in messages:
            replies += self._handle(message)
        return replies + self._expire()

    def _handle(self, message: ToEngine | _CompileDone) -> list[ToGateway]:
        match message:
            case Submit():
                return self._submit(message)
            case _CompileDone(submit=submit, result=result):
                return self._compiled(submit, result)
            case Abort(id=request, index=index):
                self._abort(request, index)
            case TurnEnd(session=session, tool_call=tool_call):
                self.sessions.turn_ended(session, tool_call)
            case Pause(id=request):
                self.scheduler.pause(request)
            case Resume(id=request):
                self.scheduler.paused.discard(request)
            case SessionEnd(session=session):
                self.sessions.ended(session)
            case _:
                raise TypeError(f"engine got {type(message).__name__}; expected a ToEngine message")
        return []

    def _submit(self, submit: Submit) -> list[ToGateway]:
        if submit.id in self._arrived:
            text = f"Request id {submit.id} is running. Use another."
            return [Refused(submit.id, "duplicate_request", text)]
        if (reason := refusal(submit, self.hello)) is not None:
            return [reason]
        self._arrived[submit.id] = time.monotonic()
        if submit.session is not None:
            self.sessions.touch(submit.session)
        if submit.grammar is None:
            return self._start(submit, None)
        if (known := self._compiler.cached(submit.grammar)) is not None:
            return self._start(submit, known)
        self._compiling[submit.id] = submit
        self._compiler.submit(
            submit.grammar, lambda result: self.inbox.put(_CompileDone(submit, result))
        )
        return []

    def _compiled(self, submit: Submit, result: Compiled | GrammarRefused) -> list[ToGateway]:
        if self._compiling.get(submit.id) is not submit:
            return []  # aborted meanwhile, and perhaps sent again
        del self._compiling[submit.id]
        if isinstance(result, GrammarRefused):
            del self._arrived[submit.id]
            assert submit.grammar is not None
            return [Refused(submit.id, result.code, result.message, submit.grammar.param)]
        return self._start(submit, result)

    def _start(self, submit: Submit, grammar: Compiled | None) -> list[ToGateway]:
        """Queue the request's choices: the first one, with the others to fork from it."""
        root = prefix.root(submit.namespace)
        cached = self.scheduler.lookup(root, submit.prompt)
        arrival = self._arrived[submit.id]
        rank = arrival + (len(submit.prompt) - cached) / PATIENCE
        deadline = None if submit.deadline_s is None else arrival + submit.deadline_s
        choices = [
            Sequence(
                submit, index, root, rank, list(submit.prompt), arrival,
                grammar=grammar.start() if grammar is not None else None,
                history=History(submit.prompt) if needs_history(submit.sampling) else None,
                deadline_s=deadline,
            )
            for index in range(submit.n)
        ]
        choices[0].siblings = choices[1:]
        queued = len(self.scheduler.waiting)
        self.scheduler.add(choices[0])
        self._prompt_tokens += len(submit.prompt)
        return [Admitted(submit.id, cached, queued)]

    def _abort(self, request: str, index: int) -> None:
        if index < 0 and self._compiling.pop(request, None) is not None:
            self._arrived.pop(request, None)
            return
        for seq in reversed(self.scheduler.find(request, index)):
            self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        """A sequence is over: take it out everywhere."""
        self.scheduler.drop(seq)
        if self._drafts is not None:
            self._drafts.forget(seq.key)
        if not self.scheduler.find(seq.submit.id):
            self._arrived.pop(seq.submit.id, None)
            self.scheduler.paused.discard(seq.submit.id)

    def _expire(self) -> list[ToGateway]:
        """End what is past its deadline, running or not."""
        now = time.monotonic()
        late = {
            seq.submit.id
            for seq in (*self.scheduler.waiting, *self.scheduler.running)
            if seq.deadline_s is not None and seq.deadline_s < now
        }
        late |= {
            submit.id
            for submit in self._compiling.values()
            if submit.deadline_s is not None and self._arrived[submit.id] + submit.deadline_s < now
        }
        for request in late:
            self._abort(request, -1)
        return [
            Failed(request, "deadline_exceeded", "The request's deadline passed before it ended.")
            for request in late
        ]

    # ---- supply, commit, propose -----------------------------------------------------------------

    def _supply(self, plan: Plan) -> Tensor | None:
        """Masks for all k + 1 rows of every constrained sequence, in one native call."""
        wanted: list[tuple[int, State, list[int]]] = []
        at = 0
        for row in plan.rows:
            if row.last:
                if row.seq.grammar is not None:
                    wanted.append((at, row.seq.grammar, row.seq.draft[: row.drafts]))
                at += row.drafts + 1
        return self._masks.fill(wanted, at) if wanted else None

    def _commit(self, flight: Flight) -> list[ToGateway]:
        outs: list[Out] = []
        failed: dict[str, Sequence] = {}
        assert flight.sampled is not None
        at = 0
        for i, (row, drawn) in enumerate(zip(flight.plan.rows, flight.drawn(), strict=True)):
            if not row.last:
                self.scheduler.commit(row, None)
                continue
            accepted = accept(drawn, row.seq.draft[: row.drafts], row.seq.end())
            outs.append(self._gain(row, accepted, flight, at))
            at += len(drawn)
            if accepted.finish == "error":
                failed[row.seq.submit.id] = row.seq
            elif flight.drafts and not row.seq.finish:
                self._take_draft(row.seq, flight.drafts[i])
        self._number += 1
        outs = [out for out in outs if out.tokens or out.finish]
        replies: list[ToGateway] = [Step(self._number, outs)] if outs else []
        for request, seq in failed.items():  # only now: its other choices had rows of this step
            self._abort(request, -1)
            replies.append(_grammar_failed(seq))
        return replies

    def _gain(self, row: Row, accepted: Accepted, flight: Flight, at: int) -> Out:
        """Book what a row gave; `at` is where its logprobs begin."""
        seq = row.seq
        if seq.history is not None:
            for token in accepted.tokens:
                seq.history.add(token)
        self._generated += len(accepted.tokens)
        self._rounds += row.drafts > 0
        self._drafted += row.drafts
        self._accepted += accepted.matched
        self.scheduler.commit(row, accepted)
        if seq.finish:
            self._forget(seq)
        assert flight.sampled is not None
        found = flight.sampled.logprobs[at : at + len(accepted.tokens)]
        return Out(
            seq.submit.id, seq.index, accepted.tokens,
            finish="" if accepted.finish == "error" else accepted.finish,
            stopped=accepted.stopped,
            logprobs=[entry for entry in found if entry is not None],
            cached=seq.cached or 0,
            written=seq.written,
            drafted=seq.drafted,
            accepted=seq.accepted,
        )

    def _propose(self) -> None:
        """Ask the host proposer for the sequences that the device did not draft for."""
        if self._drafts is None:
            return
        for seq in self.scheduler.running:
            limit = min(self.config.max_drafts, seq.remaining - 1)
            if not seq.decoding or seq.draft or limit < 1:
                continue
            turn = Turn(
                seq.key, seq.tokens, seq.prompt_len, limit, seq.submit.session,
                seq.submit.namespace, seq.grammar.forced if seq.grammar is not None else _nothing,
            )
            draft = self._drafts.propose(turn)
            self._take_draft(seq, draft.tokens[:limit])

    def _take_draft(self, seq: Sequence, tokens: list[int]) -> None:
        """Keep the legal beginning of a guess: what the grammar cannot take is not worth a row."""
        if seq.grammar is not None:
            tokens = tokens[: seq.grammar.valid_prefix(tokens)]
        seq.draft = tokens

    # ---- heartbeat -------------------------------------------------------------------------------

    def _heartbeat(self) -> list[ToGateway]:
        now = time.monotonic()
        if now - self._told < (self.config.stats_s if self.busy else self.config.heartbeat_s):
            return []
        self._told = now
        return [self.stats()]

    def stats(self) -> Stats:
        """Gauges and counters as of now."""
        scheduler, pool = self.scheduler, self.pool
        return Stats(
            step=self._number,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            compiling=len(self._compiling),
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_total=pool.total,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            drafts=self._rounds,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            sessions=len(self.sessions),
            sessions_pinned=self.sessions.pinned,
        )


def _nothing() -> list[int]:
    """What a sequence without a grammar is forced to say."""
    return []


def _grammar_failed(seq: Sequence) -> Failed:
    log.warning("request %s: no legal token at position %d", seq.submit.id, len(seq.tokens))
    return Failed(
        seq.submit.id, "grammar_failed",
        "The model had no legal token left here, so the answer could not be continued. "
        "Send the request again; if it fails again, simplify the schema.",
    )
