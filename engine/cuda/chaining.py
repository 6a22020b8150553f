"""The drafting half of a settled step: a device draft's passes as graphs.  Verifies nothing.

    extend   every flat token becomes a row of the draft, out of the target's true features
    join     the row before a block's first token, whose feature the block before kept
    chain    the newest row of each sequence draws, and what it drew is the next row

What was drawn and accepted is read where it lies, so all of this is queued right behind settle and
comes home with its results.  Only K and V of a row are needed by later ones: a prompt's rows attend
to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.cuda.buckets import bucket, sizes
from engine.cuda.graphs import Graphs
from engine.cuda.layout import Ints, Layout, Mirror
from engine.kernels.chain_rows import Chains, FlatRows, Groups, Taken, begin, take

if TYPE_CHECKING:
    from engine.cuda.forward import Forward
    from engine.cuda.slots import Place, Slots
    from engine.kernels.sampler_tables import Results
    from engine.plan import Plan, Row
    from engine.proposer import CapturedDraft

DEPTHS = (1, 2, 3, 5, 7)  # tokens of a chain that graphs are made for; others take the next one


@dataclass(slots=True)
class Staged:
    """What of a step is to be drafted."""

    flat: int  # bucket of flat tokens
    groups: int  # bucket of sequences that draw
    joined: int  # bucket of rows to make anew; 0 = none
    depth: int  # tokens of the longest chain, of DEPTHS; 0 = nobody wants one
    count: int  # sequences that draw
    home: int = 0  # number of the result buffer


@dataclass(frozen=True, slots=True)
class _Bucket:
    layout: Layout
    hosts: list[dict[str, Ints]]
    at: dict[str, Tensor]


class Chaining:
    """Stages and runs a device draft behind each step."""

    def __init__(
        self, head: CapturedDraft, forward: Forward, slots: Slots, results: Results,
        graphs: Graphs, *, tokens: int, rows: int, drafts: int, size: int, trash: int, copies: int,
    ) -> None:  # fmt: skip
        """`tokens` and `rows` are the most of a step, `drafts` of a chain, `size` of a block."""
        device = slots.table.device
        self.head, self.drafts = head, drafts
        self._forward, self._slots, self._results = forward, slots, results
        self._graphs, self._size, self._trash = graphs, size, trash
        self.depths = [*(one for one in DEPTHS if one < drafts), drafts]
        self._flats, self._many = sizes(tokens), sizes(rows)
        flat_words = {n: self._layout(n, ("known", "group", "offset", "fresh", "after", "ends"))
                      for n in self._flats}
        group_words = {n: self._layout(n, ("base", "start", "place", "limit"))
                       for n in self._many}
        join_words = {n: self._layout(n, ("tokens", "positions", "slots", "blocks"))
                      for n in self._many}
        self._flat_at = _buckets(flat_words, copies, device)
        self._group_at = _buckets(group_words, copies, device)
        self._join_at = _buckets(join_words, copies, device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._taken = Taken(ints(tokens), ints(tokens), ints(tokens))
        self._matched = results.matched
        self._row, self._drawn = ints(rows), ints(drafts, rows)
        self._positions, self._places = ints(drafts * rows), ints(drafts * rows)
        pinned = device.type == "cuda"
        self._homes = [torch.zeros(drafts, rows, dtype=torch.int32, pin_memory=pinned)
                       for _ in range(copies)]
        self._turn = 0
        head.prepare(tokens, rows)

    @staticmethod
    def _layout(size: int, names: tuple[str, ...]) -> Layout:
        return Layout({name: (size,) for name in names})

    # ---- a step ----------------------------------------------------------------------------------

    def stage(self, plan: Plan, places: list[Place], size: int) -> Staged:
        """Send a plan's integers, before anything of it changes; `size` is the forward's bucket."""
        rows = plan.rows
        starts = np.array([row.start for row in rows], dtype=np.int32)
        counts = np.array([row.count for row in rows], dtype=np.int32)
        slots = np.array([place.slot for place in places], dtype=np.int32)
        firsts = np.cumsum(counts) - counts
        self._stage_flat(size, rows, starts, counts, slots, firsts)
        groups, depth, many = self._stage_groups(plan, starts, counts, slots, firsts)
        joined = self._stage_joined(rows, starts, slots)
        return Staged(size, groups, joined, depth, many)

    def _stage_flat(
        self, bucket: int, rows: list[Row], starts: Ints, counts: Ints, slots: Ints, firsts: Ints
    ) -> None:
        total, size = int(counts.sum()), self._size
        made = self._flat_at[bucket]
        at = made.next()
        whose = np.arange(len(rows)).repeat(counts)
        inner = np.arange(total) - firsts[whose]
        positions = starts[whose] + inner
        ids, after = self._slots.ids, positions + 1
        last = np.array([row.last for row in rows])
        drafts = np.array([row.drafts for row in rows])
        bases = counts - drafts - 1
        offset = inner - bases[whose]
        drawn = last[whose] & (offset >= 0)
        known = at["known"]
        known[: total - 1] = self._forward.host_tokens[1:total]
        for i in (~last).nonzero()[0]:
            row = rows[i]
            known[firsts[i] + counts[i] - 1] = row.seq.tokens[row.start + row.count]
        known[:total][drawn] = -1
        known[total:] = 0
        number = np.cumsum(last) - 1
        at["group"][:total] = np.where(drawn, number[whose], 0)
        at["offset"][:total] = np.where(drawn, offset, 0)
        sizes = np.where(last, drafts + 1, 0)
        begins = np.cumsum(sizes) - sizes
        at["fresh"][:total] = np.where(drawn, begins[whose] + offset, 0)
        at["after"][:total] = ids[slots[whose], after // size] * size + after % size
        at["after"][total:] = self._trash
        ending = after % size == 0
        at["ends"][:total] = np.where(ending, ids[slots[whose], positions // size], -1)
        at["ends"][total:] = -1
        made.send()

    def _stage_groups(
        self, plan: Plan, starts: Ints, counts: Ints, slots: Ints, firsts: Ints
    ) -> tuple[int, int, int]:
        """Bucket, depth and number of the sequences that draw."""
        rows, most = plan.rows, min(self.drafts, plan.guesses)
        which = [i for i, row in enumerate(rows) if row.last]
        many = len(which)
        made = self._group_at[bucket(self._many, max(1, many))]
        at = made.next()
        drafts = np.array([rows[i].drafts for i in which], dtype=np.int32)
        bases = counts[which] - drafts - 1
        limits = [self._limit(rows[i], most, 2) for i in which]
        at["base"][:many] = firsts[which] + bases
        at["start"][:many] = starts[which] + bases
        at["place"][:many], at["limit"][:many] = slots[which], limits
        for name, rest in (("base", 0), ("start", 0), ("limit", -1),
                           ("place", self._slots.count)):  # fmt: skip
            at[name][many:] = rest
        made.send()
        longest = max(limits, default=0)
        depth = bucket(self.depths, longest) if longest else 0
        return made.size, depth, many

    def _stage_joined(self, rows: list[Row], starts: Ints, slots: Ints) -> int:
        size = self._size
        # A pending row's step before has made it, and its token is not known here.
        known = np.array([not row.pending for row in rows])
        which = (known & (starts > 0) & (starts % size == 0)).nonzero()[0]
        if not len(which):
            return 0
        made = self._join_at[bucket(self._many, len(which))]
        at, many = made.next(), len(which)
        ids, place = self._slots.ids, starts[which] // size
        at["tokens"][:many] = [rows[i].seq.tokens[rows[i].start] for i in which]
        at["positions"][:many] = starts[which] - 1
        at["slots"][:many] = ids[slots[which], place] * size
        at["blocks"][:many] = ids[slots[which], place - 1]
        for name, rest in (("tokens", 0), ("positions", 0), ("slots", self._trash), ("blocks", 0)):
            at[name][many:] = rest
        made.send()
        return made.size

    def run(self, staged: Staged) -> None:
        """Queue all passes of what was staged."""
        if staged.joined:
            self._graphs.run(("join", staged.joined), self._join(staged.joined))
        self._graphs.run(("extend", staged.flat), self._extend(staged.flat))
        if staged.depth:
            key = ("chain", staged.groups, staged.depth)
            self._graphs.run(key, self._chain(staged.groups, staged.depth))

    def warm(self, size: int, draws: bool) -> None:
        """Run what a bucket of so many flat tokens, or of so many that draw, needs, on no rows."""
        if not draws:
            at = self._flat_at[size].next()
            for name, rest in (("known", 0), ("after", self._trash), ("ends", -1)):
                at[name][:] = rest
            self._flat_at[size].send()
            self._graphs.run(("extend", size), self._extend(size))
        elif size in self._group_at:
            at = self._group_at[size].next()
            for name, rest in (("base", 0), ("start", 0), ("limit", -1),
                               ("place", self._slots.count)):  # fmt: skip
                at[name][:] = rest
            self._group_at[size].send()
            for depth in self.depths:
                self._graphs.run(("chain", size, depth), self._chain(size, depth))

    def _join(self, size: int) -> Callable[[], None]:
        at = self._join_at[size].at

        def body() -> None:
            self.head.join(at["tokens"], at["positions"], at["slots"], at["blocks"])

        return body

    def _extend(self, size: int) -> Callable[[], None]:
        made, results, taken = self._flat_at[size].at, self._results, self._taken
        rows = FlatRows(**made)
        mine = Taken(taken.tokens[:size], taken.slots[:size], taken.ends[:size])

        def body() -> None:
            take(rows, results.matched, results.tokens, mine, self._trash)
            kept, positions = self._forward.ops.kept(size), self._forward.positions(size)
            self.head.extend(kept, mine.tokens, positions, mine.slots, mine.ends)

        return body

    def _chain(self, many: int, depth: int) -> Callable[[], None]:
        groups = Groups(**self._group_at[many].at)
        chains = Chains(
            self._row[:many], self._drawn[:depth, :many],
            self._positions[: depth * many].view(depth, many),
            self._places[: depth * many].view(depth, many),
        )  # fmt: skip

        def body() -> None:
            begin(groups, self._results.matched, self._slots.table, chains, self._size,
                  self._trash)
            for step in range(depth):
                self.head.draw(
                    chains, step, groups.place, self._slots.table, self._slots.tables.records)

        return body

    def fetch(self, staged: Staged) -> None:
        """Send the chains home."""
        if not staged.depth:
            return
        staged.home = self._turn = (self._turn + 1) % len(self._homes)
        self._homes[staged.home][: staged.depth].copy_(
            self._drawn[: staged.depth], non_blocking=True)

    def collect(self, staged: Staged, plan: Plan) -> list[list[int]]:
        """A chain a row of a step that is done and booked, cut to what its sequence may take."""
        chains = self._homes[staged.home][: staged.depth, : staged.count].t().tolist()
        found, number = list[list[int]](), 0
        for row in plan.rows:
            if row.last:
                found.append(chains[number][: self._limit(row, min(staged.depth, plan.guesses), 1)])
                number += 1
            else:
                found.append([])
        return found

    def _limit(self, row: Row, most: int, drawn: int) -> int:
        """Draft tokens, at most `most`, that a row's sequence may take behind `drawn` new ones."""
        submit = row.seq.submit
        if submit.drafts not in ("auto", self.head.source):
            return 0
        return max(0, min(most, submit.max_drafts, row.seq.remaining - drawn))


class _Mirrored:
    """One bucket's integers, and the buffer that all buckets share."""

    def __init__(self, size: int, layout: Layout, mirror: Mirror) -> None:
        self.size, self._layout, self._mirror = size, layout, mirror
        self.at = layout.device(mirror.buffer)
        self._hosts = mirror.hosts(layout)
        self._number = 0

    def next(self) -> dict[str, Ints]:
        """The host's arrays to fill."""
        self._number = self._mirror.next()
        return self._hosts[self._number]

    def send(self) -> None:
        """Copy them to the device."""
        self._mirror.send(self._number, self._layout.words)


def _buckets(
    layouts: dict[int, Layout], copies: int, device: torch.device
) -> dict[int, _Mirrored]:
    mirror = Mirror(max(one.words for one in layouts.values()), copies, device)
    return {size: _Mirrored(size, layout, mirror) for size, layout in layouts.items()}
