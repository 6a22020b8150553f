"""A tokenizer's tokens as a grammar sees them: bytes, ids, which of them end an output.  No state.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from engine.grammar import lexical
from engine.grammar.probe import Letters


class Vocabulary:
    """The tokens: their bytes, how many ids there are, and which of them end an output."""

    def __init__(self, tokenizer_json: str, size: int, stop_ids: Sequence[int]) -> None:
        self.size = size
        self.stops = frozenset(stop_ids)
        self.tokenizer = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=size, eos_token=list(stop_ids)
        )
        self._pieces: list[bytes | None] = [None] * size
        self._lexical = [bytearray(b"\xff") * size for _ in range(3)]  # 255: not asked before
        self.letters = Letters(self)  # for planner.py

    def piece(self, token: int) -> bytes:
        """The token's bytes."""
        found = self._pieces[token]
        if found is None:
            found = self._pieces[token] = self.tokenizer.decode_bytes([token])
        return found

    def lexical(self, before: int, token: int) -> int:
        """Where a JSON text stands behind the token (lexical.py)."""
        known = self._lexical[before]
        behind = known[token]
        if behind == 255:
            behind = known[token] = lexical.after(before, self.piece(token))
        return behind

    def lexicals(self, before: int, tokens: Sequence[int]) -> bytearray:
        """The same behind each of the tokens."""
        found = bytearray()
        for token in tokens:
            behind = self._lexical[before][token]
            before = self.lexical(before, token) if behind == 255 else behind
            found.append(before)
        return found

    def words(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first stop id, and before the first that is no token at all."""
        words = list(tokens)
        if not self.stops.isdisjoint(words) or (words and not self._holds(words)):
            bad = (t in self.stops or not 0 <= t < self.size for t in words)
            words = words[: next(i for i, is_bad in enumerate(bad) if is_bad)]
        return words

    def legible(self, token: int) -> bool:
        """Whether it is a token, and no stop id."""
        return 0 <= token < self.size and token not in self.stops

    def _holds(self, words: list[int]) -> bool:
        return min(words) >= 0 and max(words) < self.size
