"""What a step gave one choice, as the gateway is told it.  Books nothing.  See messages.py: Out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.guessing import counted
from engine.messages import UNLIKELY, Out, TokenLogprobs

if TYPE_CHECKING:
    from engine.accept import Accepted
    from engine.sequence import Sequence


def of_run(seq: Sequence, accepted: Accepted, logprobs: list[TokenLogprobs], overflow: str) -> Out:
    """Of an accepted run that is booked."""
    return Out(
        seq.submit.id, seq.index, accepted.tokens,
        finish="" if accepted.finish == "error" else accepted.finish,
        stopped=accepted.stopped,
        logprobs=logprobs,
        cached=seq.cached or 0,
        written=seq.written,
        drafted=seq.drafted,
        accepted=seq.accepted,
        drafts=counted(seq.verified, seq.matched) if seq.finish and seq.drafted else [],
        overflow=overflow,
    )  # fmt: skip


def of_one(seq: Sequence, token: int, finish: str) -> Out:
    """Of a lone token of a choice that nothing but its ends follows: most of most steps."""
    drafts = counted(seq.verified, seq.matched) if finish and seq.drafted else []
    return Out(
        seq.submit.id, seq.index, [token], finish, finish == "stop", [],
        seq.cached or 0, seq.written, seq.drafted, seq.accepted, drafts,
    )  # fmt: skip


def overflow(seq: Sequence, accepted: Accepted) -> str:
    """`Out.overflow` of what a choice gained."""
    if accepted.finish in ("", "error"):
        return ""
    if seq.closing is not None and seq.closing.overridden:
        return "closed"
    return "unopened" if accepted.unopened else ""


def scored(token: int, drawn: TokenLogprobs) -> TokenLogprobs:
    """The logprobs of a token that stands where its row had drawn another one.

    Its own is known when it is among the best of that row.
    """
    return TokenLogprobs(dict(drawn.top).get(token, UNLIKELY), drawn.top)
