"""Run an engine to the end of some requests, checking it after every step.  Makes no claims."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.consistency import check
from engine.loop import Engine
from engine.messages import Failed, Out, Refused, Step, Submit, ToGateway

Answers = dict[tuple[str, int], list[int]]


def make(
    folder: Path, *, blocks: int = 256, drafts=None, head=None, depth: int = 0, **settings
) -> Engine:
    """An fp64 engine on a tiny checkpoint; `depth` steps may fly while the next is launched.

    On the CPU also where there is a GPU, unless a `device` is asked for.
    """
    settings.setdefault("device", "cpu")
    settings.setdefault("max_sequences", min(64, settings.get("max_batch_tokens", 512) - 1))
    config = EngineConfig(
        model=str(folder), dtype="float64", threads=1, cache=CacheConfig(blocks=blocks), **settings
    )
    engine = Engine(config, open_checkpoint(str(folder)), drafts=drafts, head=head)
    engine.runner.depth = depth if head is None else 0
    engine.guessing._piped = engine.runner.depth > 0
    return engine


class Run:
    """What the engine said so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: Answers = {}
        self.outs: dict[tuple[str, int], list[Out]] = {}
        self.refused: dict[str, Refused] = {}
        self.failed: dict[str, Failed] = {}
        self.admitted: list[str] = []

    def put(self, *submits: Submit) -> Run:
        for submit in submits:
            self.engine.inbox.put(submit)
        return self

    def step(self) -> None:
        self.take(self.engine.step())

    def take(self, replies: list[ToGateway]) -> None:
        for message in replies:
            match message:
                case Step(outs=outs):
                    for out in outs:
                        key = (out.id, out.index)
                        assert not self.finish(key), f"{key} went on after its finish"
                        self.tokens.setdefault(key, []).extend(out.tokens)
                        self.outs.setdefault(key, []).append(out)
                case Refused():
                    self.refused[message.id] = message
                case Failed():
                    self.failed[message.id] = message
        check(self.engine.scheduler)

    def finish(self, key: tuple[str, int]) -> str:
        outs = self.outs.get(key)
        return outs[-1].finish if outs else ""

    def drain(
        self, limit: int = 20_000, disturb: Callable[[Engine, int], None] | None = None
    ) -> Run:
        """Step until nothing is left; `disturb(engine, step)` may do harm between two steps."""
        for number in range(limit):
            self.engine.wait(5.0)
            self.step()
            if disturb is not None:
                self.take(self.engine.drain())
                disturb(self.engine, number)
                check(self.engine.scheduler)
            compiling = self.engine.intake.compiling
            if not self.engine.busy and not compiling and self.engine.inbox.empty():
                return self
        raise AssertionError(f"not done after {limit} steps")


def answers(
    engine: Engine, *submits: Submit, disturb: Callable[[Engine, int], None] | None = None
) -> Answers:
    """All requests at once, to the end; the pool must be whole again."""
    run = Run(engine).put(*submits).drain(disturb=disturb)
    assert not run.refused and not run.failed, (run.refused, run.failed)
    for submit in submits:
        for index in range(submit.n):
            assert run.finish((submit.id, index)), f"{submit.id}.{index} never finished"
    assert engine.pool.used == 0
    return run.tokens
