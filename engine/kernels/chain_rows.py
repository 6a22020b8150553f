"""Which rows a device draft computes behind a settled step, as only the device knows it.  No math.

A flat token of position i becomes the draft's row (feature of i, token i + 1) in the slot of i + 1.
Behind a draw the next token is what was drawn, and where a draft token was wrong, the rows behind
it mean nothing: they are written to the block that is nobody's.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue

# Views of a step's one buffer, see sampler_tables.WORDWISE.
WORDWISE = ("known", "group", "offset", "fresh", "after", "ends", "base", "start", "place", "limit")


@dataclass(frozen=True, slots=True)
class FlatRows:
    """A step's N flat tokens as the host knows them, int32 [N] each."""

    known: Tensor  # the token behind this one, or -1 where it is drawn in this step
    group: Tensor  # whose draw; the number of its sequence among those that draw
    offset: Tensor  # draft tokens before it in its sequence's row
    fresh: Tensor  # the drawn row that gives the token behind it, where it is drawn
    after: Tensor  # page slot of the position behind it; of padded tokens one of the trash block
    ends: Tensor  # the block that it ends, or -1


@dataclass(frozen=True, slots=True)
class Groups:
    """The sequences that draw, int32 [G] each; those that are not there have limit -1."""

    base: Tensor  # flat index of the newest token that the host knew
    start: Tensor  # position of `base`
    place: Tensor  # slot of the sequence in the tables
    limit: Tensor  # draft tokens wanted
    begin: Tensor  # slot from which on the draft has rows, at least 1


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows of `extend`, int32 [N] each."""

    tokens: Tensor  # consumed
    slots: Tensor  # where their KV goes
    ends: Tensor  # the block whose end feature they give, or -1


@dataclass(frozen=True, slots=True)
class Chains:
    """Where each group's chain begins and goes."""

    row: Tensor  # int32 [G] flat index of the newest true row
    begin: Tensor  # int32 [G] slot from which on there are rows
    tokens: Tensor  # int32 [K, G] drawn by the draft
    positions: Tensor  # int32 [K, G] of the feature that step k reads
    slots: Tensor  # int32 [K, G] where its row lies


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=WORDWISE)
def _take(
    known, group, offset, fresh, after, ends, matched, drawn, tokens, slots, ended, count, trash,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < count
    token = tl.load(known + row, mask=there, other=0)
    unknown = there & (token < 0)
    which = tl.load(group + row, mask=unknown, other=0)
    place = tl.load(offset + row, mask=unknown, other=0)
    right = tl.load(matched + which, mask=unknown, other=0)
    stands = place <= right
    own = tl.load(fresh + row, mask=unknown, other=0)
    new = tl.load(drawn + own, mask=unknown & stands, other=0)
    token = tl.where(unknown, tl.maximum(new, 0), token)
    slot = tl.load(after + row, mask=there, other=0)
    end = tl.load(ends + row, mask=there, other=-1)
    good = stands | ~unknown
    tl.store(tokens + row, token, mask=there)
    tl.store(slots + row, tl.where(good, slot, trash), mask=there)
    tl.store(ended + row, tl.where(good, end, -1), mask=there)


def take(rows: FlatRows, matched: Tensor, drawn: Tensor, taken: Taken, trash: int) -> None:
    """Fill `taken` of a step's N tokens; `matched` [G] and `drawn` [R] are its settle's results."""
    count, block = rows.known.shape[0], 128
    enqueue(_take, (triton.cdiv(count, block),))(
        rows.known, rows.group, rows.offset, rows.fresh, rows.after, rows.ends, matched, drawn,
        taken.tokens, taken.slots, taken.ends, count, trash, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["many"], do_not_specialize_on_alignment=WORDWISE)
def _begin(
    base, start, place, limit, matched, table, row, positions, slots, width, size, trash, many,
    DEPTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    right = tl.load(matched + group)
    wanted = tl.load(limit + group)
    # Of a group that is not there `matched` is an older step's.
    right = tl.where(wanted >= 0, right, 0)
    tl.store(row + group, tl.load(base + group) + right)
    line = tl.load(place + group).to(tl.int64) * width
    position = tl.load(start + group) + right
    for depth in tl.static_range(DEPTH):
        at = position + depth
        lives = depth < wanted
        block = tl.load(table + line + (at + 1) // size, mask=lives, other=0)
        slot = tl.where(lives, block * size + (at + 1) % size, trash)
        tl.store(positions + depth * many + group, tl.where(lives, at, 0))
        tl.store(slots + depth * many + group, slot)


def begin(
    groups: Groups, matched: Tensor, table: Tensor, chains: Chains, size: int, trash: int
) -> None:
    """Fill `chains` but its tokens; `table` int32 [slots + 1, width] has each sequence's blocks."""
    depth, many = chains.positions.shape
    enqueue(_begin, (many,))(
        groups.base, groups.start, groups.place, groups.limit, matched, table, chains.row,
        chains.positions, chains.slots, table.shape[1], size, trash, many, DEPTH=depth,
        num_warps=1,
    )  # fmt: skip
