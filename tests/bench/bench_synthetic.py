"""Decoding behind drafts that are right by lot, beside decoding without.  No model guesses here.

    python -m tests.bench.bench_synthetic MODEL --batches 1,8,32 --drafts 4 --chance 0.8

For a shape that nobody has a draft head for: what verification would give if each draft token were
right with a chance of its own.  The target is real, and so are its steps: every sequence first says
its answer without drafts, and the lots are drawn against that.  In pairs, each the same sequences
over the same KV; a window ends before the first sequence does.  Texts are compared, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loop import Engine
from engine.messages import Sampling, Step, Submit
from engine.proposer import Draft, Key, Turn
from tests.bench.bench_speculation import student
from tests.proposers import OneByOne

Texts = dict[Key, list[int]]


class ByLot(OneByOne):
    """Chains out of known answers, each token of them wrong by lot; the same lot every time."""

    source = "synthetic"

    def __init__(self, texts: Texts, count: int, chance: float) -> None:
        self._texts, self._count, self._chance = texts, count, chance

    def guess(self, turn: Turn) -> Draft:
        done = len(turn.tokens) - turn.prompt_len
        rest = self._texts[turn.key][done : done + min(self._count, turn.limit)]
        lot = random.Random(f"{turn.key} {done}")
        return Draft([token if lot.random() < self._chance else token ^ 1 for token in rest])


@dataclass(frozen=True, slots=True)
class Window:
    """Steps while all sequences decode."""

    steps: int
    tokens: int
    seconds: float
    rows: int
    texts: Texts

    @property
    def rate(self) -> float:
        """Tokens a second, of all sequences."""
        return self.tokens / self.seconds


@contextmanager
def guessing(engine: Engine, drafts: OneByOne | None) -> Iterator[None]:
    """The engine with this proposer; nothing runs when it changes."""
    before, engine.guessing.host = engine.guessing.host, drafts
    try:
        yield
    finally:
        engine.guessing.host = before


def window(engine: Engine, batch: int, context: int, output: int) -> Window:
    """All sequences to their ends; timed from the first tokens of all to near the first end."""
    asks = [_ask(f"{batch}.{i}", context, output, engine.hello.vocab, i) for i in range(batch)]
    for ask in asks:
        engine.inbox.put(ask)
    texts: Texts = {(ask.id, 0): [] for ask in asks}
    steps = tokens = rows = 0
    began = ended = 0.0
    while engine.busy or not all(texts.values()):
        outs = [out for reply in engine.step() if isinstance(reply, Step) for out in reply.outs]
        for out in outs:
            texts[out.id, 0] += out.tokens
        lengths = [len(text) for text in texts.values()]
        if began and not ended:
            steps, rows = steps + bool(outs), rows + len(outs)
            tokens += sum(len(out.tokens) for out in outs)
            if max(lengths) > output - 40:
                ended = time.perf_counter()
        elif not began and min(lengths) > 3:  # the first steps of a kind capture a graph
            began = time.perf_counter()
    return Window(steps, tokens, ended - began, rows, texts)


def _ask(name: str, context: int, output: int, vocab: int, seed: int) -> Submit:
    chance = random.Random(seed)
    prompt = [chance.randrange(vocab) for _ in range(context)]
    return Submit(name, prompt, output, Sampling(temperature=0.0), namespace=name.encode())


def of_batch(engine: Engine, batch: int, given: argparse.Namespace) -> str:
    """The line of one batch."""
    size = batch, given.context, given.output
    window(engine, *size)  # all later ones start on the KV that prompts got here
    known = window(engine, *size).texts
    drafts = ByLot(known, given.drafts, given.chance)
    ratios, pairs = list[float](), list[tuple[Window, Window]]()
    for number in range(-1, given.pairs):  # the first pair captures what steps with drafts need
        both = []
        for on in (False, True) if number % 2 else (True, False):
            with guessing(engine, drafts if on else None):
                both.append(window(engine, *size))
        off, behind = both if number % 2 else both[::-1]
        if number >= 0:
            pairs.append((off, behind))
            ratios.append(behind.rate / off.rate)
    spread = (student(len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5
              if len(ratios) > 1 else float("nan"))
    off, behind = pairs[-1]
    differ = sum(known[key] != one.texts[key] for pair in pairs for one in pair for key in known)
    return (f"batch {batch:>4}: {off.rate:,.0f} -> {behind.rate:,.0f} tok/s, "
            f"{statistics.fmean(ratios):.2f}x +- {spread:.2f} ({len(ratios)} pairs); a step "
            f"{1e3 * off.seconds / off.steps:.2f} -> {1e3 * behind.seconds / behind.steps:.2f} ms, "
            f"{behind.tokens / behind.rows:.2f} tokens a row; {differ} texts differ")


def main() -> int:
    """The command: see the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="1,8,32",
                        type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--context", type=int, default=1025, help="tokens of each prompt; whole "
                        "blocks and one, which is all that is computed again")
    parser.add_argument("--output", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a chain")
    parser.add_argument("--chance", type=float, default=0.8, help="of each token to be right")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=0, help="of KV; 0 = what fits")
    given = parser.parse_args()
    config = EngineConfig(model=given.model, device=given.device, speculative="off",
                          cache=CacheConfig(blocks=given.blocks))
    engine = Engine(config, open_checkpoint(given.model), drafts=OneByOne())  # room for drafts
    engine.guessing.host = None
    print(f"synthetic acceptance: {given.drafts} drafts a step, each right with a chance of "
          f"{given.chance}; prompts of {given.context} tokens", flush=True)
    try:
        for batch in given.batches:
            print(of_batch(engine, batch, given), flush=True)
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
