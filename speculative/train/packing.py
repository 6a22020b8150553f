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

import numpy as np
import torch
from torch import Tensor

from speculative.train import shards
from speculative.train.shards import Entry, Ids

WINDOW = 4096  # sequences that are packed together


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one step; Q is the most starts that a row has."""

    tokens: Tensor  # [rows, length] int64
    positions: Tensor  # [rows, length] int64, from 0 in each sequence
    documents: Tensor  # [rows, length] int64: the sequence in the row; -1 = padding
    starts: Tensor  # [rows, Q] int64: places where chains begin; 0 where there is none
    left: Tensor  # [rows, Q] int64: tokens of the target's own that such a chain meets; 0 = none

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(
            getattr(self, one.name).to(device, non_blocking=True) for one in fields(self)
        ))  # fmt: skip

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
        self._rows: dict[int, list[list[int]]] = {}  # of the newest epoch

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
            self._rows = {epoch: [rows[i] for i in mixed]}
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
        starts: list[list[int]] = []
        left: list[list[int]] = []
        for number, row in enumerate(rows):
            at, begins, rest = 0, list[int](), list[int]()
            for document, i in enumerate(row):
                entry, ids = self.sequences[i]
                part = slice(at, at + entry.length)
                tokens[number, part] = ids
                positions[number, part] = np.arange(entry.length)
                documents[number, part] = document
                begins += range(at + entry.prompt - 1, at + entry.length - 2)
                rest += range(entry.length - entry.prompt - 1, 0, -1)
                at += entry.length
            starts.append(begins)
            left.append(rest)
        width = -(-max(len(one) for one in starts) // multiple) * multiple
        return Batch(
            torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(documents),
            _padded(starts, width), _padded(left, width),
        )

    def batches(self, rows: int, multiple: int = 1) -> Iterator[Batch]:
        """Everything once, in the order of epoch 0."""
        every = self.rows(0)
        for at in range(0, len(every), rows):
            yield self.batch(every[at : at + rows], multiple)

    def step(self, number: int, rows: int, multiple: int = 1) -> Batch:
        """The batch of training step `number`: a function of the seed and that number alone."""
        most = max(len(self.rows(0)) // rows, 1)
        epoch, place = divmod(number, most)
        every = self.rows(epoch)
        picked = [every[i % len(every)] for i in range(place * rows, (place + 1) * rows)]
        return self.batch(picked, multiple)


def _padded(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])
