"""The device's half of engine/accept.py: how many drafts were right, and each slot's newest token.

Ends nothing: stop ids, lengths and grammars stay with the host.  It runs right behind the draw, so
that the next step can start from `last` before the host has seen a token.
"""

# mypy: disable-error-code="no-untyped-def,no-any-unimported,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.launch import enqueue
from engine.kernels.sampler_score import FLAGS, PENALTIES, WORDS
from engine.kernels.sampler_tables import WORDWISE, Results, Rows, SlotTables


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _walk(
    groups, group_row, group_rows, row_slot, row_first, tokens, drawn, records, history, last,
    matched, vocab,
    PENALISE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    if group < tl.load(groups):
        begin = tl.load(group_row + group)
        drafts = tl.load(group_rows + group) - 1
        slot = tl.load(row_slot + begin).to(tl.int64)
        first = tl.load(row_first + begin)
        right, going = drafts * 0, drafts * 0 + 1
        for place in range(drafts):
            # A row without a token drew -1, which no draft is.
            same = tl.load(drawn + begin + place) == tl.load(tokens + first + 1 + place)
            going = tl.where(same, going, 0)
            right += going
        tl.store(matched + group, right)
        tl.store(last + slot, tl.maximum(tl.load(drawn + begin + right), 0))
        if PENALISE:
            if (tl.load(records + slot * WORDS + FLAGS) & PENALTIES) != 0:
                for place in range(right + 1):
                    token = tl.load(drawn + begin + place)
                    # Atomic, since one token may come twice and a plain load could be hoisted.
                    tl.atomic_add(
                        history + slot * vocab + tl.maximum(token, 0),
                        tl.where(token >= 0, 2, 0), sem="relaxed",
                    )  # fmt: skip


def accept_walk(rows: Rows, slots: SlotTables, results: Results, penalties: bool) -> None:
    """Write `matched` of each group and `last` of its slot.

    With `penalties` the accepted tokens go into the history of the slots that have some.  Groups
    beyond the real ones do nothing; no two real groups may share a slot.
    """
    enqueue(_walk, (results.matched.shape[0],))(
        rows.groups, rows.group_row, rows.group_rows, rows.slot, rows.first, rows.tokens,
        results.tokens, slots.records, slots.history, slots.last, results.matched,
        slots.history.shape[1], PENALISE=penalties, num_warps=1,
    )  # fmt: skip
