"""The forward half of a step: a plan's integers to the device, then all layers.  Draws nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.cuda.buckets import bucket, sizes, useful
from engine.cuda.graphs import Graphs
from engine.cuda.layout import Ints, Layout, Mirror
from engine.cuda.ops import KernelOps, StepViews, chunks_possible
from engine.cuda.picks import INVARIANT, Picks
from engine.cuda.plain import Plain, Written
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_plan import (
    FEW,
    LISTED,
    SHORT,
    TILES,
    few_chunks,
    few_short,
    fill_chunks,
    fill_short,
    most_chunk_items,
    ramps,
    short_tile,
)
from engine.kernels.chunk_attention import SHAPES
from engine.runner import StepTooLarge

if TYPE_CHECKING:
    from engine.cuda.slots import Place, Slots
    from engine.model_config import ModelConfig
    from engine.models import Hidden, Model
    from engine.plan import Row


@dataclass(frozen=True, slots=True)
class Limits:
    """What the largest step may hold."""

    tokens: int  # flat
    rows: int  # sequences
    max_len: int  # positions
    size: int  # tokens a block
    split: int  # positions of one attention split
    items: int  # attention items of short rows; a step that needs more is too large
    copies: int  # host buffers: steps under way, and one


@dataclass(frozen=True, slots=True)
class Staged:
    """A step whose integers are on their way: which launches it needs."""

    size: int  # bucket of flat tokens
    chunks: bool


@dataclass(frozen=True, slots=True)
class _Bucket:
    layout: Layout
    hosts: list[dict[str, Ints]]  # by number of the host buffer
    views: StepViews
    chunk_items: int  # room for


class Forward:
    """All layers of a model over a plan, as one graph a bucket of flat tokens."""

    def __init__(
        self, model: Model, shape: ModelConfig, ops: KernelOps, slots: Slots, picks: Picks,
        graphs: Graphs, limits: Limits, trash: int,
    ) -> None:  # fmt: skip
        """`trash` is the page slot that padded tokens write to."""
        self.model, self.ops, self.limits = model, ops, limits
        self._picks, self._graphs, self._trash, self._slots = picks, graphs, trash, slots
        self._tile = short_tile(shape.heads // shape.kv_heads)
        self._chunk_tile = SHAPES[shape.head_dim].tile
        self.sizes = sizes(limits.tokens)
        layouts = {size: self._layout(size) for size in self.sizes}
        words = max(layout.words for layout in layouts.values())
        self._mirror = Mirror(words, limits.copies, slots.table.device)
        self._buckets = {size: self._bucket(layouts[size]) for size in self.sizes}
        self._written = Written(limits.copies)
        self._numbers: Ints = np.arange(limits.tokens, dtype=np.int32)
        self.hidden: Hidden | None = None  # of the newest step that was no graph, all its rows
        self.host_tokens: Ints = np.zeros(0, dtype=np.int32)  # of the newest step, as staged
        self.host_positions: Ints = self.host_tokens
        self.host_slots: Ints = self.host_tokens  # of the pages

    @property
    def tokens(self) -> Tensor:
        """Flat input tokens of the newest step: int32, the same address in every bucket."""
        return self._mirror.buffer[: self.limits.tokens]

    def _layout(self, size: int) -> Layout:
        limits = self.limits
        rows = min(size, limits.rows + size // (SHORT + 1))  # the latter: see `_parted`
        tiles = min(size, rows * -(-min(size, SHORT) // self._tile))
        short = min(limits.items, tiles * -(-limits.max_len // limits.split))
        chunks = max(1, most_chunk_items(rows, size, tile=self._chunk_tile))
        one = {name: (size,) for name in ("tokens", "origin", "positions", "kv")}
        row = {name: (rows,) for name in ("slot", "first", "start", "count")}
        rest = {"short_total": (1,), "chunk_total": (1,), "chunk_items": (2, chunks),
                "short_items": (2, short)}  # fmt: skip
        return Layout({**one, **row, **rest})

    def _bucket(self, layout: Layout) -> _Bucket:
        at = layout.device(self._mirror.buffer)
        meta = AttentionMeta(
            table=self._slots.table, slot=at["slot"], first=at["first"], start=at["start"],
            count=at["count"], short_items=at["short_items"], short_total=at["short_total"],
            chunk_items=at["chunk_items"], chunk_total=at["chunk_total"],
        )  # fmt: skip
        views = StepViews(at["tokens"], at["origin"], at["positions"], at["kv"], meta)
        return _Bucket(layout, self._mirror.hosts(layout), views, layout.shapes["chunk_items"][1])

    def keep(self, cost: Callable[[int], float]) -> None:
        """From now on use only the buckets that no larger one is as cheap as.

        Up to INVARIANT rows a step must not take a bucket beyond, whose products may promise less.
        """
        few = [size for size in self.sizes if size <= INVARIANT]
        self.sizes = useful(few, cost) + useful(self.sizes[len(few) :], cost)

    # ---- a step ----------------------------------------------------------------------------------

    def stage(self, rows: list[Row], places: list[Place], plain: Plain) -> Staged:
        """Send a plan's integers; raise StepTooLarge before anything is sent.

        `plain` are the first rows; if there are no others, what they share with the last such step
        in the same host buffer is not written again.
        """
        count = len(rows) if plain.whole else sum(row.count for row in rows)
        if count > self.limits.tokens:
            raise StepTooLarge(f"{count} flat tokens; the largest step has {self.limits.tokens}")
        size, number = bucket(self.sizes, count), self._mirror.next()
        made = self._buckets[size]
        at, key, chunks = made.hosts[number], None, False
        if plain.whole:
            splits = plain.starts // self.limits.split + 1
            key = size, count, splits.tobytes()
            if not self._written.holds(number, key):
                self._fill_even(at, splits)
        else:
            rows, places = _parted(rows, places)
            first = plain.count if len(rows) > FEW else 0
            if len(rows) - first <= LISTED:
                chunks = self._fill_few(at, rows[first:], plain.starts[:first], count)
            else:
                chunks = self._fill_lists(at, rows, count)
        self._written.note(number, key)
        self._fill_plain(at, plain)
        if not plain.whole:
            self._fill_long(at, rows, places, plain.count)
        self.host_tokens, self.host_positions = at["tokens"], at["positions"]
        self.host_slots = at["kv"]
        self._mirror.send(number, made.layout.words)
        return Staged(size, chunks)

    def positions(self, size: int) -> Tensor:
        """int32 [size] of the newest step's tokens, if that is its bucket."""
        return self._buckets[size].views.positions

    def run(self, staged: Staged) -> None:
        """All layers of what was staged, as a graph of its own."""
        self._graphs.run(("forward", staged), self.body(staged))

    def body(self, staged: Staged) -> Callable[[], None]:
        """The launches of all layers."""
        made = self._buckets[staged.size]
        most = made.chunk_items if staged.chunks else 0

        def body() -> None:
            self.ops.begin(made.views, most)
            self.hidden = self.model.run(self.ops)
            self.ops.end(self.hidden.last)

        return body

    def empty(self, size: int, *, chunks: bool = False) -> Staged:
        """Stage a step without rows, to warm the bucket; chunks only where they can be."""
        number = self._mirror.next()
        made = self._buckets[size]
        self._fill_lists(made.hosts[number], [], 0)
        self._written.note(number, None)
        self._mirror.send(number, made.layout.words)
        return Staged(size, chunks and chunks_possible(size))

    def _fill_lists(self, at: dict[str, Ints], rows: list[Row], count: int) -> bool:
        """Write who has which tokens, and what lies beyond; return whether there are chunks."""
        many = len(rows)
        starts = np.array([row.start for row in rows], dtype=np.int32)
        counts = np.array([row.count for row in rows], dtype=np.int32)
        self._check_items(at, starts, counts)
        self._clear(at, count, many)
        at["count"][:many] = counts
        np.cumsum(counts, out=at["first"][:many])
        at["first"][:many] -= counts
        at["short_total"][0] = fill_short(
            starts, counts, at["short_items"], tile=self._tile, split=self.limits.split
        )
        chunks = fill_chunks(starts, counts, at["chunk_items"], tile=self._chunk_tile)
        at["chunk_total"][0] = chunks
        return chunks > 0

    def _fill_even(self, at: dict[str, Ints], splits: Ints) -> None:
        """The same of rows with one token each; `splits` [S] are their numbers of items."""
        many, total = len(splits), int(splits.sum())
        self._check_room(at, total)
        self._clear(at, many, many)
        self._even(at, splits, total)
        at["short_total"][0], at["chunk_total"][0] = total, 0

    def _even(self, at: dict[str, Ints], splits: Ints, total: int) -> None:
        """Count, place and items of the first rows, which have one token each."""
        items, many = at["short_items"], len(splits)
        at["count"][:many], at["first"][:many] = 1, self._numbers[:many]
        tiles = self._numbers[:many] * TILES
        items[0, :total] = tiles.repeat(splits) if total > many else tiles
        items[1, :total] = ramps(splits) if total > many else 0

    def _fill_few(self, at: dict[str, Ints], rows: list[Row], even: Ints, count: int) -> bool:
        """The same of a few rows, where numpy's calls would take longer than loops.

        Before them come rows of one token each, which begin at `even`.
        """
        starts, counts = [row.start for row in rows], [row.count for row in rows]
        first, many, splits = len(even), len(even) + len(rows), even // self.limits.split + 1
        tiles, own = few_short(starts, counts, tile=self._tile, split=self.limits.split,
                               first=first)
        begin = int(splits.sum())
        total = begin + len(tiles)
        self._check_room(at, total)
        self._clear(at, count, many)
        if first:
            self._even(at, splits, begin)
        at["count"][first:many] = counts
        at["first"][first:many] = [*accumulate(counts[:-1], initial=first)]
        at["short_items"][:, begin:total] = tiles, own
        at["short_total"][0], at["chunk_total"][0] = total, 0
        if max(counts) <= SHORT:
            return False
        chunks, begins = few_chunks(starts, counts, tile=self._chunk_tile, first=first)
        at["chunk_items"][:, : len(chunks)] = chunks, begins
        at["chunk_total"][0] = len(chunks)
        return True

    def _clear(self, at: dict[str, Ints], count: int, many: int) -> None:
        """Write what lies beyond `count` tokens and `many` rows.

        Kernels look at a row's numbers before they know that it is there, and what lies here was
        perhaps written as something else, by a step of another bucket.
        """
        for name, rest in (("tokens", 0), ("origin", -1), ("positions", 0), ("kv", self._trash)):
            at[name][count:] = rest
        for name in ("slot", "first", "start", "count"):
            at[name][many:] = 0

    def _fill_plain(self, at: dict[str, Ints], plain: Plain) -> None:
        """Write the tokens of the first rows."""
        many, slots, tokens = plain.count, plain.slots, plain.tokens
        if not many:
            return
        at["positions"][:many] = at["start"][:many] = plain.starts
        at["kv"][:many], at["slot"][:many] = plain.kv, slots
        if tokens is None:
            at["tokens"][:many], at["origin"][:many] = 0, slots
        else:
            at["tokens"][:many] = np.maximum(tokens, 0)
            at["origin"][:many] = np.where(tokens < 0, slots, -1)

    def _fill_long(
        self, at: dict[str, Ints], rows: list[Row], places: list[Place], first: int
    ) -> None:
        """Write the tokens of the rows from `first` on; before it each has one."""
        tokens, origins = list[int](), list[int]()
        slots = [place.slot for place in places[first:]]
        for row, slot in zip(rows[first:], slots, strict=True):
            start, count = row.start, row.count
            if row.pending:
                tokens += (0, *row.draft)
                origins += (slot, *[-1] * len(row.draft))
            else:
                tokens += row.seq.tokens[start : start + count - len(row.draft)]
                tokens += row.draft
                origins += [-1] * count
        many, size = len(rows), self.limits.size
        if many - first <= FEW:
            self._place_few(at, rows, slots, first, tokens, origins)
            return
        starts = np.array([row.start for row in rows[first:]], dtype=np.int32)
        at["slot"][first:many], at["start"][first:many] = slots, starts
        end = first + len(tokens)
        at["tokens"][first:end], at["origin"][first:end] = tokens, origins
        counts = at["count"][first:many]
        offsets = starts - at["first"][first:many] + first  # position less place, of each row
        positions = np.arange(len(tokens), dtype=np.int32)
        positions += offsets.repeat(counts)
        block, inner = np.divmod(positions, size)
        at["positions"][first:end] = positions
        ids = self._slots.ids[np.array(slots).repeat(counts), block]
        at["kv"][first:end] = ids * size + inner

    def _place_few(
        self, at: dict[str, Ints], rows: list[Row], slots: list[int], first: int,
        tokens: list[int], origins: list[int],
    ) -> None:  # fmt: skip
        """The end of the same for a few rows, which mostly lie in one block each."""
        size, flat = self.limits.size, first
        at["tokens"][first : first + len(tokens)] = tokens
        at["origin"][first : first + len(tokens)] = origins
        for line, row in enumerate(rows[first:], first):
            start, count, slot = row.start, row.count, slots[line - first]
            at["slot"][line], at["start"][line] = slot, start
            places = at["positions"][flat : flat + count]
            np.add(self._numbers[:count], start, out=places)
            block, ids = start // size, self._slots.ids[slot]
            if (start + count - 1) // size == block:
                np.add(places, (ids[block] - block) * size, out=at["kv"][flat : flat + count])
            else:
                blocks, inner = np.divmod(places, size)
                at["kv"][flat : flat + count] = ids[blocks] * size + inner
            flat += count

    def _check_items(self, at: dict[str, Ints], starts: Ints, counts: Ints) -> None:
        split, tile = self.limits.split, self._tile
        short = counts <= SHORT
        splits = (starts[short] + counts[short]) // split + 1
        self._check_room(at, int((splits * -(-counts[short] // tile)).sum()))

    def _check_room(self, at: dict[str, Ints], wanted: int) -> None:
        if wanted > (room := at["short_items"].shape[1]):
            raise StepTooLarge(f"{wanted} attention splits; there is room for {room}")


def _parted(rows: list[Row], places: list[Place]) -> tuple[list[Row], list[Place]]:
    """Rows as attention sees them: guesses behind much of a prompt are a row of their own.

    So each token is computed by the kernel that had it, too, if nothing had been guessed.
    """
    if not any(row.draft and row.count > SHORT for row in rows):
        return rows, places
    parts: list[Row] = []
    theirs: list[Place] = []
    for row, place in zip(rows, places, strict=True):
        more = len(row.draft)
        if more and row.count > max(SHORT, 1 + more):
            own = row.count - more
            parts += (replace(row, count=own, draft=()),
                      replace(row, start=row.start + own, count=more))
            theirs += (place, place)
        else:
            parts.append(row)
            theirs.append(place)
    return parts, theirs


def noted(picks: Picks, model: Model, head_dim: int, dtype: torch.dtype) -> None:
    """Tell the picks which products a step has."""
    for layer in model.layers:
        picks.note("layer", layer.qkv, f"turn{head_dim}", dtype)
        picks.note("layer", layer.out, "add", dtype)
        picks.note("layer", layer.gate_up, "gate", dtype)
        picks.note("layer", layer.down, "add", dtype)
    picks.note("head", model.head, "store", torch.float32)


def layer_bytes(model: Model) -> int:
    """Bytes of weights that a layer's products read; of the largest layer."""
    return max(
        sum(one.weight.nbytes for one in (layer.qkv, layer.out, layer.gate_up, layer.down)
            if one.weight is not None)
        for layer in model.layers
    )  # fmt: skip
