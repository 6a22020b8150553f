"""Proposers for tests: right, wrong, random and hostile.  None may change an answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.cpu import CpuAttention
from engine.batch import Batch
from engine.noise import gumbel
from engine.proposer import Draft, Features, Key, Load, Ran, Turn
from speculative.hybrid import Hybrid


class OneByOne:
    """A proposer that guesses for each sequence by itself, in `guess`, and learns nothing."""

    sources = ()
    holds = 1

    def propose(self, turns: Sequence[Turn], beside: int = 0) -> list[Draft]:
        return [self.guess(turn) for turn in turns]

    def begin(self, turn: Turn, waits: bool) -> Draft:
        return self.guess(turn)

    def observe(self, key: Key, sources: Sequence[str], verified: int, matched: int) -> None:
        assert 0 <= matched <= verified <= len(sources)

    def prepare(self, turns: Sequence[Turn]) -> None:
        pass

    def look(self, turn: Turn, masked: bool) -> float:
        return 0.0

    def timed(self, ran: Ran) -> None:
        assert ran.rows > 0 and ran.seconds > 0

    def ahead(self, load: Load, most: int) -> int:
        return most  # each step waits

    def forget(self, key: Key) -> None:
        pass

    def ended(self, session: bytes) -> None:
        pass


class RandomDrafts(OneByOne):
    """Uniform ids, of any length up to the limit."""

    source = "random"

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.vocab, self.random = vocab, random.Random(seed)

    def guess(self, turn: Turn) -> Draft:
        count = self.random.randint(0, turn.limit)
        return Draft([self.random.randrange(self.vocab) for _ in range(count)])


class OracleDrafts(OneByOne):
    """The known answer, sometimes cut short: everything is accepted."""

    source = "oracle"

    def __init__(self, answers: dict[tuple[str, int], list[int]], seed: int = 0) -> None:
        self.answers, self.random = answers, random.Random(seed)

    def guess(self, turn: Turn) -> Draft:
        done = len(turn.tokens) - turn.prompt_len
        rest = self.answers.get(turn.key, [])[done : done + turn.limit]
        cut = self.random.randint(0, len(rest)) if self.random.random() < 0.3 else len(rest)
        return Draft(rest[:cut])


class Steered(OracleDrafts):
    """Says of each step what `say` gives; notes how many it is asked for, and lengths of looks."""

    def __init__(
        self, answers: dict[tuple[str, int], list[int]], say: Callable[[], int], worth: float = 0.0
    ) -> None:
        super().__init__(answers)
        self.say, self.worth = say, worth
        self.asked: list[int] = []
        self.looks: list[int] = []

    def propose(self, turns: Sequence[Turn], beside: int = 0) -> list[Draft]:
        self.asked.append(len(turns))
        return super().propose(turns, beside)

    def look(self, turn: Turn, masked: bool) -> float:
        self.looks.append(len(turn.tokens))
        return self.worth

    def ahead(self, load: Load, most: int) -> int:
        assert most == 0  # no device drafts
        return self.say()


class AdversarialDrafts(OracleDrafts):
    """Right up to a place, then wrong: stop ids, repeats and edge ids where they hurt most."""

    source = "adversarial"

    def __init__(
        self, answers: dict[tuple[str, int], list[int]], vocab: int, stop: int, seed: int = 0
    ) -> None:
        super().__init__(answers, seed)
        self.vocab, self.stop = vocab, stop

    def guess(self, turn: Turn) -> Draft:
        done = len(turn.tokens) - turn.prompt_len
        rest = list(self.answers.get(turn.key, [])[done : done + turn.limit])
        poison = [self.stop, 0, self.vocab - 1, turn.tokens[-1], self.random.randrange(self.vocab)]
        place = self.random.randint(0, turn.limit - 1)
        draft = rest[:place] + [self.random.choice(poison) for _ in range(turn.limit - place)]
        return Draft(draft[: turn.limit])


class ForcedDrafts(OneByOne):
    """What the grammar fixes, nothing else."""

    source = "forced"

    def guess(self, turn: Turn) -> Draft:
        return Draft(turn.forced()[: turn.limit])


class Eager(Hybrid):
    """The served proposer, which believes that rows cost nothing: its chains are long."""

    def __init__(self, sources: Sequence[str] = ("forced", "suffix")) -> None:
        super().__init__(1e-9, sources)

    def timed(self, ran: Ran) -> None:
        assert ran.rows > 0 and ran.seconds > 0

    def ahead(self, load: Load, most: int) -> int:
        super().ahead(load, most)
        return most


class RandomHead:
    """A one-layer draft with random weights and a KV of its own, behind the real protocol.

    It computes on the CPU wherever the features are, in fp64.
    """

    source = "head"

    def __init__(self, hidden: int, vocab: int, taps: tuple[int, ...], seed: int = 0) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.taps, self.hidden, self.vocab = taps, hidden, vocab
        self.heads, self.kv_heads, self.dim = 2, 1, 16
        inner = (self.heads + 2 * self.kv_heads) * self.dim

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=noise, dtype=torch.float64) / shape[-1] ** 0.5

        self.fuse = draw(hidden, hidden * len(taps))
        self.embedding = draw(vocab, hidden)
        self.qkv, self.out = draw(inner, 2 * hidden), draw(hidden, self.heads * self.dim)
        self.head = draw(vocab, hidden)
        self.steps = 0

    def reserve(self, blocks: int, size: int, dtype: torch.dtype, device: object) -> None:
        self.size = size
        self.pages = torch.zeros(blocks, 2, size, self.kv_heads, self.dim, dtype=torch.float64)
        self.attention = CpuAttention(self.heads, self.kv_heads, self.dim, size, torch.float64)

    def copy(self, source: int, target: int) -> None:
        self.pages[target] = self.pages[source]

    def _layer(self, batch: Batch, feature: Tensor) -> Tensor:
        """Each row at slot i + 1 sees slots 0 .. i + 1; slot 0 is never written and stays zero."""
        x = torch.cat((self.embedding[batch.tokens], feature), dim=-1)
        q, k, v = (x @ self.qkv.T).split(
            [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], dim=-1
        )
        shifted = Batch(
            batch.tokens, batch.positions, batch.slots, [s + 1 for s in batch.starts],
            batch.counts, batch.tables, batch.logit_rows, batch.logit_counts,
        )
        self.attention.prepare(shifted)
        mixed = self.attention.run(
            q.view(-1, self.heads, self.dim), k.view(-1, self.kv_heads, self.dim),
            v.view(-1, self.kv_heads, self.dim), self.pages,
        )
        return feature + mixed @ self.out.T

    def extend(self, features: Features) -> None:
        features = on_cpu(features)
        batch = features.batch
        ends = [s + 1 + c for s, c in zip(batch.starts, batch.counts, strict=True)]
        seen = [-(-end // self.size) for end in ends]
        tables = [table[:n] for table, n in zip(batch.tables, seen, strict=True)]
        rows = Batch(
            batch.tokens, batch.positions, batch.slots, batch.starts, batch.counts, tables,
            batch.logit_rows, batch.logit_counts,
        )
        state = self._layer(rows, features.hidden.double() @ self.fuse.T)
        self.state = state[features.last]
        self.at = batch.positions[features.last]
        self.tables = batch.tables

    def step(self, features: Features, depth: int) -> Tensor:
        device, features = features.last.device, on_cpu(features)
        self.steps += 1
        if depth:
            at = (self.at + depth).tolist()
            slots = [t[(p + 1) // self.size] * self.size + (p + 1) % self.size
                     for t, p in zip(self.tables, at, strict=True)]
            tables = [t[: (p + 1) // self.size + 1] for t, p in zip(self.tables, at, strict=True)]
            none = torch.empty(0, dtype=torch.int64)
            batch = Batch(
                self.drawn, torch.tensor(at), torch.tensor(slots), at, [1] * len(at), tables,
                none, [0] * len(at),
            )
            self.state = self._layer(batch, self.state)
        logits = self.state @ self.head.T
        noise = gumbel(
            features.seeds, features.choices, self.at + depth + 2, self.vocab, torch.float64
        )
        hot = features.temperatures[:, None].double()
        self.drawn = torch.where(hot > 0, logits / hot.clamp(min=1e-6) + noise, logits).argmax(-1)
        return self.drawn.to(device)


class KnowingHead(RandomHead):
    """The same, but it knows some answers: (prompt length, tokens) by request seed."""

    def __init__(self, *given, answers: dict[int, tuple[int, list[int]]]) -> None:
        super().__init__(*given)
        self.answers = answers

    def step(self, features: Features, depth: int) -> Tensor:
        drawn = super().step(features, depth)
        for place, seed in enumerate(features.seeds.tolist()):
            length, text = self.answers.get(seed, (0, []))
            at = int(self.at[place]) + 2 + depth - length
            if 0 <= at < len(text):
                self.drawn[place] = text[at]
        return self.drawn.to(drawn.device)


def on_cpu(features: Features) -> Features:
    """Features whose tensors are in host memory."""
    def moved(holder):
        return {name: value.cpu() for name in holder.__dataclass_fields__
                if isinstance(value := getattr(holder, name), Tensor)}

    batch = replace(features.batch, **moved(features.batch))
    return replace(features, batch=batch, **moved(features))
