"""How good a head is on held-out answers, by place, domain and temperature.  Changes no weight.

Two numbers a place come from teacher forcing alone (definitions of reference: full and conditional
accuracy, alpha).  tau is exact, not estimated: the noise that the target drew with is a function of
seed and position, so the token that a head would have drafted is known, and an answer is walked
through as the engine would: draft, count what stands, go on behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.noise import gumbel_at
from engine.proposer import Turn
from speculative.head import HeadConfig
from speculative.suffix import SuffixDrafts
from speculative.train.packing import ALIGNED, Batch, Corpus
from speculative.train.shards import Entry, Ids
from speculative.train.target import Target, Wanted, kernels
from speculative.train.unroll import Drawn, Weights, unroll

PLACES = 7  # of a chain
Hits = npt.NDArray[np.bool_]


class Row(msgspec.Struct, frozen=True):
    """One group of answers in numbers; the lists have an entry a place, tau one a length."""

    domain: str  # "all" = any
    temperature: float  # -1 = any
    answers: int
    chains: int  # beginnings, one for each token of an answer
    full_accuracy: list[float]  # share of chains whose arg-max was right here and before
    conditional_accuracy: list[float]  # the same, among those that were right before
    agreement: list[float]  # arg-max right here, whatever was before
    alpha: list[float]  # mean sum of min(p, q) at temperature 1, tokens outside counted
    tau: list[float]  # tokens a verification with chains of 1, 2, ... tokens
    suffix_tau: list[float]  # the same with nothing but suffix drafts


@dataclass(slots=True)
class _Sums:
    answers: int = 0
    chains: Tensor = field(default_factory=lambda: torch.zeros(PLACES))
    right: Tensor = field(default_factory=lambda: torch.zeros(PLACES))
    full: Tensor = field(default_factory=lambda: torch.zeros(PLACES))
    reached: Tensor = field(default_factory=lambda: torch.zeros(PLACES))  # right before
    alpha: Tensor = field(default_factory=lambda: torch.zeros(PLACES))
    tokens: int = 0  # of answers, but the first
    steps: list[int] = field(default_factory=lambda: [0] * PLACES)
    suffix_tokens: int = 0
    suffix_steps: list[int] = field(default_factory=lambda: [0] * PLACES)


def evaluate(
    weights: Weights, config: HeadConfig, target: Target, corpus: Corpus, kept: Tensor,
    *, rows: int = 8, answers: int = 4096, suffix_every: int = 4,
) -> list[Row]:
    """A Row for each domain and temperature, each domain, and all; of about `answers` answers.

    Suffix drafts, which are slow beside a batch, are tried on one answer of `suffix_every`.
    """
    sums: dict[tuple[str, float], _Sums] = {}
    suffix, done = SuffixDrafts(), 0
    every = corpus.rows(0)
    for at in range(0, len(every), rows):
        picked = every[at : at + rows]
        batch = corpus.batch(picked, ALIGNED if target.device.type == "cuda" else 1)
        judged = _judged(weights, config, target, batch, corpus, picked, kept)
        for i, table in judged:
            entry, ids = corpus.sequences[i]
            steps = [walked(table.hits, k) for k in range(1, PLACES + 1)]
            drafted = [
                suffix_steps(suffix, entry, ids, k) for k in range(1, PLACES + 1)
            ] if done % suffix_every == 0 else []
            for key in _groups(entry):
                _add(sums.setdefault(key, _Sums()), table, steps, drafted)
            done += 1
        if done >= answers:
            break
    return [_row(key, one) for key, one in sorted(sums.items())]


@dataclass(frozen=True, slots=True)
class Table:
    """One answer's chains: [beginnings, PLACES] each, False and 0 behind the answer's end."""

    live: Hits
    right: Hits  # the head's arg-max is the target's
    hits: Hits  # the token that the head drafts, with the target's own noise, is the answer's
    alpha: npt.NDArray[np.float32]


@torch.no_grad()
def _judged(
    weights: Weights, config: HeadConfig, target: Target, batch: Batch, corpus: Corpus,
    rows: Sequence[Sequence[int]], kept: Tensor,
) -> list[tuple[int, Table]]:
    """Every sequence of a batch with its table."""
    batch = batch.to(target.device)
    with kernels(target.device):
        features, last = target.run(batch)
    wanted = target.wanted(batch, last, kept)
    read = torch.float64 if target.dtype == torch.float64 else torch.float32
    weights = {name: value.to(read) for name, value in weights.items()}
    drawn = unroll(weights, config, batch, features.to(read), wanted,
                   target.embedding.to(read), PLACES)
    shape = (batch.starts.numel(), PLACES)
    live, right, hits = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
    alpha = torch.zeros(shape)
    seeds, heats = _sampling(batch, corpus, rows)
    with kernels(target.device):
        for place, one in enumerate(drawn):
            where = one.chains.cpu()
            live[where, place] = True
            right[where, place], alpha[where, place], hits[where, place] = _compared(
                one, wanted, batch, place, seeds, heats, kept)
    shape = (*batch.starts.shape, PLACES)
    return list(_split(batch, rows, *(x.view(shape) for x in (live, right, hits, alpha))))


def _sampling(
    batch: Batch, corpus: Corpus, rows: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Seed and temperature [rows, Q] of each chain's answer."""
    width = max(len(row) for row in rows)
    seeds = torch.zeros((len(rows), width), dtype=torch.int64)
    heats = torch.zeros((len(rows), width))
    for number, row in enumerate(rows):
        for place, i in enumerate(row):
            seeds[number, place] = corpus.sequences[i][0].seed
            heats[number, place] = corpus.sequences[i][0].temperature
    documents = batch.documents.gather(1, batch.starts).clamp(min=0)
    device = batch.tokens.device
    return seeds.to(device).gather(1, documents), heats.to(device).gather(1, documents)


