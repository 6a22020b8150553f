"""Drafts that a grammar dictates: keys, brackets, the rest of an enum value.  Forces nothing.

The tokens are those into which the tokenizer itself would cut the only text that may come.  The
target may cut it otherwise, so they are guesses like any other, only good ones; how good they are
is counted.
"""

from __future__ import annotations

from engine.proposer import Key, Turn

STEADY = 200.0  # tokens that the estimate reaches back
FIRST = 0.9  # of a token nothing is known about


class ForcedDrafts:
    """What the grammar of a sequence fixes from its newest token on."""

    source = "forced"

    def __init__(self) -> None:
        self._right, self._seen = FIRST * 10, 10.0
        self._runs: dict[Key, tuple[int, list[int]]] = {}  # tokens before a run, and the run

    def guess(self, turn: Turn, limit: int) -> tuple[list[int], list[float]]:
        """The tokens, at most `limit`, and each one's chance to be reached and right."""
        tokens = self._run(turn)[:limit]
        share = self._right / self._seen
        return tokens, [share ** (place + 1) for place in range(len(tokens))]

    def _run(self, turn: Turn) -> list[int]:
        """What must come; a grammar that was asked for a long run need not be for its rest."""
        before, run = self._runs.get(turn.key, (0, []))
        done = len(turn.tokens) - before
        if 0 < done < len(run) and run[:done] == list(turn.tokens[before:]):
            return run[done:]
        run = turn.forced()
        self._runs[turn.key] = len(turn.tokens), run
        return run

    def forget(self, key: Key) -> None:
        """The sequence ended."""
        self._runs.pop(key, None)

    def observe(self, verified: int, matched: int) -> None:
        """Of the last guess the target looked at `verified` tokens, and `matched` were right."""
        fade = 1 - 1 / STEADY
        for place in range(verified):
            self._seen = self._seen * fade + 1
            self._right = self._right * fade + (place < matched)
