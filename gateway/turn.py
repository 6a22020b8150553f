"""One request's life between its prompt and its last token.  Builds no frames and no bodies.

    admit() --> next() --> next() ... --> close()
       |          |           `- Said of each choice; the last one ends the turn: remember, TurnEnd
       `----------+- or a typed ApiError: refused, engine lost, deadline, drain, the client left

close() never awaits and may be called at any time, twice too.  Until shown(), a link may begin the
request anew with another engine: choices then start over and say so (Said.anew).
After it, what ends nothing may go past a sleeping next(): lend().
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace
from starlette.types import Receive

from engine.messages import Abort, Out, SessionEnd, Submit, TurnEnd
from gateway import delivered, drafts
from gateway.app import places
from gateway.choices import Choice, Said
from gateway.errors import (
    ApiError,
    DeadlineExceeded,
    Draining,
    EngineRestarted,
    Internal,
    refused,
)
from gateway.link import Bell, EngineFailed, EngineLost, Mailbox, SubmitRefused
from gateway.ordinary import Ordinary, Socket
from gateway.protocol import OutputDetails, PromptDetails, Usage
from gateway.sessions import Session

if TYPE_CHECKING:
    from gateway.prompt import Prompt
    from gateway.state import Gateway
    from gateway.tools.choice import ToolPlan

_log = logging.getLogger("slipstream.gateway.turn")


class ClientGone(Exception):
    """The client closed its connection: nobody reads the answer."""


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt of a request, and what the engine is asked for it."""

    prompt: Prompt
    submit: Submit


