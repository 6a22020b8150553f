"""The settling half of a step: logits, masks, draws, walks, results home.  Runs no layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.cuda.buckets import bucket, sizes
from engine.cuda.graphs import Graphs
from engine.cuda.layout import Ints, Layout, Mirror
from engine.cuda.picks import Picks
from engine.cuda.plain import Plain, Written
from engine.kernels.attention_plan import FEW
from engine.kernels.norm import norm
from engine.kernels.sampler import Needs, settle
from engine.kernels.sampler_tables import (
    BEST,
    BIASED,
    FILTERED,
    PENALTIES,
    SCORED,
    Results,
    Rows,
    Scratch,
    SlotTables,
)
from engine.messages import TokenLogprobs
from engine.runner import Masked, StepTooLarge

if TYPE_CHECKING:
    from engine.cuda.slots import Place
    from engine.models import Model
    from engine.plan import Row


@dataclass(slots=True)
class Draw:
    """One step's wanted rows between launch and collect."""

    size: int  # bucket of rows
    count: int  # rows
    staged: int  # number of the host buffer with its integers
    needs: Needs
    wanted: list[int]  # logprobs asked for by each row, -1 = none
    masked: bool = False
    home: int = 0  # number of the result buffer


@dataclass(frozen=True, slots=True)
class _Bucket:
    layout: Layout
    hosts: list[dict[str, Ints]]  # by number of the host buffer
    picked: Tensor  # int32 [R] flat tokens whose logits are wanted
    rows: Rows
    results: Results


@dataclass(frozen=True, slots=True)
class _Home:
    """Where one step's results arrive."""

    tokens: Tensor
    own: Tensor
    best_ids: Tensor
    best_values: Tensor


