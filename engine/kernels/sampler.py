"""Settle on the device: draw the rows' tokens, take logprobs, walk drafts.  Reads nothing back.

The semantics are those of engine/sampling.py and engine/accept.py; what the kernels do stands in
sampler_score.py, sampler_filter.py, sampler_search.py, logprobs.py and accept_walk.py.  Nothing is
allocated, grids depend on bucket sizes only, and a row's token is a function of its logits, mask,
parameters and history alone: never of its neighbours, their number, or these switches.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.accept_walk import accept_walk
from engine.kernels.logprobs import logprobs
from engine.kernels.sampler_filter import draw
from engine.kernels.sampler_score import pick, score
from engine.kernels.sampler_tables import Results, Rows, Scratch, SlotTables


@dataclass(frozen=True, slots=True)
class Needs:
    """What some row of the step needs; more than is needed costs time, less gives wrong tokens."""

    shaped: bool = False  # bias or penalties
    filters: bool = False  # top-k, top-p or min-p on a row with a temperature
    logprobs: bool = False


def settle(
    logits: Tensor, rows: Rows, slots: SlotTables, masks: Tensor | None, scratch: Scratch,
    results: Results, needs: Needs,
) -> None:  # fmt: skip
    """Draw the rows' tokens and follow the drafts: 3 launches, 7 with filters, 2 more for logprobs.

    `logits` [R, vocab] in float32 or bfloat16 are only read; `masks` int32 [M, ceil(vocab / 32)]
    allow id v by bit v % 32 of word v // 32, and are None when no row has one; of a row whose
    `rows.mask` is ~v only v is allowed.  R and the length of `results.matched` are the bucket's;
    the real counts are `rows.count` and `rows.groups`.
    """
    count, vocab = logits.shape
    score(logits, rows, slots, masks, scratch, needs.shaped, needs.filters)
    pick(rows, slots, scratch, results, count, needs.filters)
    if needs.filters:
        draw(rows, slots, scratch, results, count, vocab)
    if needs.logprobs:
        logprobs(logits, rows, slots, scratch, results)
    accept_walk(rows, slots, results, penalties=needs.shaped)
