"""Engines that draft in every way, and a watch over what each step writes.  Makes no claims itself.

A watch looks at a CPU's runner from outside: what reaches the model and the head, and which pages
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.loop import Engine
from engine.messages import Submit
from engine.proposer import Draft, Turn
from tests.driver import Answers, make
from tests.heads import Knowing, config, head_of
from tests.proposers import AdversarialDrafts, Eager, OneByOne, RandomDrafts
from tests.scripted import EOS

KINDS = ("random", "adversarial", "hybrid", "eagle3", "both")


class Garbage(OneByOne):
    """Right now and then, and then what no proposer may say: no ids, too many, past every end."""

    source = "garbage"

    def __init__(self, answers: Answers, vocab: int) -> None:
        self.answers, self.vocab, self.told = answers, vocab, 0

    def guess(self, turn: Turn) -> Draft:
        self.told += 1
        done = len(turn.tokens) - turn.prompt_len
        right = self.answers.get(turn.key, [])[done:]
        wrong = [-1, self.vocab, 2**40, EOS, -(2**63), 0]
        place = self.told % 5
        return Draft([*right[:place], wrong[self.told % len(wrong)], *right[place:], *wrong * 9])


def drafting(
    folder: Path, kind: str, asks: Sequence[Submit], expected: Answers, most: int = 4,
    vocab: int = 259, **settings: object,
) -> Engine:
    """An engine whose drafts are of a kind; `expected` are the answers to `asks`."""
    known = {
        (one.sampling.seed, index): (len(one.prompt), expected.get((one.id, index), []))
        for one in asks for index in range(one.n)
    }
    head = Knowing(head_of(config()), known) if kind in ("eagle3", "both") else None
    drafts = {
        "random": lambda: RandomDrafts(vocab, 5),
        "adversarial": lambda: AdversarialDrafts(expected, vocab, EOS, 3),
        "hybrid": Eager, "both": Eager,
        "garbage": lambda: Garbage(expected, vocab),
    }.get(kind, lambda: None)()
    return make(folder, drafts=drafts, head=head, max_drafts=most, **settings)


class Watch:
    """Raises AssertionError in the step that does what must not be.

    No tensor of ids holds one that is none, no position and no slot lies outside, and no page of a
    block that two sequences use, or that the cache may hand out, changes by a bit.
    """

    def __init__(self, engine: Engine, max_len: int = 512) -> None:
        self.engine, self.max_len = engine, max_len
        self.vocab = engine.hello.vocab
        self.seen: Counter[str] = Counter()  # what was looked at
        runner = engine.runner
        self._pages = [runner.pages.data.transpose(0, 1)]  # block first
        if runner.head is not None:
            self._pages += [runner.head.pages.transpose(0, 1), runner.head.last_features]
            self._around(runner.head, "extend", self._extended)
        self._around(runner.model, "forward", lambda batch, *_: self._ids(batch))
        self._launch, self._settle = runner.launch, runner.settle
        runner.launch, runner.settle = self.launch, self.settle

    def _around(self, owner: object, name: str, look: Callable[..., None]) -> None:
        call = getattr(owner, name)

        def looked(*given: object) -> object:
            look(*given)
            return call(*given)

        setattr(owner, name, looked)

    def _extended(self, features) -> None:
        self._ids(features.batch)
        self._within(features.first, self.vocab)
        self.seen["extended"] += 1

    def _ids(self, batch) -> None:
        self._within(batch.tokens, self.vocab)
        self._within(batch.positions, self.max_len)
        self._within(batch.slots, self.engine.runner.pages.blocks * self.engine.pool.size)
        self.seen["rows"] += len(batch.tokens)

    def _within(self, ids: torch.Tensor, limit: int) -> None:
        assert 0 <= int(ids.min()) <= int(ids.max()) < limit, ids.tolist()

    def launch(self, plan):
        pool = self.engine.pool
        kept = [block.id for block in pool._blocks if block.users > 1 or block.key is not None]
        self.seen["shared"] += sum(block.users > 1 for block in pool._blocks)
        self.seen["drafts beside shared"] += bool(kept) and any(row.draft for row in plan.rows)
        self._before = kept, [pages[kept].clone() for pages in self._pages]
        return self._launch(plan)

    def settle(self, flight) -> None:
        self._settle(flight)
        kept, before = self._before
        for pages, old in zip(self._pages, before, strict=True):
            same = torch.eq(pages[kept], old) | (pages[kept].isnan() & old.isnan())
            assert bool(same.all()), "a block of others, or of the cache, was written"


def spoil(engine: Engine, request: str, place: int, value: float) -> list[int]:
    """Make the logits behind `place` output tokens of a request `value`; returns a list of how many
    rows of each step that was so, which grows."""
    runner, rows, hit = engine.runner, [], []
    settle, logits = runner.settle, runner.model.logits

    def settled(flight) -> None:
        rows[:] = [
            row.seq.submit.id == request and row.position - row.seq.prompt_len + i == place
            for row in flight.plan.rows if row.last for i in range(row.drafts + 1)
        ]  # fmt: skip
        settle(flight)

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        chosen = torch.tensor(rows[: len(found)], dtype=torch.bool)
        if chosen.any():
            hit.append(int(chosen.sum()))
            found = found.clone()
            found[chosen, 7] = value
        return found

    runner.settle, runner.model.logits = settled, spoiled
    return hit
