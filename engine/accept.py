"""The one acceptance rule: follow the draft while it is what the target drew.  Sees no tensor.

Greedy and sampled decoding, with and without drafts, with and without a grammar all end here.
Every token that comes out was drawn by the target: a draft can change the speed, never the text.

    draft      d1 d2 d3        matched: d1 == y0, d2 == y1, d3 != y2
    sampled    y0 y1 y2 y3  -> tokens y0 y1 y2; y3 was drawn behind a wrong token and is dropped
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec


class GrammarEnd(Protocol):
    """The grammar of one choice as acceptance sees it, standing behind the last committed token."""

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may follow."""

    def accept(self, token: int) -> bool:
        """Move over `token`; False, and unmoved, when it is not legal."""


class End(msgspec.Struct, frozen=True, gc=False):
    """What may end a choice inside a run of accepted tokens."""

    remaining: int  # output tokens that may still come, at least 1
    stop_ids: Collection[int] = ()
    grammar: GrammarEnd | None = None


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """What a choice gains from one step."""

    tokens: list[int]  # in order; never empty unless `finish` is "error"
    matched: int  # draft tokens that were right and are kept: the first `matched` of `tokens`
    finish: str  # "" = goes on, "stop" = stop id or grammar end, "length", "error" = no legal token
    stopped: bool  # the last token is a stop id


def accept(sampled: Sequence[int], draft: Sequence[int], end: End) -> Accepted:
    """Keep the target's tokens up to its first disagreement with the draft or the first end.

    `sampled[i]` is what the target drew behind `draft[:i]`: one entry more than the draft has, so
    that k drafts give 1 to k + 1 tokens.  Of several ends at one token the meaning goes first: a
    stop id or a grammar end on the last allowed token is "stop".  A negative token
    (engine/sampling.py: the row had no legal one) or one that the grammar refuses ends the choice
    with "error" and is dropped; behind a miss neither is looked at.  The grammar moves over every
    kept token that is no stop id.
    """
    assert len(sampled) == len(draft) + 1, f"{len(sampled)} sampled for {len(draft)} drafts"
    assert end.remaining > 0, "a choice without tokens left was run"
    tokens: list[int] = []
    matched = 0
    for place, token in enumerate(sampled):
        finish = _ending(token, end, len(tokens) + 1)
        if finish == "error":
            return Accepted(tokens, matched, finish, False)
        tokens.append(token)
        right = place < len(draft) and draft[place] == token
        matched += right
        if finish:
            return Accepted(tokens, matched, finish, token in end.stop_ids)
        if not right:
            break
    return Accepted(tokens, matched, "", False)


def _ending(token: int, end: End, used: int) -> str:
    """How `token`, the `used`-th of this run, ends the choice; "" when it does not."""
    if token < 0:
        return "error"
    grammar = end.grammar
    if grammar is not None and token not in end.stop_ids:
        if not grammar.accept(token):
            return "error"
        if grammar.finished:
            return "stop"
    return ending(token, end.stop_ids, end.remaining - used)


def ending(token: int, stop_ids: Collection[int], left: int) -> str:
    """How a token that no grammar judges ends its choice; `left`: tokens that may follow it."""
    if token in stop_ids:
        return "stop"
    return "" if left else "length"