class Settling:
    """Draws the rows of a step, as one graph a bucket of rows and kind of work."""

    def __init__(
        self, model: Model, x: Tensor, tokens: Tensor, tables: SlotTables, picks: Picks,
        graphs: Graphs, *, rows: int, groups: int, vocab: int, eps: float, copies: int,
    ) -> None:  # fmt: skip
        """`rows` and `groups` are the most of a step; `x` and `tokens` those of every step."""
        device = x.device
        self.model, self.rows = model, rows
        self._x, self._tables, self._picks, self._graphs = x, tables, picks, graphs
        self._eps, self._groups = eps, groups
        self.sizes = sizes(rows)
        layouts = {size: self._layout(size) for size in self.sizes}
        self._mirror = Mirror(max(at.words for at in layouts.values()), copies, device)
        self._results = Results.allocate(rows, groups, device)
        self._buckets = {size: self._bucket(layouts[size], tokens) for size in self.sizes}
        self._written = Written(copies)
        self._scratch = Scratch.allocate(rows, vocab, device)
        self._normed = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=device)
        self._logits = torch.zeros(rows, vocab, dtype=torch.float32, device=device)
        words = (vocab + 31) // 32
        self._masks = torch.full((rows + 1, words), -1, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staged_masks = [
            torch.empty(rows, words, dtype=torch.int32, pin_memory=pinned) for _ in range(copies)
        ]
        self._homes = [_home(self._results, pinned) for _ in range(copies)]
        self._turn = 0
        self._numbers = np.arange(rows + 1, dtype=np.int32)
        self._arrivals = {
            size: [(home.tokens[:size], made.results.tokens) for home in self._homes]
            for size, made in self._buckets.items()
        }

    @property
    def results(self) -> Results:
        """Of the newest step, on the device; rows and groups in a plan's order."""
        return self._results

    def _layout(self, size: int) -> Layout:
        names = ("picked", "slot", "position", "hold", "mask", "first", "offset")
        groups = min(size, self._groups)
        return Layout({
            **{name: (size,) for name in names}, "count": (1,),
            "group_row": (groups,), "group_rows": (groups,), "groups": (1,),
        })  # fmt: skip

    def _bucket(self, layout: Layout, tokens: Tensor) -> _Bucket:
        at = layout.device(self._mirror.buffer)
        picked = at.pop("picked")
        many, groups, results = picked.shape[0], at["group_row"].shape[0], self._results
        return _Bucket(
            layout, self._mirror.hosts(layout), picked, Rows(**at, tokens=tokens),
            Results(results.tokens[:many], results.matched[:groups], results.own[:many],
                    results.best_ids[:many], results.best_values[:many]),
        )  # fmt: skip

    # ---- a step ----------------------------------------------------------------------------------

    def prepare(self, rows: list[Row], places: list[Place], plain: Plain) -> Draw | None:
        """Note what the `last` rows of a plan want, before anything changes; None = nothing."""
        if plain.whole and plain.count <= self.rows:
            return self._prepare_plain(rows, places, plain)
        first = plain.count
        if len(rows) <= FEW or (first and len(rows) - first <= FEW):
            return self._prepare_few(rows, places, plain, first if len(rows) > FEW else 0)
        wanted = _wanted(rows[first:], places[first:], first)
        groups = first + len(wanted.first)
        if not groups:
            return None
        count = groups + wanted.drafts
        if count > self.rows:
            raise StepTooLarge(f"{count} rows draw a token; the largest step has {self.rows}")
        number = self._mirror.next()
        self._written.forget(number)
        size = bucket(self.sizes, count)
        at = self._buckets[size].hosts[number]
        columns = np.empty((4, groups), dtype=np.int32)
        columns[:, first:] = wanted.columns
        if first:
            columns[0, :first], columns[1, :first] = plain.slots, self._numbers[:first]
            columns[2, :first] = plain.starts + 1
            columns[3, :first] = plain.least - columns[2, :first]
        sizes = np.ones(groups, dtype=np.int32)
        sizes[first:] = wanted.sizes
        if wanted.drafts:
            columns = columns.repeat(sizes, axis=1)
        offset = at["offset"][:count]
        begins = np.cumsum(sizes) - sizes
        np.subtract(self._numbers[:count], begins.repeat(sizes), out=offset, casting="unsafe")
        at["slot"][:count], at["first"][:count] = columns[0], columns[1]
        np.add(columns[1], offset, out=at["picked"][:count])
        np.add(columns[2], offset, out=at["position"][:count])
        # Stop ids are held back while the tokens before this row are fewer than min_tokens.
        np.less(offset, columns[3], out=at["hold"][:count], casting="unsafe")
        at["picked"][count:] = 0
        at["mask"][:] = 0
        at["count"][0], at["groups"][0] = count, groups
        at["group_row"][:groups], at["group_rows"][:groups] = begins, sizes
        return self._draw(size, count, number, rows, places)

    def _prepare_few(
        self, rows: list[Row], places: list[Place], plain: Plain, first: int
    ) -> Draw | None:
        """The same of a few rows behind the `first`, where numpy's calls take longer than loops."""
        wanted = _wanted(rows[first:], places[first:], first)
        groups = first + len(wanted.first)
        count = groups + wanted.drafts
        if not groups:
            return None
        if count > self.rows:
            raise StepTooLarge(f"{count} rows draw a token; the largest step has {self.rows}")
        number, size = self._mirror.next(), bucket(self.sizes, count)
        self._written.forget(number)
        at = self._buckets[size].hosts[number]
        if first:
            self._fill_even(at, first)
            self._fill_plain(at, plain)
        end, begins = first, list[int]()
        for slot, flat, position, held, many in zip(*wanted.columns, wanted.sizes, strict=True):
            begins.append(end)
            begin, end = end, end + many
            at["slot"][begin:end], at["first"][begin:end] = slot, flat
            numbers = self._numbers[:many]
            at["offset"][begin:end] = numbers
            np.add(numbers, flat, out=at["picked"][begin:end])
            np.add(numbers, position, out=at["position"][begin:end])
            at["hold"][begin:end] = numbers < held if held > 0 else 0
        at["picked"][count:] = 0
        at["mask"][:] = 0
        at["count"][0], at["groups"][0] = count, groups
        at["group_row"][first:groups], at["group_rows"][first:groups] = begins, wanted.sizes
        return self._draw(size, count, number, rows, places)

    def _prepare_plain(self, rows: list[Row], places: list[Place], plain: Plain) -> Draw:
        count = len(rows)
        number, size = self._mirror.next(), bucket(self.sizes, count)
        at = self._buckets[size].hosts[number]
        if not self._written.holds(number, (size, count)):
            self._written.note(number, (size, count))
            self._fill_even(at, count)
            at["picked"][count:] = 0
            at["mask"][:] = 0
            at["count"][0] = at["groups"][0] = count
        self._fill_plain(at, plain)
        return self._draw(size, count, number, rows, places)

    def _fill_even(self, at: dict[str, Ints], many: int) -> None:
        """What does not change of the first rows, which compute and draw one token each."""
        numbers = self._numbers[:many]
        at["picked"][:many] = at["first"][:many] = at["group_row"][:many] = numbers
        at["offset"][:many], at["group_rows"][:many] = 0, 1

    def _fill_plain(self, at: dict[str, Ints], plain: Plain) -> None:
        """The rest of them."""
        many, position = plain.count, plain.starts + 1
        at["slot"][:many], at["position"][:many] = plain.slots, position
        at["hold"][:many] = position < plain.least

    def _draw(
        self, size: int, count: int, number: int, rows: list[Row], places: list[Place]
    ) -> Draw:
        flags = 0
        for row, place in zip(rows, places, strict=True):
            if row.last:
                flags |= place.flags
        wanted: list[int] = []
        if flags & SCORED:
            for row in rows:
                if row.last:
                    wanted += [row.seq.sampling.logprobs] * (len(row.draft) + 1)
        return Draw(size, count, number, needs_of(flags), wanted)

    def supply(self, draw: Draw, masked: Masked) -> None:
        """Send what forbids something; row 0 of the device's masks stays open."""
        if not (masked.only or masked.filled):
            return
        own = self._buckets[draw.size].hosts[draw.staged]["mask"]
        self._written.forget(draw.staged)
        draw.masked = True
        if masked.only:
            own[[*masked.only]] = [~token for token in masked.only.values()]
        if rows := masked.filled:
            count, first = len(rows), rows[0]
            staged = self._staged_masks[draw.staged][:count]
            if rows[-1] - first == count - 1:  # they rise: then they lie side by side
                staged.copy_(masked.masks[first : first + count])
                own[first : first + count] = self._numbers[1 : count + 1]
            else:
                torch.index_select(masked.masks, 0, torch.tensor(rows), out=staged)
                own[rows] = self._numbers[1 : count + 1]
            self._masks[1 : count + 1].copy_(staged, non_blocking=True)

    def stage(self, draw: Draw) -> None:
        """Send its integers."""
        self._mirror.send(draw.staged, self._buckets[draw.size].layout.words)

    def run(self, draw: Draw) -> None:
        """Draw what was staged, as a graph of its own."""
        self._graphs.run(("settle", draw.size, draw.needs, draw.masked), self.body(draw))

    def body(self, draw: Draw) -> Callable[[], None]:
        """The launches of a draw; they depend on its size, needs and masks alone."""
        size, needs = draw.size, draw.needs
        masks = self._masks if draw.masked else None
        made = self._buckets[size]
        normed, logits = self._normed[:size], self._logits[:size]

        def body() -> None:
            norm(self._x, self.model.norm, normed, self._eps, picked=made.picked)
            self._picks.run(normed, self.model.head, logits)
            settle(logits, made.rows, self._tables, masks, self._scratch, made.results, needs)

        return body

    def fetch(self, draw: Draw) -> None:
        """Send the results home."""
        draw.home = self._turn = (self._turn + 1) % len(self._homes)
        home, results, count = self._homes[draw.home], self._results, draw.count
        to, drawn = self._arrivals[draw.size][draw.home]  # of its bucket: a view costs a copy
        to.copy_(drawn, non_blocking=True)
        if draw.needs.logprobs:
            for name in ("own", "best_ids", "best_values"):
                source: Tensor = getattr(results, name)
                getattr(home, name)[:count].copy_(source[:count], non_blocking=True)

    def empty(self, size: int, needs: Needs, *, masked: bool = False) -> Draw:
        """Stage a draw without rows, to warm the bucket."""
        number = self._mirror.next()
        self._written.forget(number)
        for array in self._buckets[size].hosts[number].values():
            array[...] = 0
        draw = Draw(size, 0, number, needs, [], masked)
        self.stage(draw)
        return draw

    def collect(self, draw: Draw) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Tokens of a step that is done (-1 = none), their logprobs, or [] if nobody asked."""
        home = self._homes[draw.home]
        tokens: list[int] = home.tokens[: draw.count].tolist()
        if not draw.needs.logprobs:
            return tokens, []
        found = zip(
            tokens, draw.wanted, home.own[: draw.count].tolist(),
            home.best_ids[: draw.count].tolist(), home.best_values[: draw.count].tolist(),
            strict=True,
        )  # fmt: skip
        return tokens, [_logprobs(*entry) for entry in found]


@dataclass(slots=True)
class _Wanted:
    """The sequences that draw, one entry each."""

    slot: list[int]
    first: list[int]  # flat index of the newest token
    position: list[int]  # of the first token drawn
    held: list[int]  # rows from the first on whose stop ids are held back
    sizes: list[int]  # rows: drafts + 1
    drafts: int  # of all together

    @property
    def columns(self) -> list[list[int]]:
        """What repeats for every row of a sequence."""
        return [self.slot, self.first, self.position, self.held]


@functools.cache
def needs_of(flags: int) -> Needs:
    """What rows need whose flags are these, all together."""
    return Needs(
        shaped=bool(flags & (PENALTIES | BIASED)),
        filters=bool(flags & FILTERED),
        logprobs=bool(flags & SCORED),
    )


def _wanted(rows: list[Row], places: list[Place], flat: int) -> _Wanted:
    """The sequences among these rows, which `flat` tokens come before."""
    found = _Wanted([], [], [], [], [], 0)
    slot, first, position = found.slot, found.first, found.position
    held, sizes = found.held, found.sizes
    for row, place in zip(rows, places, strict=True):
        flat += row.count
        if not row.last:
            continue
        more = len(row.draft)
        at = row.start + row.count - more
        slot.append(place.slot)
        first.append(flat - 1 - more)
        position.append(at)
        held.append(place.least - at)
        sizes.append(more + 1)
        found.drafts += more
    return found


def _home(results: Results, pinned: bool) -> _Home:
    def like(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)

    return _Home(
        like(results.tokens), like(results.own), like(results.best_ids), like(results.best_values)
    )


def _logprobs(
    token: int, wanted: int, own: float, ids: Sequence[int], values: Sequence[float]
) -> TokenLogprobs | None:
    if wanted < 0 or token < 0:
        return None
    best = zip(ids[: min(wanted, BEST)], values[:wanted], strict=False)
    return TokenLogprobs(own, [(id, value) for id, value in best if id >= 0])
