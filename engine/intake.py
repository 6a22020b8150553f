"""Requests on their way in: admission, grammars, aborts, deadlines.  Runs no step."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import cache.prefix as prefix
from engine.admission import refusal
from engine.grammar.closing import Closing
from engine.grammar.matcher import Compiled, Compiler, GrammarRefused
from engine.messages import (
    Abort,
    Admitted,
    Failed,
    Hello,
    Out,
    Pause,
    Refused,
    Resume,
    SessionEnd,
    Step,
    Submit,
    ToEngine,
    ToGateway,
    TurnEnd,
)
from engine.sampling import History, needs_history
from engine.scheduler import PATIENCE, Scheduler
from engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.sessions import SessionTable


@dataclass(frozen=True, slots=True)
class _CompileDone:
    """From the grammar pool to the loop."""

    submit: Submit
    result: Compiled | GrammarRefused


class Intake:
    """The messages that wait, and the requests that are open.

    One thread owns it.  Other threads only put messages into `inbox`.
    """

    def __init__(
        self,
        hello: Hello,
        scheduler: Scheduler,
        sessions: SessionTable,
        compiler: Compiler,
        forget: Callable[[Sequence], None],
        lacks: Callable[[Submit], str],
        begin: Callable[[Sequence, int], None],
        over: Callable[[bytes], None],
    ) -> None:
        """`forget` takes an aborted sequence out everywhere, and calls `ended` after the last.

        `lacks` says why the device cannot run a request, or nothing when it can; `begin` may guess
        how the first choice of one begins, of whose prompt so many tokens are to be computed;
        `over` hears of sessions that ended.
        """
        self.inbox: queue.SimpleQueue[ToEngine | _CompileDone] = queue.SimpleQueue()
        self.compiling: dict[str, Submit] = {}
        self.arrived: dict[str, float] = {}  # request id -> monotonic seconds, while it lives
        self.prompt_tokens = 0  # of all requests that were queued
        self.refused = 0  # requests whose shortest output is longer than their max_tokens
        self._hello, self._scheduler, self._sessions = hello, scheduler, sessions
        self._compiler, self._forget, self._lacks = compiler, forget, lacks
        self._begin, self._over = begin, over
        self._early: list[ToEngine | _CompileDone] = []  # taken by wait(), not yet handled
        self._soonest = inf  # monotonic: no deadline is before it

    @property
    def waits(self) -> bool:
        """No message is here."""
        return not self._early and self.inbox.empty()

    def wait(self, timeout_s: float) -> None:
        """Return when a message is here, or after `timeout_s`."""
        if self._early:
            return
        try:
            self._early.append(self.inbox.get(timeout=timeout_s))
        except queue.Empty:
            return

    def receive(self) -> list[ToGateway]:
        """Handle every message that is here; end what is past its deadline."""
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
                self.abort(request, index)
            case TurnEnd(session=session, tool_call=tool_call):
                self._sessions.turn_ended(session, tool_call)
            case Pause(id=request):
                self._scheduler.pause(request)
            case Resume(id=request):
                self._scheduler.paused.discard(request)
            case SessionEnd(session=session):
                self._sessions.ended(session)
                self._over(session)
            case _:
                raise TypeError(f"engine got {type(message).__name__}; expected a ToEngine message")
        return []

    def _submit(self, submit: Submit) -> list[ToGateway]:
        if submit.id in self.arrived:
            text = f"Request id {submit.id} is running. Use another."
            return [Refused(submit.id, "duplicate_request", text)]
        if (reason := refusal(submit, self._hello)) is not None:
            return [reason]
        if why := self._lacks(submit):
            return [Refused(submit.id, "invalid_value", why)]
        self.arrived[submit.id] = now = time.monotonic()
        if submit.deadline_s is not None:
            self._soonest = min(self._soonest, now + submit.deadline_s)
        if submit.session is not None:
            self._sessions.touch(submit.session)
        if submit.grammar is None:
            return self._start(submit, None)
        if (known := self._compiler.cached(submit.grammar)) is not None:
            return self._start(submit, known)
        self.compiling[submit.id] = submit
        self._compiler.submit(
            submit.grammar, lambda result: self.inbox.put(_CompileDone(submit, result))
        )
        return []

    def _compiled(self, submit: Submit, result: Compiled | GrammarRefused) -> list[ToGateway]:
        if self.compiling.get(submit.id) is not submit:
            return []  # aborted meanwhile, and perhaps sent again
        del self.compiling[submit.id]
        if isinstance(result, GrammarRefused):
            del self.arrived[submit.id]
            assert submit.grammar is not None
            param = submit.grammar.param
            return [Refused(submit.id, result.code, result.message, param, result.status)]
        return self._start(submit, result)

    def _start(self, submit: Submit, grammar: Compiled | None) -> list[ToGateway]:
        """Queue the request's choices: the first one, with the others to fork from it.

        A grammar that max_tokens cannot satisfy is answered here, with nothing.
        """
        root = prefix.root(submit.namespace)
        cached = self._scheduler.lookup(root, submit.prompt)
        closing = None
        if grammar is not None and submit.overflow != "cut":
            closing = Closing(grammar.planner, grammar.start())
            if not closing.admit(submit.max_tokens):
                return self._nothing(submit, cached)
        arrival = self.arrived[submit.id]
        rank = arrival + (len(submit.prompt) - cached) / PATIENCE
        choices = [
            Sequence(
                submit, index, root, rank, list(submit.prompt), arrival,
                grammar=grammar.start() if grammar is not None else None,
                history=History(submit.prompt) if needs_history(submit.sampling) else None,
            )
            for index in range(submit.n)
        ]
        if closing is not None:
            for seq in choices:
                assert seq.grammar is not None
                seq.closing = closing.clone(seq.grammar)
        self._begin(choices[0], len(submit.prompt) - cached)
        queued = len(self._scheduler.waiting)
        self._scheduler.add(choices)
        self.prompt_tokens += len(submit.prompt)
        return [Admitted(submit.id, cached, queued)]

    def _nothing(self, submit: Submit, cached: int) -> list[ToGateway]:
        """The answer of a request whose shortest output does not fit: it ends before it begins."""
        self.refused += 1
        del self.arrived[submit.id]
        outs = [
            Out(submit.id, index, [], "length", cached=cached, overflow="unopened")
            for index in range(submit.n)
        ]
        return [Admitted(submit.id, cached, 0), Step(0, outs)]  # of no step

    def abort(self, request: str, index: int = -1) -> None:
        """End a request, or one choice of it; unknown ones are ignored."""
        if index < 0 and self.compiling.pop(request, None) is not None:
            self.arrived.pop(request, None)
            return
        for seq in reversed(self._scheduler.find(request, index)):
            self._forget(seq)

    def ended(self, request: str) -> None:
        """No choice of the request lives any more."""
        self.arrived.pop(request, None)

    def _expire(self) -> list[ToGateway]:
        """End what is past its deadline, running, waiting or compiling."""
        now = time.monotonic()
        if now < self._soonest:
            return []
        known = [choices[0].submit for choices in self._scheduler.living.values()]
        ends = {
            submit.id: self.arrived[submit.id] + submit.deadline_s
            for submit in (*known, *self.compiling.values())
            if submit.deadline_s is not None
        }
        late = [request for request, end in ends.items() if end < now]
        self._soonest = min((end for end in ends.values() if end >= now), default=inf)
        for request in late:
            self.abort(request)
        return [
            Failed(request, "deadline_exceeded", "The request's deadline passed before it ended.")
            for request in late
        ]
