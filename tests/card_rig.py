"""One engine on a real card that many properties share, and what they compare.  Claims nothing."""

from __future__ import annotations

import functools
import os
import random
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loop import Engine
from engine.messages import Sampling, Submit
from engine.pace import Pace
from tests.driver import Run
from tests.proposers import ForcedDrafts

ROWS = 128  # of a step, up to which bits are promised
PROMPT = 129  # tokens: two full blocks for the cache, and the one that every run computes itself
NEAR = 0.35  # nats between the best two tokens where bf16 may choose either
BLOCKS = 8000  # so many that no prompt leaves the cache
DRAWS = [
    Sampling(temperature=0.0, logprobs=0),
    Sampling(temperature=1.0, logprobs=0),
    Sampling(temperature=0.9, top_p=0.9, logprobs=0),
]

Bits = dict[tuple[str, int], list[tuple[int, float]]]  # (token, its log-probability) in order


def record(what: str, text: str) -> None:
    print(f"\ncard: {what}: {text}")


@dataclass
class Rig:
    """One engine for many properties, and what each request gives when it runs alone."""

    name: str
    engine: Engine
    known: dict[bytes, Bits] = field(default_factory=dict)  # by all that was asked for

    @contextmanager
    def using(self, *, drafts=None, depth: int = 1, **settings):
        """Other settings, as if the engine had been made with them; nothing may run meanwhile."""
        engine, scheduler = self.engine, self.engine.scheduler
        assert not engine.busy
        before = engine.config, scheduler.pace, engine.guessing.host, engine.runner.depth
        engine.config = scheduler.config = replace(before[0], **settings)
        scheduler.pace = Pace([1], 0.0, engine.config.mixed_tokens)
        engine.guessing.host, engine.runner.depth = drafts, depth
        try:
            yield engine
        finally:
            engine.config, scheduler.pace, engine.guessing.host, engine.runner.depth = before
            scheduler.config = before[0]

    def run(self, *submits: Submit, disturb=None) -> Bits:
        """All at once to the end; the pool must be whole again."""
        run = Run(self.engine).put(*submits).drain(disturb=disturb)
        assert not run.failed and not run.refused, (run.failed, run.refused)
        assert self.engine.pool.used == 0
        return {key: self.bits(run, key) for key in run.tokens}

    @staticmethod
    def bits(run: Run, key: tuple[str, int]) -> list[tuple[int, float]]:
        return [
            (token, entry.logprob)
            for out in run.outs[key]
            for token, entry in zip(out.tokens, out.logprobs, strict=True)
        ]

    def alone(self, *submits: Submit) -> Bits:
        """One request after the other, each on the KV that its prompt got in the cache."""
        wanted = Bits()
        for submit in submits:
            asked = msgspec.msgpack.encode(submit)
            if asked not in self.known:
                # Fills the cache; under a grammar one token would be refused before it is computed.
                self.run(replace(submit, max_tokens=1, grammar=None))
                self.known[asked] = self.run(submit)
            wanted |= self.known[asked]
        return wanted

    def asks(self, count: int) -> list[Submit]:
        """Requests that end at different places, drawn in three ways."""
        return [
            Submit(f"r{i}", self.prompt(PROMPT, i), 16 + i % 17, replace(DRAWS[i % 3], seed=i))
            for i in range(count)
        ]

    def prompt(self, length: int, seed: int) -> list[int]:
        chance = random.Random(seed)
        return [chance.randrange(self.engine.hello.vocab // 2) for _ in range(length)]

    def widest(self) -> Widest:
        return Widest(self.engine)


class Widest:
    """The most rows that a step had since it was made."""

    def __init__(self, engine: Engine) -> None:
        self.rows, self.steps = 0, 0
        forward = engine.runner.forward
        stage = type(forward).stage

        def staged(rows, *given):
            self.rows = max(self.rows, sum(row.count for row in rows))
            self.steps += 1
            return stage(forward, rows, *given)

        forward.stage = staged


@functools.cache
def smol() -> Rig:
    """The real model; one engine for all files of a run."""
    return Rig("SmolLM2", boot(os.environ["SLIPSTREAM_GGUF"], 1024))


def boot(model: str, tokens: int) -> Engine:
    """An engine as it is served, with room for drafts; `tokens` is the largest step."""
    config = EngineConfig(
        model=model, device="cuda", max_sequences=ROWS, max_batch_tokens=tokens,
        mixed_tokens=64, max_drafts=8, cache=CacheConfig(blocks=BLOCKS),
    )
    engine = Engine(config, open_checkpoint(model), drafts=ForcedDrafts())
    assert len(engine.runner._graphs) > 20 and engine.runner.depth == 1
    engine.guessing.host = None
    return engine


def tokens_of(bits: Bits) -> int:
    return sum(len(text) for text in bits.values())


def differing(found: Bits, wanted: Bits) -> list[tuple[tuple[str, int], int]]:
    """Where each text that is not the wanted one leaves it: (key, index)."""
    assert found.keys() == wanted.keys()
    places = []
    for key, text in wanted.items():
        pairs = enumerate(zip(found[key], text, strict=False))
        at = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if at is None and len(found[key]) != len(text):
            at = min(len(found[key]), len(text))
        if at is not None:
            places.append((key, at))
    return places


def tokens(bits: Bits) -> Bits:
    """The same without log-probabilities."""
    return {key: [(token, 0.0) for token, _ in text] for key, text in bits.items()}


def counted(
    rig: Rig, what: str, asks: list[Submit], wanted: Bits, disturb=None
) -> Run:
    """Run, and hold every first difference of greedy texts to a near-tie."""
    run = Run(rig.engine).put(*asks).drain(disturb=disturb)
    assert not run.failed and not run.refused and rig.engine.pool.used == 0
    found = {key: rig.bits(run, key) for key in wanted}
    gaps = [gap(run, key, at) for key, at in differing(tokens(found), tokens(wanted))]
    assert all(value < NEAR for value in gaps), gaps
    record(what, f"{len(wanted)} greedy texts, {tokens_of(wanted)} tokens: {len(gaps)} with "
                 f"another token, all near-ties {gaps}")
    return run


def greedy(rig: Rig, count: int, length: int = PROMPT, first: int = 900) -> list[Submit]:
    """Requests whose first differences `counted` can judge; `first` numbers the first prompt."""
    sampling = Sampling(temperature=0.0, logprobs=2)
    return [Submit(f"k{i}", rig.prompt(length, i), 24, sampling)
            for i in range(first, first + count)]


def gap(run: Run, key: tuple[str, int], at: int) -> float:
    """Nats between the best two tokens of a greedy text's place."""
    entries = [entry for out in run.outs[key] for entry in out.logprobs]
    (_, best), (_, second) = entries[at].top[:2]
    return round(best - second, 4)
