"""The drafting half of a settled step: a device draft's passes as graphs.  Verifies nothing.

    extend   every flat token becomes a row of the draft, out of the target's true features
    join     the row before a block's first token, whose feature the block before kept
    chain    the newest row of each sequence draws, and what it drew is the next row

What was drawn and accepted is read where it lies, so all of this is queued right behind settle and
comes home with its results.  Only K and V of a row are needed by later ones: a prompt's rows attend
to nothing.  Where the device has no memory for a chain there is none: the step's results stand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.cuda.buckets import bucket, sizes
from engine.cuda.graphs import Graphs
from engine.cuda.known import Known, reads
from engine.cuda.layout import Ints, Layout, Mirror
from engine.kernels.chain_rows import Chains, FlatRows, Groups, Taken, begin, take
from engine.memory import out_of_memory
from engine.proposer import LENGTHS

if TYPE_CHECKING:
    from engine.cuda.forward import Forward
    from engine.cuda.slots import Place, Slots
    from engine.kernels.sampler_tables import Results
    from engine.plan import Plan, Row
    from engine.proposer import CapturedDraft

log = logging.getLogger("engine.cuda.chaining")

# A step's integers: of each flat token, of each sequence that draws, of each row to make anew.
FLAT = ("known", "group", "offset", "fresh", "after", "ends")
GROUP = ("base", "start", "place", "limit", "begin")
JOIN = ("tokens", "positions", "slots", "blocks")
NEVER = 1 << 30  # the flat index of a draw that a row has not


@dataclass(slots=True)
class Staged:
    """What of a step is to be drafted."""

    flat: int  # bucket of flat tokens
    groups: int  # bucket of sequences that draw
    joined: int  # bucket of rows to make anew; 0 = none
    depth: int  # tokens of the longest chain, of LENGTHS; 0 = there is none
    count: int  # sequences that draw
    home: int = 0  # number of the result buffer


class Chaining:
    """Stages and runs a device draft behind each step."""

    def __init__(
        self, head: CapturedDraft, forward: Forward, slots: Slots, results: Results,
        graphs: Graphs, *, tokens: int, rows: int, drafts: int, size: int, trash: int, copies: int,
    ) -> None:  # fmt: skip
        """`tokens` and `rows` are the most of a step, `drafts` of a chain, `size` of a block.

        A chain is one of LENGTHS: one that should be longer than `drafts` allows, the next shorter.
        """
        device = slots.table.device
        self.depths = [one for one in LENGTHS if 0 < one <= drafts]
        self.head, self.drafts = head, (drafts := max(self.depths, default=0))
        self._forward, self._slots, self._results = forward, slots, results
        self._graphs, self._size, self._trash = graphs, size, trash
        self.sizes = sizes(rows)  # of sequences that draw, of rows to make anew
        self._full: set[tuple[int, int]] = set()  # (sequences, depth) without memory for a chain
        self._missed: set[str] = set()  # passes that once had none
        # What a step's buckets do not change comes first, and is where it is in every layout:
        # graphs of groups and of joined rows know no bucket of flat tokens.
        fixed = {name: (rows,) for name in (*GROUP, *JOIN)}
        self._layouts = {size: Layout(fixed | {name: (size,) for name in FLAT})
                         for size in sizes(tokens)}
        self._mirror = Mirror(max(one.words for one in self._layouts.values()), copies, device)
        self._hosts = {size: self._mirror.hosts(one) for size, one in self._layouts.items()}
        self._fills = {"after": trash, "ends": -1, "limit": -1, "begin": 1, "place": slots.count,
                       "slots": trash}  # of the others it is 0
        self._index = np.arange(tokens, dtype=np.int32)
        self.known = Known(trash // size + 1, size)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        taken = ints(tokens), ints(tokens), ints(tokens)
        self._row, self._drawn = ints(rows), ints(drafts, rows)
        self._positions, self._places = ints(drafts * rows), ints(drafts * rows)
        # Made here, since every step would pay for a view.
        self._flats = {size: (FlatRows(**self._views(FLAT, size, size)),
                              Taken(*(one[:size] for one in taken))) for size in self._layouts}
        least = min(self._layouts)
        self._groups = {size: Groups(**self._views(GROUP, size, least)) for size in self.sizes}
        self._joins = {size: self._views(JOIN, size, least) for size in self.sizes}
        self._chains = {(many, depth): self._chains_of(many, depth)
                        for many in self.sizes for depth in self.depths}
        pinned = device.type == "cuda"
        self._homes = [torch.zeros(drafts, rows, dtype=torch.int32, pin_memory=pinned)
                       for _ in range(copies)]
        self._turn = 0
        head.prepare(tokens, rows)

    # ---- a step ----------------------------------------------------------------------------------

    def stage(self, plan: Plan, places: list[Place], size: int) -> Staged | None:
        """Send a plan's integers, before anything of it changes; `size` is the forward's bucket.

        None: the draft sleeps.  It still reads prompts beside few others: it could never make up.
        """
        if plan.asleep:
            return self._stage_asleep(plan, places, size)
        number = self._mirror.next()
        at, rows = self._hosts[size][number], plan.rows
        starts = np.array([row.start for row in rows], dtype=np.int32)
        counts = np.array([row.count for row in rows], dtype=np.int32)
        slots = np.array([place.slot for place in places], dtype=np.int32)
        draws = np.array([len(row.draft) + 1 for row in rows], dtype=np.int32)
        late = [i for i, row in enumerate(rows) if not row.last]  # those that draw nothing
        bases = np.cumsum(counts, dtype=np.int32) - draws
        begins = starts + counts - draws
        self._stage_flat(at, rows, counts, slots, bases, draws, late)
        many = len(rows) - len(late)
        if late:
            which = np.delete(self._index[: len(rows)], late)
            groups, depth = self._stage_groups(
                at, plan, [rows[i] for i in which], bases[which], begins[which], slots[which])
        else:
            groups, depth = self._stage_groups(at, plan, rows, bases, begins, slots)
        joined = self._stage_joined(at, rows, starts, slots)
        self._mirror.send(number, self._layouts[size].words)
        return Staged(size, groups, joined, depth, many)

    def _stage_asleep(self, plan: Plan, places: list[Place], size: int) -> Staged | None:
        """The rows from the first on that reads a prompt; those before it are slept through."""
        if not reads(plan):
            return None
        read = (not row.last or row.count > 1 + len(row.draft) for row in plan.rows)
        late = plan.rows[[*read].index(True) :]
        flat = plan.tokens - sum(row.count for row in late)
        group = plan.drawing - sum(row.last for row in late)
        draw = group + plan.drafts - sum(len(row.draft) for row in late)
        self.known.slept(self._forward.host_slots[:flat])
        number, ids = self._mirror.next(), self._slots.ids
        at = self._hosts[size][number]
        self._fill(at, ("known", "after", "ends"), 0, size)
        slots = [place.slot for place in places[-len(late) :]]
        for row, slot in zip(late, slots, strict=True):
            self._stage_prompt(at, row, ids[slot], flat, (group, draw))
            flat += row.count
            group, draw = group + row.last, draw + row.last * (len(row.draft) + 1)
        starts, joined = [row.start for row in late], 0
        if any(start and start % self._size == 0 for start in starts):
            joined = self._stage_joined(
                at, late, np.array(starts, dtype=np.int32), np.array(slots, dtype=np.int32))
        self._mirror.send(number, self._layouts[size].words)
        return Staged(size, self.sizes[0], joined, 0, group)

    def _stage_prompt(
        self, at: dict[str, Ints], row: Row, ids: Ints, flat: int, drawn: tuple[int, int]
    ) -> None:
        """One row, whose tokens begin at `flat`; `ids` are its blocks, `drawn` how many sequences
        draw before it, and how many rows."""
        end, size, base = flat + row.count, self._size, flat + row.count - 1 - len(row.draft)
        at["known"][flat:base] = self._forward.host_tokens[flat + 1 : base + 1]
        if row.last:
            at["known"][base:end], at["group"][base:end] = -1, drawn[0]
            at["offset"][base:end] = offset = self._index[: end - base]
            at["fresh"][base:end] = drawn[1] + offset
        else:
            at["known"][base] = row.seq.tokens[row.start + row.count]
        block, inner = np.divmod(self._forward.host_positions[flat:end] + 1, size)
        at["after"][flat:end] = ids[block] * size + inner
        full = (inner == 0).nonzero()[0]
        at["ends"][flat + full] = ids[block[full] - 1]

    def _fill(self, at: dict[str, Ints], names: tuple[str, ...], begin: int, end: int) -> None:
        """Write what stands for nothing."""
        for name in names:
            at[name][begin:end] = self._fills.get(name, 0)

    def _stage_flat(
        self, at: dict[str, Ints], rows: list[Row], counts: Ints, slots: Ints, bases: Ints,
        draws: Ints, late: list[int],
    ) -> None:  # fmt: skip
        size = self._size
        # Each row's slot, flat index of its first draw, group, and how far its draws lie behind it.
        lines = np.empty((4, len(rows)), dtype=np.int32)
        lines[0], lines[1], lines[2] = slots, bases, self._index[: len(rows)]
        ends = bases + draws
        if late:
            draws[late] = 0
            lines[1, late] = NEVER
            lines[2] = np.cumsum(draws > 0) - 1
        np.cumsum(draws, out=lines[3])
        lines[3] -= draws
        slot, base, group, begin = lines.repeat(counts, axis=1)
        total = len(slot)
        offset = self._index[:total] - base
        known = at["known"]
        known[: total - 1] = self._forward.host_tokens[1:total]
        for i in late:
            row = rows[i]
            known[ends[i] - 1] = row.seq.tokens[row.start + row.count]
        known[:total][offset >= 0] = -1
        # Only of what is drawn these mean something, and only of that they are read.
        at["group"][:total], at["offset"][:total] = group, offset
        np.add(offset, begin, out=at["fresh"][:total])
        block, inner = np.divmod(self._forward.host_positions[:total] + 1, size)
        ids = self._slots.ids
        at["after"][:total] = ids[slot, block] * size + inner
        at["ends"][:total] = -1
        if not inner.all():
            full = (inner == 0).nonzero()[0]
            at["ends"][full] = ids[slot[full], block[full] - 1]
        self._fill(at, ("known", "after", "ends"), total, len(known))

    def _stage_groups(
        self, at: dict[str, Ints], plan: Plan, rows: list[Row], bases: Ints, starts: Ints,
        slots: Ints,
    ) -> tuple[int, int]:  # fmt: skip
        """Bucket and depth of the sequences that draw, which are those of `rows`."""
        many, most = len(rows), min(self.drafts, plan.guesses)
        size = bucket(self.sizes, max(1, many))
        limits = [self._limit(row, most, 2) for row in rows] if most else [0] * many
        at["base"][:many], at["start"][:many] = bases, starts
        at["place"][:many], at["limit"][:many] = slots, limits
        at["begin"][:many] = self.known.begins(self._slots.ids[slots], starts) if most else 1
        if many < size:
            self._fill(at, GROUP, many, size)
        longest = max(limits, default=0)
        depth = bucket(self.depths, longest) if longest else 0
        while depth and (size, depth) in self._full:  # a shorter one may have room
            depth = max((one for one in self.depths if one < depth), default=0)
        return size, depth

    def _stage_joined(
        self, at: dict[str, Ints], rows: list[Row], starts: Ints, slots: Ints
    ) -> int:
        size = self._size
        inner = starts % size
        if inner.all():
            return 0
        # A pending row's step before has made it, and its token is not known here.
        known = np.array([not row.pending for row in rows])
        which = (known & (starts > 0) & (inner == 0)).nonzero()[0]
        many = len(which)
        if not many:
            return 0
        ids, place, joined = self._slots.ids, starts[which] // size, bucket(self.sizes, many)
        at["tokens"][:many] = [rows[i].seq.tokens[rows[i].start] for i in which]
        at["positions"][:many] = starts[which] - 1
        at["slots"][:many] = ids[slots[which], place] * size
        at["blocks"][:many] = ids[slots[which], place - 1]
        self._fill(at, JOIN, many, joined)
        return joined

    def run(self, staged: Staged) -> None:
        """Queue all passes of what was staged; `depth` becomes 0 if there is no room for a chain.

        Rows that cannot be made are missed by later chains, which are then wrong more often.
        """
        made = not staged.joined or self._made("join", staged.joined, self._join(staged.joined))
        made &= self._made("extend", staged.flat, self._extend(staged.flat))
        if staged.depth and not (made and self._chained(staged.groups, staged.depth)):
            staged.depth = 0

    def _made(self, name: str, size: int, body: Callable[[], None]) -> bool:
        """Run a pass that makes rows; whether there was memory for it."""
        try:
            self._graphs.run((name, size), body)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if name not in self._missed:
                self._missed.add(name)
                log.warning("the device has no memory for the draft's pass %r over %d rows: drafts "
                            "are made without, and are wrong more often. Start with a smaller "
                            "--gpu-memory-utilization or --max-num-batched-tokens", name, size)
            return False
        return True

    def _chained(self, many: int, depth: int) -> bool:
        """Run a chain, or note that there is no memory for it; whether there was."""
        try:
            self._graphs.run(("chain", many, depth), self._chain(many, depth), must=False)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self._full.add((many, depth))
            log.warning("no chains of %d tokens are drafted for %d sequences any more: the device "
                        "has no memory for them. Start with a smaller --gpu-memory-utilization",
                        depth, many)
            return False
        return True

    def warm(self, size: int, draws: bool) -> None:
        """Run what a bucket of so many flat tokens, or of so many that draw, needs, on no rows."""
        self._stage_none(min(self._layouts) if draws else size)
        if not draws:
            self._graphs.run(("extend", size), self._extend(size))
            return
        self._graphs.run(("join", size), self._join(size))
        for depth in self.depths:
            if (size, depth) not in self._full:
                self._chained(size, depth)

    def largest(self) -> None:
        """Run each pass at its largest, on no rows; raise what running out of memory raises."""
        flat, many = max(self._layouts), self.sizes[-1]
        self._stage_none(flat)
        self._graphs.run(("join", many), self._join(many))
        self._graphs.run(("extend", flat), self._extend(flat))
        if self.depths:
            depth = self.depths[-1]
            self._graphs.run(("chain", many, depth), self._chain(many, depth))

    def _stage_none(self, flat: int) -> None:
        """Send the integers of a step of no rows, in the layout of `flat` tokens."""
        number = self._mirror.next()
        at = self._hosts[flat][number]
        self._fill(at, ("known", "after", "ends"), 0, flat)
        self._fill(at, (*GROUP, *JOIN), 0, self.sizes[-1])
        self._mirror.send(number, self._layouts[flat].words)

    def _views(self, names: tuple[str, ...], size: int, flat: int) -> dict[str, Tensor]:
        """The first `size` of each array on the device, in the layout of `flat` tokens."""
        at = self._layouts[flat].device(self._mirror.buffer)
        return {name: at[name][:size] for name in names}

    def _chains_of(self, many: int, depth: int) -> Chains:
        return Chains(
            self._row[:many], self._groups[many].begin, self._drawn[:depth, :many],
            self._positions[: depth * many].view(depth, many),
            self._places[: depth * many].view(depth, many),
        )  # fmt: skip

    def _join(self, size: int) -> Callable[[], None]:
        at = self._joins[size]

        def body() -> None:
            self.head.join(at["tokens"], at["positions"], at["slots"], at["blocks"])

        return body

    def _extend(self, size: int) -> Callable[[], None]:
        (rows, mine), results = self._flats[size], self._results

        def body() -> None:
            take(rows, results.matched, results.tokens, mine, self._trash)
            kept, positions = self._forward.ops.kept(size), self._forward.positions(size)
            self.head.extend(kept, mine.tokens, positions, mine.slots, mine.ends)

        return body

    def _chain(self, many: int, depth: int) -> Callable[[], None]:
        groups, chains = self._groups[many], self._chains[many, depth]

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
