"""Let the target answer made-up conversations, on our own engine.  Trains nothing.

    numbers -> conversations -> ids and grammars (other processes) -> engine -> shards

Shards are filled side by side, in order, and written when their last answer is there; what is not
complete at the end of the time is made again by the next run, with the same tokens.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.messages import Failed, Grammar, Out, Refused, Sampling, Step, Stepping, Submit
from speculative.train import shards
from speculative.train.prompts import Conversation, conversation
from speculative.train.shards import Entry, Run

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint

AHEAD = 1.5  # conversations in the engine for one that can run: none of its rows stays empty
PIECE = 64  # conversations that a process prepares at a time

Prepared = list[tuple[list[int], Grammar | None]]


class Asker(Protocol):
    """Makes prompts and grammars; the gateway's (gateway/asked.py), given by slipstream.py."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts whose tokens calls need."""

    def __call__(self, asked: Sequence[Conversation]) -> Prepared:
        """The ids and the grammar of each conversation."""


def asker_of(made: str, checkpoint: Checkpoint) -> Asker:
    """What "module:name" makes of a checkpoint: a name, since other processes must find it."""
    module, _, name = made.partition(":")
    asker: Asker = getattr(importlib.import_module(module), name)(checkpoint)
    return asker


@dataclass(slots=True)
class _Open:
    """A shard that is being filled."""

    number: int
    left: int
    found: list[tuple[Entry, list[int]]] = field(default_factory=list)
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation, ready for the engine."""

    conversation: Conversation
    ids: list[int]
    grammar: Grammar | None


def prepared(
    asker: Asker, seed: int, numbers: Iterable[int]
) -> Iterator[Asked]:
    """Conversations in order, made in this process."""
    found = [conversation(number, seed) for number in numbers]
    for at in range(0, len(found), PIECE):
        part = found[at : at + PIECE]
        for one, (ids, grammar) in zip(part, asker(part), strict=True):
            yield Asked(one, ids, grammar)


class Preparing:
    """The same in other processes, a little ahead of who reads."""

    def __init__(self, made: str, checkpoint: Checkpoint, seed: int, workers: int) -> None:
        """`workers` 0: in this process."""
        self._seed, self._workers = seed, workers
        self._asker = asker_of(made, checkpoint) if not workers else None
        self._pool = ProcessPoolExecutor(
            workers, get_context("spawn"), _begin_worker, (made, checkpoint, seed)
        ) if workers else None

    def of(self, numbers: Sequence[int]) -> Iterator[Asked]:
        """Conversations in order."""
        if self._pool is None:
            assert self._asker is not None
            yield from prepared(self._asker, self._seed, numbers)
            return
        waiting: deque[Future[list[Asked]]] = deque()
        parts = iter([numbers[at : at + PIECE] for at in range(0, len(numbers), PIECE)])
        for part in parts:
            waiting.append(self._pool.submit(_work, part))
            if len(waiting) > 4 * self._workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}  # of a process of Preparing


def _begin_worker(made: str, checkpoint: Checkpoint, seed: int) -> None:
    _worker.update(asker=asker_of(made, checkpoint), seed=seed)


def _work(numbers: Sequence[int]) -> list[Asked]:
    return list(prepared(_worker["asker"], _worker["seed"], numbers))


def submit_of(asked: Asked, stop_ids: Sequence[int]) -> Submit:
    """The engine's message: plain sampling, so that the noise of a row can be made again."""
    one = asked.conversation
    return Submit(
        id=str(one.number), prompt=asked.ids, max_tokens=one.max_tokens,
        sampling=Sampling(temperature=one.temperature, seed=one.seed),
        stop_ids=list(stop_ids), grammar=asked.grammar,
        overflow="cut",  # what a closing plan puts there is not the target's own text
        drafts="off",
    )


class Generation:
    """Fills shards from an engine."""

    def __init__(self, engine: Stepping, folder: Path, run: Run, *, at_once: int) -> None:
        """`at_once`: sequences that the engine runs side by side."""
        self.tokens = 0  # generated, in this run
        self._engine, self._folder, self._run = engine, folder, run
        self._most = max(1, int(at_once * AHEAD))
        self._asked: dict[str, Asked] = {}
        self._answers: dict[str, list[int]] = {}
        self._open: dict[int, _Open] = {}
        self._told = time.monotonic()

    def go(
        self, asked: Iterator[Asked], deadline: float, tell: Callable[[str], None]
    ) -> list[int]:
        """Run until nothing is left, or `deadline` (of time.monotonic) has passed.

        Returns the shards that were written.
        """
        began, done, more = time.monotonic(), list[int](), True
        while time.monotonic() < deadline:
            while more and len(self._asked) < self._most:
                more = (one := next(asked, None)) is not None
                if one is not None:
                    self._put(one)
            if not more and not self._asked:
                break
            self._engine.wait(0.5)
            for message in self._engine.step():
                self._take(message)
            for shard in [one for one in self._open.values() if not one.left]:
                self._write(shard)
                done.append(shard.number)
                speed = self.tokens / (time.monotonic() - began)
                tell(f"shard {shard.number}: {len(shard.found)} answers, {speed:,.0f} tokens/s")
        return done

    def _put(self, asked: Asked) -> None:
        number = asked.conversation.number // self._run.conversations
        shard = self._open.setdefault(number, _Open(number, self._run.conversations))
        if len(asked.ids) + asked.conversation.max_tokens > self._run.max_len:
            shard.left -= 1
            shard.skipped += 1
            return
        message = submit_of(asked, self._engine.hello.stop_ids)
        self._asked[message.id] = asked
        self._answers[message.id] = []
        self._engine.inbox.put(message)

    def _take(self, message: object) -> None:
        match message:
            case Step(outs=outs):
                for out in outs:
                    self._gain(out)
            case Refused(id=id) | Failed(id=id):
                self._end(id, whole=False)
            case _:
                pass

    def _gain(self, out: Out) -> None:
        self._answers[out.id] += out.tokens
        self.tokens += len(out.tokens)
        if out.finish:
            self._end(out.id, whole=bool(self._answers[out.id]))

    def _end(self, id: str, *, whole: bool) -> None:
        asked, answer = self._asked.pop(id), self._answers.pop(id)
        one = asked.conversation
        shard = self._open[one.number // self._run.conversations]
        shard.left -= 1
        if not whole:
            shard.skipped += 1
            return
        ids = asked.ids + answer
        shard.found.append((
            Entry(one.number, len(asked.ids), len(ids), one.domain, one.temperature,
                  one.held_out, one.choice, one.seed), ids,
        ))  # fmt: skip

    def _write(self, shard: _Open) -> None:
        shard.found.sort(key=lambda pair: pair[0].number)
        now = time.monotonic()
        shards.write(self._folder, shard.number, self._run.vocab, shard.found, shard.skipped,
                     now - self._told)
        self._told = now
        del self._open[shard.number]


def missing(folder: Path, run: Run, wanted: Sequence[int]) -> list[int]:
    """Conversations of the wanted shards that are not there yet."""
    there = set(shards.numbers(folder))
    return [
        number
        for shard in wanted if shard not in there
        for number in range(shard * run.conversations, (shard + 1) * run.conversations)
    ]
