"""A scripted engine: answers any prompt with letters at a fixed pace.  Runs no model, no torch.

`python -m engine.scripted --socket PATH --step-ms 20` is the engine process behind
`slipstream bench gateway` and the tests of processes; as an object it stands in for engine/loop.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.messages import (
    PROTOCOL,
    Abort,
    Admitted,
    Hello,
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
from engine.server import arguments, launch

VOCAB = 259  # one token a byte and three control tokens, as in the byte tokenizers it is used with
STOP = 258
BEAT_S = 1.0


@dataclass(slots=True)
class Choice:
    """One answer on its way."""

    submit: Submit
    index: int
    generated: int = 0


Choices = dict[tuple[str, int], Choice]  # by request and index


def letter(position: int) -> int:
    """The token at an output position: a..z, again and again, so that a gap or a repeat shows."""
    return 97 + position % 26


class ScriptedEngine:
    """Gives every running choice `per_step` tokens each `step_s` seconds, until its max_tokens."""

    def __init__(self, step_s: float = 0.0, per_step: int = 1, boot_s: float = 0.0) -> None:
        time.sleep(boot_s)
        self.hello = Hello(
            PROTOCOL, "scripted", VOCAB, 1 << 20, 64, 1 << 14, [STOP], str(os.getpid())
        )
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.meanwhile: Callable[[], None] = lambda: None
        self.exposed = False  # there is no device
        self._step_s = step_s
        self._per_step = per_step
        self._taken: list[ToEngine] = []
        self._running: Choices = {}
        self._paused: Choices = {}  # their reader is slow
        self._step = 0
        self._due = 0.0
        self._beat_due = 0.0
        self._generated = 0
        self._seen = -1  # how many ran when Stats went out last

    def wait(self, timeout_s: float) -> None:
        """Sleep until the next step is due, a message arrives when idle, or the time is up."""
        if self._running:
            time.sleep(max(0.0, min(timeout_s, self._due - time.monotonic())))
            return
        timeout_s = max(0.0, min(timeout_s, self._beat_due - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            self._taken.append(self.inbox.get(timeout=timeout_s))

    def step(self) -> list[ToGateway]:
        """Take the messages; when a step is due, give each running choice its tokens."""
        replies: list[ToGateway] = []
        with contextlib.suppress(queue.Empty):
            while True:
                self._taken.append(self.inbox.get_nowait())
        taken, self._taken = self._taken, []
        for message in taken:
            self._take(message, replies)
        now = time.monotonic()
        if self._running and now >= self._due:
            late = now - self._due
            self._due = (self._due if late < self._step_s else now) + self._step_s
            self._step += 1
            replies.append(Step(self._step, self._outs()))
        # A change of what runs is told at once: benchmarks time it.
        if now >= self._beat_due or (len(self._running) == 0) != (self._seen == 0):
            self._beat_due = now + BEAT_S
            self._seen = len(self._running)
            replies.append(self._stats())
        return replies

    def close(self) -> None:
        """Nothing to free."""
        self._running.clear()
        self._paused.clear()

    def _take(self, message: ToEngine, replies: list[ToGateway]) -> None:
        match message:
            case Submit(prompt=[]):
                replies.append(Refused(message.id, "empty_prompt", "The prompt has no tokens."))
            case Submit(id=id, n=n):
                replies.append(Admitted(id, 0, 0))
                for index in range(n):
                    self._running[id, index] = Choice(message, index)
            case Abort(id=id, index=index):
                for choices in (self._running, self._paused):
                    for key in [k for k in choices if k[0] == id and index in (-1, k[1])]:
                        del choices[key]
            case Pause(id=id):
                self._move(id, self._running, self._paused)
            case Resume(id=id):
                self._move(id, self._paused, self._running)
            case TurnEnd() | SessionEnd():
                pass  # no cache here
            case _:
                raise TypeError(f"engine got {type(message).__name__}")

    def _move(self, id: str, origin: Choices, goal: Choices) -> None:
        """The request's choices change from one state to the other; unknown ids have none."""
        for key in [k for k in origin if k[0] == id]:
            goal[key] = origin.pop(key)

    def _outs(self) -> list[Out]:
        outs: list[Out] = []
        for key, choice in list(self._running.items()):
            start = choice.generated
            end = choice.generated = min(start + self._per_step, choice.submit.max_tokens)
            self._generated += end - start
            finish = "length" if end == choice.submit.max_tokens else ""
            outs.append(Out(key[0], key[1], [letter(p) for p in range(start, end)], finish))
            if finish:
                del self._running[key]
        return outs

    def _stats(self) -> Stats:
        return Stats(
            step=self._step,
            running=len(self._running),
            blocks_used=len(self._running),
            blocks_total=self.hello.blocks,
            generated_tokens=self._generated,
        )


def main() -> int:
    """Run it as an engine process."""
    parser = arguments(argparse.ArgumentParser(prog="engine.scripted", description=__doc__))
    parser.add_argument("--step-ms", type=float, default=0.0, help="pace of the steps")
    parser.add_argument("--per-step", type=int, default=1, help="tokens a choice and step")
    parser.add_argument("--boot-ms", type=float, default=0.0, help="pretended load time")
    given = parser.parse_args()

    def build() -> ScriptedEngine:
        return ScriptedEngine(given.step_ms / 1e3, given.per_step, given.boot_ms / 1e3)

    return launch(build, given.socket, given.parent)


if __name__ == "__main__":
    sys.exit(main())
