"""The one acceptance rule: follow the draft while it is what the target drew.  Sees no tensor.

Greedy and sampled decoding, with and without drafts, with and without a grammar all end here.
Every token that comes out was drawn by the target: a draft can change the speed, never the text.
The one exception is a closing plan, which puts a token of its own in place of a drawn one.

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

    @property
    def accepting(self) -> bool:
        """Whether the output may end here."""

    def accept(self, token: int) -> bool:
        """Move over `token`; False, and unmoved, when it is not legal."""

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are legal in a row from here; moves nothing."""

    def allows(self, token: int) -> bool:
        """Whether a mask would let it be drawn: it is legal, or may end the output here."""


class Verdict(Protocol):
    """What a closing plan says of a run: engine/grammar/closing.py's Taken."""

    @property
    def kept(self) -> int:
        """How many tokens of the run stand."""

    @property
    def forced(self) -> int | None:
        """What stands in place of the next one."""

    @property
    def ended(self) -> bool:
        """The output is over behind the kept ones: what the next one opens would not fit."""


class Closer(Protocol):
    """The closing plan of one choice as acceptance sees it; it moves the grammar itself."""

    @property
    def overridden(self) -> int:
        """Tokens that it has put in place of drawn ones."""

    def take(self, run: Sequence[int], budget: int) -> Verdict:
        """Move over the legal tokens of `run` that leave room to close within `budget` tokens."""


class End(msgspec.Struct, frozen=True, gc=False):
    """What may end a choice inside a run of accepted tokens."""

    remaining: int  # output tokens that may still come, at least 1
    stop_ids: Collection[int] = ()
    grammar: GrammarEnd | None = None
    closing: Closer | None = None  # how the grammar can be closed in time; only with a grammar
    lean: bool = False  # rows behind the first may have been drawn without the grammar's mask


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """What a choice gains from one step."""

    tokens: list[int]  # in order; never empty unless `finish` is "error"
    matched: int  # draft tokens that were right and are kept: the first `matched` of `tokens`
    finish: str  # "" = goes on, "stop" = stop id or grammar end, "length", "error" = no legal token
    stopped: bool  # the last token is a stop id
    forced: bool = False  # the last token is the plan's: the target had drawn another one there
    unopened: bool = False  # the plan ended it, "length": what came next had no room to close
    undrawn: bool = False  # what comes next was drawn without a mask and is not legal: draw it anew


def accept(sampled: Sequence[int], draft: Sequence[int], end: End) -> Accepted:
    """Keep the target's tokens up to its first disagreement with the draft or the first end.

    `sampled[i]` is what the target drew behind `draft[:i]`: one entry more than the draft has, so
    that k drafts give 1 to k + 1 tokens.  Of several ends at one token the meaning goes first: a
    stop id or a grammar end on the last allowed token is "stop".  A negative token
    (engine/sampling.py: the row had no legal one) or one that the grammar refuses ends the choice
    with "error" and is dropped; behind a miss neither is looked at.  The grammar moves over every
    kept token that is no stop id.
    With a plan a token that leaves it no room is replaced by the plan's, or ends the choice; all
    behind it is dropped, and "stop" is "length" from then on.

    Where `end.lean`, a token that the grammar refuses is no error behind the first one: its row had
    no mask, so it tells nothing, and the place is to be drawn again as the first of a step.  One
    that is legal is what the mask would have left, too, if nothing but the largest logit counts.
    """
    assert len(sampled) == len(draft) + 1, f"{len(sampled)} sampled for {len(draft)} drafts"
    assert end.remaining > 0, "a choice without tokens left was run"
    if end.closing is not None and end.grammar is not None:
        return _within_plan(sampled, draft, end, end.grammar, end.closing)
    tokens: list[int] = []
    matched = 0
    for place, token in enumerate(sampled):
        if place and end.lean and _stray(token, end):
            return Accepted(tokens, matched, "", False, undrawn=True)
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


def _within_plan(
    sampled: Sequence[int], draft: Sequence[int], end: End, grammar: GrammarEnd, closing: Closer
) -> Accepted:
    """`accept` where a plan has the last word: it is asked once, for the whole run."""
    right = 0
    while right < len(draft) and draft[right] == sampled[right]:
        right += 1
    run = list(sampled[: min(right + 1, end.remaining)])
    words = next((i for i, t in enumerate(run) if t < 0 or t in end.stop_ids), len(run))
    legal = grammar.valid_prefix(run[:words])
    taken = closing.take(run[:legal], end.remaining)
    tokens = run[: taken.kept]
    matched = min(right, taken.kept)
    if taken.forced is not None:
        tokens.append(taken.forced)
    assert taken.forced is not None or taken.ended or taken.kept == legal, "a plan lost a token"
    finish, stopped, undrawn = "", False, False
    if taken.ended:  # a grammar that broke ends where it may not
        finish = "length" if grammar.accepting else "error"
    elif grammar.finished:
        finish = "stop"
    elif taken.forced is None and legal < len(run):
        undrawn = end.lean and legal > 0 and _stray(run[legal], end)
        stopped = not undrawn and legal == words and run[legal] >= 0
        finish = "stop" if stopped else "" if undrawn else "error"
    elif len(tokens) == end.remaining:
        finish = "length"
    if stopped:
        tokens.append(run[legal])
        matched = min(right, len(tokens))
    if finish == "stop" and closing.overridden:
        finish = "length"
    forced = taken.forced is not None
    return Accepted(tokens, matched, finish, stopped, forced, taken.ended, undrawn)


def _stray(token: int, end: End) -> bool:
    """Whether the grammar, which stands before `token`, would not have let it be drawn."""
    grammar = end.grammar
    if grammar is None or token < 0:
        return False
    return not grammar.allows(token)


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
