"""Drafts that a grammar dictates: keys, brackets, the rest of an enum value.  Forces nothing.

The tokens are those into which the tokenizer itself would cut the only text that may come.  The
target may cut it otherwise, so they are guesses like any other, only good ones; how good they are
is counted.
"""

from __future__ import annotations

from engine.proposer import Turn

STEADY = 200.0  # tokens that the estimate reaches back
FIRST = 0.9  # of a token nothing is known about


class ForcedDrafts:
    """What the grammar of a sequence fixes from its newest token on."""

    source = "forced"

    def __init__(self) -> None:
        self._right, self._seen = FIRST * 10, 10.0

    def guess(self, turn: Turn, limit: int) -> tuple[list[int], list[float]]:
        """The tokens, at most `limit`, and each one's chance to be reached and right."""
        tokens = turn.forced()[:limit]
        share = self._right / self._seen
        return tokens, [share ** (place + 1) for place in range(len(tokens))]

    def observe(self, verified: int, matched: int) -> None:
        """Of the last guess the target looked at `verified` tokens, and `matched` were right."""
        fade = 1 - 1 / STEADY
        for place in range(verified):
            self._seen = self._seen * fade + 1
            self._right = self._right * fade + (place < matched)
