"""Whether a scheduler's queue, running set and blocks agree.  Changes nothing.

For tests, which ask after every step; a server never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError that says what is lost, held twice, or ahead of itself."""
    pool, running, waiting = scheduler.pool, scheduler.running, scheduler.waiting
    pool.check()
    held = sum(len(seq.blocks) for seq in running)
    assert held >= pool.used, f"{pool.used} blocks in use, sequences hold {held}"
    for seq in waiting:
        assert not seq.blocks, f"waiting sequence {seq.key} holds {len(seq.blocks)} blocks"
        assert not seq.flying and not seq.pending, f"{seq.key} waits and flies"
    for seq in running:
        start = seq.computed + seq.flying
        assert start <= len(seq.blocks) * pool.size, f"{seq.key} lacks blocks"
        # They fly with the row that verifies them.
        drafts = len(seq.draft) if seq.pending and not seq.early else 0
        assert start < seq.known + drafts, f"{seq.key} is ahead"
        assert seq.computed < len(seq.tokens), f"{seq.key} has computed what it has not"
        assert 0 <= seq.pending <= seq.flying, f"{seq.key} draws what it does not compute"
    there = [s for seq in (*running, *waiting) for s in (seq, *seq.siblings)]
    known = [seq for choices in scheduler.living.values() for seq in choices]
    assert set(map(id, there)) == set(map(id, known)), "a living sequence is lost"
    assert len(there) == len(known), "a sequence is in two places"
    assert not any(seq.gone for seq in known), "a sequence lives after its end"
    assert scheduler.paused <= scheduler.living.keys(), "an ended request is paused"