def _compared(
    one: Drawn, wanted: Wanted, batch: Batch, place: int, seeds: Tensor, heats: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the live chains [R]: arg-max right, alpha, drafted token right; on the CPU."""
    share = wanted.share[one.wanted]
    logits = one.logits.double() if one.logits.dtype == torch.float64 else one.logits.float()
    right = (logits.argmax(-1) == wanted.best[one.wanted]) & wanted.inside[one.wanted]
    alpha = torch.minimum(share, logits.softmax(-1)).sum(-1)
    at = batch.behind(2 + place)
    actual, positions, heat, seed = (
        x.flatten()[one.chains]
        for x in (batch.tokens.gather(1, at), batch.positions.gather(1, at), heats, seeds)
    )
    noisy = logits.clone()
    hot = heat > 0
    if hot.any():
        drawn = positions[hot]
        noise = gumbel_at(
            seed[hot], torch.zeros_like(drawn), drawn, kept.expand(len(drawn), -1), logits.dtype)
        noisy[hot] = logits[hot] / heat[hot, None] + noise
    drafted = kept[noisy.argmax(-1)]
    return right.cpu(), alpha.float().cpu(), (drafted == actual).cpu()


def _split(
    batch: Batch, rows: Sequence[Sequence[int]], live: Tensor, right: Tensor, hits: Tensor,
    alpha: Tensor,
) -> Iterator[tuple[int, Table]]:
    """The tables of single answers."""
    documents = batch.documents.gather(1, batch.starts).cpu()
    there = (batch.left > 0).cpu()
    for number, row in enumerate(rows):
        for place, i in enumerate(row):
            own = (documents[number] == place) & there[number]
            yield i, Table(*(t[number][own].numpy() for t in (live, right, hits, alpha)))


def walked(hits: Hits, k: int) -> int:
    """Verifications that an answer takes with chains of `k` tokens; `hits` [beginnings, >= k]."""
    at, steps = 0, 0
    while at < len(hits):
        run = hits[at, :k]
        at += 1 + int(run.argmin() if not run.all() else k)
        steps += 1
    return steps


def suffix_steps(drafts: SuffixDrafts, entry: Entry, ids: Ids, k: int) -> int:
    """The same with the tokens that suffix drafts offer, from the answer and its prompt alone."""
    tokens = [int(id) for id in ids]
    key, at, steps = (f"{entry.number}/{k}", 0), entry.prompt + 1, 0
    while at < len(tokens):
        turn = Turn(key, tokens[:at], entry.prompt, k, None, b"", list)
        guess = drafts.guess(turn, (), k).tokens[:k]
        right = 0
        while right < len(guess) and at + right < len(tokens) and (
            guess[right] == tokens[at + right]
        ):
            right += 1
        drafts.observe(key, min(len(guess), right + 1), right)
        at += 1 + right
        steps += 1
    drafts.forget(key)
    return steps


def _groups(entry: Entry) -> Iterable[tuple[str, float]]:
    return (entry.domain, entry.temperature), (entry.domain, -1.0), ("all", -1.0)


def _add(sums: _Sums, table: Table, steps: list[int], suffix: list[int]) -> None:
    sums.answers += 1
    sums.chains += torch.from_numpy(table.live).sum(0)
    sums.right += torch.from_numpy(table.right).sum(0)
    full = np.logical_and.accumulate(table.right, 1)
    sums.full += torch.from_numpy(full).sum(0)
    before = np.concatenate((np.ones_like(full[:, :1]), full[:, :-1]), 1)
    sums.reached += torch.from_numpy(before & table.live).sum(0)
    sums.alpha += torch.from_numpy(table.alpha).sum(0)
    sums.tokens += len(table.hits)
    sums.steps = [a + b for a, b in zip(sums.steps, steps, strict=True)]
    if suffix:
        sums.suffix_tokens += len(table.hits)
        sums.suffix_steps = [a + b for a, b in zip(sums.suffix_steps, suffix, strict=True)]


def _row(key: tuple[str, float], sums: _Sums) -> Row:
    chains = sums.chains.clamp(min=1)

    def listed(x: Tensor) -> list[float]:
        return [round(float(one), 4) for one in x]

    return Row(
        key[0], key[1], sums.answers, int(sums.chains[0]), listed(sums.full / chains),
        listed(sums.full / sums.reached.clamp(min=1)), listed(sums.right / chains),
        listed(sums.alpha / chains),
        [round(sums.tokens / max(1, steps), 4) for steps in sums.steps],
        [round(sums.suffix_tokens / max(1, steps), 4) for steps in sums.suffix_steps],
    )
