"""Paged attention in plain torch: the exact reference, and quick on a CPU.  Runs no custom kernel.

Rows of a few tokens (decode, verification) are gathered into one padded batch and computed by two
batched products a layer.  The query heads of a KV head stand side by side in a block-diagonal
query, so that the gathered [tokens, kv_heads * head_dim] is used as it lies: no per-head copies,
no per-token loop.  (That keys and values are contiguous after the gather is worth a factor of
three; hence the pages' layout.) Rows of a prompt chunk run one by one, with the triangular mask
only on the chunk's own columns.

Attention: Vaswani et al. (2017), grouped queries: Ainslie et al. (2023), pages: Kwon et al. (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.batch import Batch

SHORT = 16  # tokens a row up to which rows are batched
WASTE = 1.34  # longest to shortest context, in blocks, inside one group


@dataclass(frozen=True, slots=True)
class _Group:
    """Short rows of similar context length."""

    flat: Tensor | None  # [B * R] flat tokens, rows padded by their first; None = all
    back: Tensor | None  # [tokens] where each flat token's result lies in [B * R]; None = as it is
    keys: Tensor  # [B * blocks] half-page ids, padded by repeating the last
    values: Tensor
    mask: Tensor  # [B, R, 1, context] 0 or -inf
    rows: int  # B
    width: int  # R


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One long row."""

    begin: int  # in the flat axis
    count: int
    start: int  # position of its first token
    keys: Tensor  # half-page ids
    values: Tensor
    mask: Tensor  # [count, count] 0 or -inf above the diagonal


