"""Sequences packed into rows of one length, in an order that a seed fixes.  Computes no feature.

    row   | prompt answer | prompt answer | ... | padding |        tokens [rows, length]
    draws        i i i i          i i i                            where chains begin

A chain may begin at position i when the token behind i is known and the one after that is the
target's own: from the prompt's last token on, as in serving.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speculative.train import shards
from speculative.train.shards import Entry, Ids

WINDOW = 4096  # sequences that are packed together
ALIGNED = 64  # on a GPU Q is a multiple of it: masks are read where they are, and shapes repeat
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one step; Q is the most starts that a row has."""

    tokens: Tensor  # [rows, length] int64
    positions: Tensor  # [rows, length] int64, from 0 in each sequence
    documents: Tensor  # [rows, length] int64: the sequence in the row; -1 = padding
    starts: Tensor  # [rows, Q] int64: places where chains begin; 0 where there is none
    left: Tensor  # [rows, Q] int64: tokens of the target's own that such a chain meets; 0 = none
    chains: Tensor  # [C] int64: places in [rows * Q] where chains begin, the longest chains first
    alive: tuple[int, ...]  # how many of them have a token left to meet at step 0, 1, ...

    def to(self, device: torch.device) -> Batch:
        """The same on a device; the copies wait for nothing that runs there."""

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.device == device:
                return x
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        return Batch(*(moved(getattr(self, one.name)) for one in fields(self)))

    def living(self, step: int) -> Tensor:
        """`chains` that have a token left at a step, [R].

        How many is known on the host: counting them on a device would stop it at every step.
        """
        return self.chains[: self.alive[step]]

    def behind(self, step: int) -> Tensor:
        """[rows, Q] int64: the place `step` tokens behind each chain's beginning, cut at the end.
        """
        return (self.starts + step).clamp(max=self.tokens.shape[1] - 1)

    @property
    def real(self) -> int:
        """Tokens that are not padding."""
        return int((self.documents >= 0).sum())


class Corpus:
    """All sequences of one side, in memory."""

    def __init__(self, sequences: Sequence[tuple[Entry, Ids]], length: int, seed: int) -> None:
        """Those longer than `length` tokens, or with fewer than two of the target's, are left out.
        """
        self.sequences = [
            (entry, ids) for entry, ids in sequences
            if entry.length <= length and entry.length - entry.prompt > 1
        ]
        self.length, self._seed = length, seed
        self._rows: dict[int, list[list[int]]] = {}  # of epoch 0 and the newest one

    @classmethod
    def open(cls, folder: Path, length: int, seed: int, *, held_out: bool) -> Corpus:
        """One side of all shards; raise BadShard."""
        found = [
            pair for shard in shards.every(folder) for pair in shard.sequences()
            if pair[0].held_out is held_out
        ]
        return cls(found, length, seed)

    @property
    def tokens(self) -> int:
        """All, prompts too."""
        return sum(entry.length for entry, _ in self.sequences)

    def rows(self, epoch: int) -> list[list[int]]:
        """The rows of an epoch: numbers of sequences."""
        if epoch not in self._rows:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self.sequences))
            rows = [
                row
                for at in range(0, len(order), WINDOW)
                for row in self._packed([int(i) for i in order[at : at + WINDOW]])
            ]
            mixed = np.random.default_rng((self._seed, epoch, 1)).permutation(len(rows))
            # Every step asks for epoch 0, too: its rows say how many steps an epoch has.
            first = {0: self._rows[0]} if 0 in self._rows else {}
            self._rows = first | {epoch: [rows[i] for i in mixed]}
        return self._rows[epoch]

    def _packed(self, order: list[int]) -> list[list[int]]:
        """Best fit, as they come: 99 % of the rows is used.

        The longest first would fill them wholly, but put long prompts and long answers into rows of
        their own, and the rows with the most chains decide how many a step computes (1.6 times as
        many).
        """
        rows: list[list[int]] = []
        rests: list[tuple[int, int]] = []  # (tokens left, row), ascending
        for i in order:
            need = self.sequences[i][0].length
            at = bisect_left(rests, (need, -1))
            if at == len(rests):
                rows.append([i])
                insort(rests, (self.length - need, len(rows) - 1))
            else:
                rest, row = rests.pop(at)
                rows[row].append(i)
                insort(rests, (rest - need, row))
        return rows

    def batch(self, rows: Sequence[Sequence[int]], multiple: int = 1) -> Batch:
        """These rows as tensors; Q is a multiple of `multiple`, so that shapes repeat."""
        tokens = np.zeros((len(rows), self.length), np.int64)
        positions, documents = np.zeros_like(tokens), np.full_like(tokens, -1)
        starts, left = list[Places](), list[Places]()
        for number, row in enumerate(rows):
            at, begins, rest = 0, list[Places](), list[Places]()
            for document, i in enumerate(row):
                entry, ids = self.sequences[i]
                part = slice(at, at + entry.length)
                tokens[number, part] = ids
                positions[number, part] = np.arange(entry.length)
                documents[number, part] = document
                begins.append(np.arange(at + entry.prompt - 1, at + entry.length - 2))
                rest.append(np.arange(entry.length - entry.prompt - 1, 0, -1))
                at += entry.length
            starts.append(np.concatenate(begins))
            left.append(np.concatenate(rest))
        width = -(-max(len(one) for one in starts) // multiple) * multiple
        begin, rests = _padded(starts, width), _padded(left, width)
        flat = rests.ravel()
        chains = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
        # Of the chains with n tokens or more, for n = 1, 2, ...
        alive = np.bincount(flat)[::-1].cumsum()[-2::-1]
        made = torch.from_numpy
        return Batch(
            made(tokens), made(positions), made(documents), made(begin), made(rests), made(chains),
            tuple(int(count) for count in alive),
        )

    def batches(self, rows: int, multiple: int = 1) -> Iterator[Batch]:
        """Everything once, in the order of epoch 0."""
        every = self.rows(0)
        for at in range(0, len(every), rows):
            yield self.batch(every[at : at + rows], multiple)

    def step(
        self, number: int, rows: int, multiple: int = 1, micro: int | None = None
    ) -> list[Batch]:
        """The batches of training step `number`, of `micro` rows each: by itself one.

        A function of the seed and that number alone.
        """
        most = max(len(self.rows(0)) // rows, 1)
        epoch, place = divmod(number, most)
        every = self.rows(epoch)
        picked = [every[i % len(every)] for i in range(place * rows, (place + 1) * rows)]
        count = micro or rows
        return [self.batch(picked[at : at + count], multiple) for at in range(0, rows, count)]


def _padded(rows: list[Places], width: int) -> Places:
    """[rows, width]: zeros behind each."""
    found = np.zeros((len(rows), width), np.int64)
    for number, row in enumerate(rows):
        found[number, : len(row)] = row
    return found
