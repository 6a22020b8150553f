"""EAGLE-3 drafts on the CPU: a head with a KV of its own behind DeviceDraft.  Verifies nothing.

    position      0        1        2        3        4
    row        (f0,x1)  (f1,x2)  (f2,x3)  (f3,x4)
    slot            1        2        3        4              slot 0 of a sequence is never used

A row lies in the slot of the token that it consumes, so that it depends on x0 .. x[slot] as the
target's KV of that slot does: block keys, sharing, copies and eviction hold for both.  Only the
feature of a block's last token is missing after a prefix hit, for the row that consumes the first
token behind it; it is kept beside the block.

After each verification `extend` makes the rows of accepted tokens anew, out of true features:
nothing that the head drew from its own stays in the KV that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from engine.attention.cpu import CpuAttention
from engine.batch import Batch
from engine.noise import gumbel_at
from engine.proposer import Features
from speculative.head import Head

CANDIDATES = 256  # of a sampled row
COLD = 1e-6  # temperatures are at least this where they divide


class Eagle3:
    """A head, its pages, and what each sequence of the newest step would draft from."""

    source = "eagle3"

    def __init__(self, head: Head) -> None:
        self.head = head
        self.taps = tuple(boundary - 1 for boundary in head.config.taps)  # -1 = the embedding
        self._size = 0
        self._limits: list[int] = []
        self._ends: list[int] = []  # position of each sequence's newest true feature
        self._tables: list[list[int]] = []

    def reserve(self, blocks: int, size: int, dtype: object, device: object) -> None:
        """See DeviceDraft; `dtype` is the target's, and the head keeps its own."""
        assert str(device) == "cpu", f"this head computes on the CPU, not on {device}"
        config, head = self.head.config, self.head
        self._size = size
        # Never NaN: what attention masks is multiplied by zero, and zero times NaN is NaN.
        self.pages = torch.zeros(
            (config.layers, blocks, 2, size, config.kv_heads, config.head_dim), dtype=head.dtype
        )
        self.last_features = torch.zeros((blocks, config.hidden), dtype=head.dtype)
        self._attention = CpuAttention(
            config.heads, config.kv_heads, config.head_dim, size, head.dtype, first=1
        )

    def copy(self, source: int, target: int) -> None:
        """See DeviceDraft; the feature of the block's end goes with it."""
        self.pages[:, target].copy_(self.pages[:, source])
        self.last_features[target].copy_(self.last_features[source])

    def extend(self, features: Features) -> None:
        """See DeviceDraft."""
        batch, size = features.batch, self._size
        fused = self.head.fuse(features.hidden)
        self._keep_ends(batch, fused)
        self._limits = features.limits.tolist()
        self._tables = batch.tables
        self._ends = [
            start + count - 1 for start, count in zip(batch.starts, batch.counts, strict=True)
        ]
        # Where a sequence goes on at a block's start, the row before is made (anew): after a prefix
        # hit nobody else has.
        joined = [
            i for i, start in enumerate(batch.starts) if start and start % size == 0
        ]
        last = features.last
        rows = Rows(batch.tokens, batch.positions, batch.slots, fused)
        starts, counts = [start + 1 for start in batch.starts], list(batch.counts)
        if joined:
            rows = rows.with_joined(self._before(features, joined), counts, joined)
            for i in joined:
                starts[i] -= 1
                counts[i] += 1
            last = torch.tensor(counts).cumsum(0) - 1
        state = self._run(rows, starts, counts, batch.tables)
        self._feature, self._logits = self.head.read(state.index_select(0, last))

    def step(self, features: Features, depth: int) -> Tensor:
        """See DeviceDraft; sequences whose limit is reached get a valid id that means nothing."""
        live = [i for i, limit in enumerate(self._limits) if limit > depth]
        places = torch.tensor(live, dtype=torch.int64)
        if depth:
            self._advance(places, live, depth)
        ends = torch.tensor([self._ends[i] for i in live], dtype=torch.int64)
        drawn = self._draw(features, places, self._logits.index_select(0, places), ends + depth + 2)
        self._drawn = torch.zeros(len(self._limits), dtype=torch.int64).index_copy_(
            0, places, drawn
        )
        return self._drawn

    # ---- parts -----------------------------------------------------------------------------------

    def _keep_ends(self, batch: Batch, fused: Tensor) -> None:
        """Keep the features of tokens that end a block."""
        size = self._size
        rows: list[int] = []
        blocks: list[int] = []
        begin = 0
        for start, count, table in zip(batch.starts, batch.counts, batch.tables, strict=True):
            for position in range(start - start % size + size - 1, start + count, size):
                rows.append(begin + position - start)
                blocks.append(table[position // size])
            begin += count
        if rows:
            self.last_features[blocks] = fused[rows]

    def _before(self, features: Features, joined: list[int]) -> Rows:
        """The rows that consume these sequences' first tokens of the step."""
        batch, size = features.batch, self._size
        starts = [batch.starts[i] for i in joined]
        blocks = [batch.tables[i][start // size] for i, start in zip(joined, starts, strict=True)]
        before = [
            batch.tables[i][start // size - 1] for i, start in zip(joined, starts, strict=True)
        ]
        return Rows(
            features.first[joined], torch.tensor(starts) - 1, torch.tensor(blocks) * size,
            self.last_features[before],
        )  # fmt: skip

    def _advance(self, places: Tensor, live: list[int], depth: int) -> None:
        """One row for each of `live`: its newest drawn token, behind the head's own feature."""
        size = self._size
        at = [self._ends[i] + depth for i in live]
        tables = [self._tables[i] for i in live]
        slots = [
            table[(p + 1) // size] * size + (p + 1) % size
            for table, p in zip(tables, at, strict=True)
        ]
        rows = Rows(
            self._drawn.index_select(0, places), torch.tensor(at), torch.tensor(slots),
            self._feature.index_select(0, places),
        )  # fmt: skip
        state = self._run(rows, [p + 1 for p in at], [1] * len(at), tables)
        feature, logits = self.head.read(state)
        self._feature = self._feature.index_copy(0, places, feature)
        self._logits = self._logits.index_copy(0, places, logits)

    def _run(
        self, rows: Rows, starts: list[int], counts: list[int], tables: Sequence[list[int]]
    ) -> Tensor:
        """The head over rows of sequences whose first slots of the step are `starts`."""
        seen = [
            table[: (start + count - 1) // self._size + 1]
            for table, start, count in zip(tables, starts, counts, strict=True)
        ]
        none = torch.empty(0, dtype=torch.int64)
        self._attention.prepare(
            Batch(rows.tokens, rows.positions, rows.slots, starts, counts, seen, none, [])
        )
        return self.head.run(rows.feature, rows.tokens, rows.positions, self._attend)

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._attention.run(query, _finite(keys), _finite(values), self.pages[layer])

    def _draw(
        self, features: Features, places: Tensor, logits: Tensor, positions: Tensor
    ) -> Tensor:
        """Target ids [n]: arg-max of logits / temperature and the target's noise of `positions`.

        Of a sampled row only the CANDIDATES best places get noise, which is what a draw costs most:
        the others win as often as their share of the head's distribution is.
        """
        best = logits.argmax(dim=-1)
        heat = features.temperatures.index_select(0, places)
        hot = (heat > 0).nonzero().view(-1)
        if len(hot):
            exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
            rows = logits.index_select(0, hot).to(exact)
            values, chosen = rows.topk(min(CANDIDATES, rows.shape[-1]), dim=-1, sorted=False)
            whose = places[hot]
            noise = gumbel_at(
                features.seeds[whose], features.choices[whose], positions[hot],
                self.head.ids(chosen), exact,
            )  # fmt: skip
            scores = values / heat[hot].to(exact).clamp(min=COLD)[:, None] + noise
            best[hot] = chosen.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
        return self.head.ids(best)


class Rows:
    """Rows of a pass, sequence by sequence, in flat tensors."""

    __slots__ = ("feature", "positions", "slots", "tokens")

    def __init__(self, tokens: Tensor, positions: Tensor, slots: Tensor, feature: Tensor) -> None:
        """All [n]; `feature` [n, hidden]."""
        self.tokens, self.positions, self.slots, self.feature = tokens, positions, slots, feature

    def with_joined(self, others: Rows, counts: list[int], joined: list[int]) -> Rows:
        """These rows, `counts` of each sequence, with one of `others` before each of `joined`."""
        order: list[int] = []
        begin, extra = 0, iter(range(len(self.tokens), len(self.tokens) + len(joined)))
        chosen = set(joined)
        for i, count in enumerate(counts):
            if i in chosen:
                order.append(next(extra))
            order += range(begin, begin + count)
            begin += count
        flat = torch.tensor(order)

        def merged(name: str) -> Tensor:
            both = (cast(Tensor, getattr(self, name)), cast(Tensor, getattr(others, name)))
            return torch.cat(both).index_select(0, flat)

        return Rows(*(merged(name) for name in ("tokens", "positions", "slots", "feature")))


def _finite(x: Tensor) -> Tensor:
    """`x` with zeros where it is not finite: blocks are reused, and NaN would spread (reserve)."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