class CpuAttention:
    """Attention of a batch, one instance a runner; `prepare` before the layers of each step."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, size: int, dtype: torch.dtype,
        first: int = 0,
    ) -> None:  # fmt: skip
        """`size` is tokens a block, `first` the first position that a sequence has KV of."""
        self.heads, self.kv_heads, self.head_dim, self.size = heads, kv_heads, head_dim, size
        self.first = first
        self.dtype = dtype
        self.scale = head_dim**-0.5
        group = heads // kv_heads
        # Head h reads the columns of its KV head only; the softmax scale rides along for free.
        own = torch.arange(heads).div(group, rounding_mode="floor")
        select = own[:, None] == torch.arange(kv_heads)[None, :]
        self._select = (select.to(dtype) * self.scale).repeat_interleave(head_dim, dim=1)
        self._groups: list[_Group] = []
        self._chunks: list[_Chunk] = []
        self._key_rows = self._value_rows = torch.empty(0, dtype=torch.int64)

    # ---- once a step -----------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Group the short rows by context length; build every mask."""
        # A block's page is its keys, then its values: row = block * 2 * size + offset (+ size).
        self._key_rows = batch.slots + batch.slots // self.size * self.size
        self._value_rows = self._key_rows + self.size
        begins = [0]
        for count in batch.counts:
            begins.append(begins[-1] + count)
        short = [i for i, count in enumerate(batch.counts) if count <= SHORT]
        short.sort(key=lambda i: len(batch.tables[i]))
        alone = len(short) == len(batch.counts)
        groups: list[list[int]] = []
        for i in short:
            if groups and len(batch.tables[i]) <= WASTE * len(batch.tables[groups[-1][0]]) + 1:
                groups[-1].append(i)
            else:
                groups.append([i])
        self._groups = [
            self._group(batch, rows, begins, whole=alone and len(groups) == 1) for rows in groups
        ]
        self._chunks = [
            self._chunk(batch.tables[i], begins[i], count, batch.starts[i])
            for i, count in enumerate(batch.counts)
            if count > SHORT
        ]

    def _chunk(self, table: list[int], begin: int, count: int, start: int) -> _Chunk:
        halves = torch.tensor(table) * 2
        future = torch.full((count, count), -torch.inf, dtype=self.dtype).triu_(1)
        return _Chunk(begin, count, start, halves, halves + 1, future)

    def _group(self, batch: Batch, rows: list[int], begins: list[int], *, whole: bool) -> _Group:
        if whole:  # a pure decode step keeps the flat order, and needs no index at all
            rows = sorted(rows)
        width = max(batch.counts[i] for i in rows)
        blocks = max(len(batch.tables[i]) for i in rows)
        tables = [batch.tables[i] for i in rows]
        table = [ids + ids[-1:] * (blocks - len(ids)) for ids in tables]
        flat: list[int] = []
        back: list[int] = []
        limits: list[list[int]] = []
        for place, i in enumerate(rows):
            count, pad = batch.counts[i], width - batch.counts[i]
            flat += [*range(begins[i], begins[i] + count), *[begins[i]] * pad]
            back += range(place * width, place * width + count)
            start = batch.starts[i]
            limits.append([*range(start, start + count), *[start] * pad])
        columns = torch.arange(blocks * self.size)
        seen = (columns >= self.first) & (columns <= torch.tensor(limits)[:, :, None, None])
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, -torch.inf)
        plain = whole and all(batch.counts[i] == width for i in rows)
        halves = torch.tensor(table).view(-1) * 2
        return _Group(
            flat=None if plain else torch.tensor(flat),
            back=None if plain else torch.tensor(back),
            keys=halves,
            values=halves + 1,
            mask=mask,
            rows=len(rows),
            width=width,
        )

    # ---- once a layer ----------------------------------------------------------------------------

    def run(self, query: Tensor, keys: Tensor, values: Tensor, pages: Tensor) -> Tensor:
        """Write the new keys and values, then attend; see the protocol for shapes."""
        inner = self.kv_heads * self.head_dim
        rows_of = pages.view(-1, inner)
        rows_of.index_copy_(0, self._key_rows, keys.reshape(-1, inner))
        rows_of.index_copy_(0, self._value_rows, values.reshape(-1, inner))
        out: Tensor | None = None
        paged = pages.view(-1, self.size * inner)  # half pages
        for group in self._groups:
            if group.flat is None:
                return self._run_group(query, paged, group)
            if out is None:
                out = torch.empty_like(query).view(query.shape[0], -1)
            part = self._run_group(query.index_select(0, group.flat), paged, group)
            assert group.back is not None
            real = group.flat.index_select(0, group.back)
            out.index_copy_(0, real, part.index_select(0, group.back))
        if out is None:
            out = torch.empty_like(query).view(query.shape[0], -1)
        for chunk in self._chunks:
            rows = slice(chunk.begin, chunk.begin + chunk.count)
            out[rows] = self._run_chunk(query[rows], paged, chunk)
        return out

    def _run_group(self, query: Tensor, paged: Tensor, group: _Group) -> Tensor:
        rows, width, heads = group.rows, group.width, self.heads
        inner = self.kv_heads * self.head_dim
        context = group.mask.shape[-1]
        keys = paged.index_select(0, group.keys).view(rows, context, inner)
        values = paged.index_select(0, group.values).view(rows, context, inner)
        spread = query.repeat(1, 1, self.kv_heads).mul_(self._select)
        scores = torch.bmm(spread.view(rows, width * heads, inner), keys.transpose(1, 2))
        scores = scores.view(rows, width, heads, context).add_(group.mask)
        weights = torch.softmax(scores, dim=-1).view(rows, width * heads, context)
        mixed = torch.bmm(weights, values)
        # Of each head's [kv_heads, head_dim] only the part of its own KV head means anything.
        parts = mixed.view(rows * width, self.kv_heads, -1, self.kv_heads, self.head_dim)
        return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(rows * width, -1)

    def _run_chunk(self, query: Tensor, paged: Tensor, chunk: _Chunk) -> Tensor:
        count, kv_heads, dim = chunk.count, self.kv_heads, self.head_dim
        context = slice(self.first, chunk.start + count)
        shape = (-1, kv_heads, dim)
        keys = paged.index_select(0, chunk.keys).view(shape)[context].permute(1, 2, 0)
        values = paged.index_select(0, chunk.values).view(shape)[context].transpose(0, 1)
        packed = query.view(count, kv_heads, -1, dim).permute(1, 2, 0, 3) * self.scale
        scores = torch.bmm(packed.reshape(kv_heads, -1, dim), keys)
        square = scores.view(kv_heads, -1, count, keys.shape[-1])[..., -count:]
        square.add_(chunk.mask)
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
        return mixed.view(kv_heads, -1, count, dim).permute(2, 0, 1, 3).reshape(count, -1)