class Turn:
    """The parts of one request as they run; choice number = part * n + the engine's index."""

    def __init__(
        self,
        gateway: Gateway,
        parts: Sequence[Part],
        choices: Sequence[Choice],
        session: Session,
        *,
        request_id: str,
        begin: float,
        plan: ToolPlan | None = None,
        tells_drafts: bool = False,
    ) -> None:
        """Takes the request's place in the queue; raise ApiError when there is none.

        `begin`: time.monotonic() at arrival.  `choices`: n for each part, in order.
        `tells_drafts`: usage says what was drafted.
        """
        self.choices = choices
        self.cached = 0  # prompt tokens, of all parts
        self._gateway = gateway
        self._parts = parts
        self._session = session
        self._plan = plan
        self._tells_drafts = tells_drafts
        self._request_id = request_id
        self._begin = begin
        self._first: float | None = None  # when the first token came
        self._last = begin
        self._written = [0] * len(parts)
        self._cached = [0] * len(parts)
        self._ended = False
        self._cause: Exception | None = None
        self._n = parts[0].submit.n
        self._running = len(choices)  # that have not ended
        self._part_running = [self._n] * len(parts)
        self._lives = [0] * len(parts)  # of each mailbox, as last seen
        self._anew: set[int] = set()  # choices that start over and have not said so
        self._session_told = False
        self._bell = Bell()
        self._boxes: list[Mailbox] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._lent: Callable[[Out], bool] | None = None
        self._gone: asyncio.Task[None] | None = None
        self._prompt_tokens = sum(len(part.prompt.ids) for part in parts)
        gateway.metrics.request_started()
        gateway.metrics.session(session)
        self._ticket = gateway.admit(self._prompt_tokens)

    @property
    def open(self) -> bool:
        """Whether some choice has not ended."""
        return self._running > 0

    async def admit(self, receive: Receive) -> None:
        """Send the parts and wait until the engine took them; raise ApiError or ClientGone.

        Until next() is first called or listen_no_more(), `receive` is watched for a disconnect.
        """
        try:
            for part in self._parts:
                box = self._gateway.link.submit(part.submit)
                box.watch(self._bell, self._gateway.link.send)
                self._boxes.append(box)
            self._watch(receive)
            admitted = [await box.admission() for box in self._boxes]
        except BaseException as error:
            self._fail(error)
            self.close()
            if isinstance(error, Exception) and not isinstance(error, ClientGone):
                raise self.typed(error) from None
            raise
        self._gateway.metrics.queued(time.monotonic() - self._begin)
        self._cached = [one.cached for one in admitted]
        self.cached = sum(self._cached)
        for field in () if self._plan is None else self._plan.relaxed_fields:
            self._gateway.metrics.relaxed(field)

    def _watch(self, receive: Receive) -> None:
        """Whatever ends a turn from outside wakes the reader through its mailboxes."""
        loop = asyncio.get_running_loop()
        self._gone = loop.create_task(self._until_gone(receive))
        self._tasks = [self._gone, loop.create_task(self._until_drained())]
        if (deadline := self._parts[0].submit.deadline_s) is not None:
            self._timer = loop.call_later(deadline, self._stop, DeadlineExceeded())

    def listen_no_more(self) -> None:
        """Someone else reads `receive` from now on: a streaming response does."""
        if self._gone is not None:
            self._gone.cancel()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stop(ClientGone())

    async def _until_drained(self) -> None:
        await self._gateway.drain.expired.wait()
        self._stop(Draining())

    def _stop(self, cause: Exception) -> None:
        if self._cause is None:
            self._cause = cause
            for box in self._boxes:
                box.fail(cause)

    async def next(self) -> list[Said]:
        """Wait for the engine's next step; return what each choice gained, in their order.

        Everything that waits comes at once: a slow reader gets more at a time.  Raises what ended
        the turn; typed() makes an ApiError of it.
        """
        try:
            if self._cause is not None:  # outs may wait for ever behind a fast engine
                raise self._cause
            while not (said := self._taken()):
                await self._bell.heard()
            self._clock()
            if not self._running:
                self._complete()
        except Exception as error:
            self._fail(error)
            raise
        return said

    def _taken(self) -> list[Said]:
        """What the outs say that are here; empty when none are."""
        said: dict[int, Said] = {}
        for part, box in enumerate(self._boxes):
            if not self._part_running[part]:
                continue
            outs = box.take()
            if outs and box.lives != self._lives[part]:
                self._begin_anew(part, box.lives)
            if len(outs) == len(self.choices) == 1:  # the usual step of a decode
                only = self._said(part, outs[0])
                return [] if only is None else [only]
            for out in outs:
                taken = self._said(part, out)
                if taken is not None:
                    before = said.get(taken.index)
                    said[taken.index] = taken if before is None else before.then(taken)
        return [said[index] for index in sorted(said)]

    def _said(self, part: int, out: Out) -> Said | None:
        choice = self.choices[part * self._n + out.index]
        if choice.finish:
            return None  # a stop string ended it here; the engine had not heard yet
        if out.finish == "abort":
            raise EngineFailed("aborted", "The engine dropped this request. Send it again.")
        self._cached[part] = out.cached
        if out.written > self._written[part]:
            self._written[part] = out.written
        taken = choice.take(out)
        if choice.finish:
            self._running -= 1
            self._part_running[part] -= 1
            if choice.stopped_here and not out.finish:
                self._gateway.link.send(Abort(out.id, out.index))
            delivered.check_call(self._plan, choice)
        if self._anew and choice.index in self._anew:
            self._anew.discard(choice.index)
            return replace(taken, anew=True)
        return taken

    def _begin_anew(self, part: int, lives: int) -> None:
        """Another engine makes this part's answer, from its first token on."""
        self._lives[part] = lives
        self._written[part] = 0
        choices = self.choices[part * self._n : (part + 1) * self._n]
        self._running += self._n - self._part_running[part]
        self._part_running[part] = self._n
        for choice in choices:
            choice.begin()
            self._anew.add(choice.index)

    def lend(
        self,
        tell: Callable[[Said], None],
        socket: Socket,
        around: Callable[[int], tuple[bytes, bytes]],
    ) -> None:
        """Once shown(), `tell` what a step gave at once if next() sleeps and `socket` has room.

        Waking a task costs more than the rest of a token's way.  Finishes, stop strings and errors,
        those of `tell` as well, still come by next().  `around`: see Ordinary.
        """
        if len(self.choices) != 1 or self.choices[0].may_stop:
            return
        past = partial(self._past, tell, socket.room)
        self._lent = Ordinary(
            self.choices[0], around, socket, tick=self._clock, stop=self._stop, otherwise=past
        )

    def shown(self) -> None:
        """The client has seen something of the answer: it can no longer begin anew."""
        for box in self._boxes:
            box.started = True
            box.sink = self._lent

    def _past(self, tell: Callable[[Said], None], room: Callable[[], bool], out: Out) -> bool:
        """The one mailbox's sink."""
        if not room():
            return False
        try:
            if (said := self._said(0, out)) is not None:
                self._clock()
                tell(said)
        except Exception as error:  # of this turn alone: others wait for the same step
            self._stop(error)
        return True

    def _clock(self) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._ticket.started()
            self._gateway.metrics.first_token(now - self._begin)
        else:
            self._gateway.metrics.gap(now - self._last)
        self._last = now

    def _complete(self) -> None:
        """Every choice has ended: what outlives the turn."""
        self._ended = True
        for choice in self.choices:
            prompt = self._parts[choice.index // self._n].prompt
            if choice.kept is None or not choice.calls:
                self._gateway.prompts.remember(prompt, choice.ids, choice.kept, choice.calls)
            delivered.count(self._plan, choice, self._gateway.metrics)
        self._note_session()
        self._finished(self.choices[0].finish)

    def _note_session(self) -> None:
        session = self._session
        if session.end:
            self._end_session()
        elif session.key is not None:
            called = any(choice.calls for choice in self.choices)
            self._gateway.link.send(TurnEnd(session.key, called))

    def _end_session(self) -> None:
        """Once, however the turn ends."""
        if self._session.key is not None and not self._session_told:
            self._session_told = True
            self._gateway.link.send(SessionEnd(self._session.key))

    def _fail(self, error: BaseException) -> None:
        """The turn is over before its choices: count it once."""
        if self._ended:
            return
        self._ended = True
        if isinstance(error, ClientGone | asyncio.CancelledError):
            self._left()
        else:
            self._finished("error")

    def _left(self) -> None:
        phase = "decode" if self._first is not None else "prefill"
        if not all(box.admitted for box in self._boxes):
            phase = "queued"
        self._gateway.metrics.disconnect(phase)
        self._finished("abort")

    def _finished(self, reason: str) -> None:
        now = time.monotonic()
        self._gateway.metrics.finished(
            reason,
            seconds=now - self._begin,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=sum(choice.tokens for choice in self.choices),
            first_token_s=None if self._first is None else self._first - self._begin,
        )

    def close(self) -> None:
        """Let go of everything; what still runs is aborted.  Never awaits."""
        self._fail(ClientGone())  # counts nothing after a proper end
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._lent = None  # no cycle with the response stays behind
        for box in self._boxes:
            box.sink = None
            self._gateway.link.close(box)
        if self._session.end:  # after the aborts: only then are its blocks free
            self._end_session()
        self._ticket.release()

    def usage(self) -> Usage:
        """Tokens so far; final when the turn is over."""
        output = sum(choice.tokens for choice in self.choices)
        counts = [choice.drafts for choice in self.choices]
        reasoning = sum(choice.reasoning for choice in self.choices)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=output,
            total_tokens=self._prompt_tokens + output,
            prompt_tokens_details=PromptDetails(sum(self._cached), sum(self._written)),
            completion_tokens_details=OutputDetails(reasoning, *drafts.predicted(counts)),
            speculation=drafts.speculated(counts) if self._tells_drafts else UNSET,
        )

    def typed(self, error: Exception) -> ApiError:
        """What the client is told about whatever ended the turn; faults of ours are logged."""
        match error:
            case ApiError():
                return error
            case SubmitRefused(reason=reason):
                return refused(reason)
            case EngineFailed(code="deadline_exceeded"):
                return DeadlineExceeded()
            case EngineFailed(code=code, message=message):
                # The engine's own log has only its name for the request.
                engines = self._parts[0].submit.id
                _log.error("request %s (%s) failed: %s", self._request_id, engines, code)
                return Internal(code, message)
            case EngineLost():
                return EngineRestarted()
            case _:
                _log.error("request %s failed: %s", self._request_id, places(error))
                return Internal()
