"""Samplers that mean harm to a constrained output: what they like of what is legal.  No model."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from engine.grammar.closing import Closing
from engine.grammar.state import State
from engine.grammar.vocabulary import Vocabulary

#: Which pieces a sampler likes; it takes another one only where none of them is legal.
LIKES: dict[str, Callable[[bytes], bool]] = {
    "uniform": lambda piece: True,
    "openers": lambda piece: b"{" in piece or b"[" in piece,
    "structure": lambda piece: len(piece) < 5 and any(sign in piece for sign in b'{[":,'),
    "white space": lambda piece: piece.isspace(),
    "no quote": lambda piece: b'"' not in piece,
    "half code points": lambda piece: piece[-1:] >= b"\xc0",
    "digits": lambda piece: piece.strip().isdigit(),
    "escapes": lambda piece: piece[-1:] == b"\\" or piece in (b"u", b"0", b"1"),
}


class Hostile:
    """Draws legal tokens of one vocabulary as a named sampler does."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = [vocabulary.piece(token) for token in range(vocabulary.size)]
        self._size = vocabulary.size
        self._stops = sorted(vocabulary.stops)
        self._liked = {
            name: np.array([bool(piece) and likes(piece) for piece in pieces])
            for name, likes in LIKES.items()
        }
        self._mask = np.zeros((1, (self._size + 31) // 32), dtype=np.int32)

    def draw(self, name: str, state: State, rng: random.Random) -> int | None:
        """A legal token that is no stop id; None when only the end is legal."""
        fill_next_token_bitmask(state.matcher, self._mask)
        legal = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little")[: self._size] > 0
        legal[self._stops] = False
        liked = np.flatnonzero(legal & self._liked[name])
        if not len(liked) or rng.random() < 0.05:
            liked = np.flatnonzero(legal)
        return int(liked[rng.randrange(len(liked))]) if len(liked) else None


def write(
    closing: Closing, state: State, budget: int, draw: Callable[[], int | None]
) -> list[int]:
    """One output of at most `budget` tokens, its promise checked at every token."""
    out: list[int] = []
    while len(out) < budget and not state.finished:
        token = draw()
        if token is None:
            break
        taken = closing.take([token], budget - len(out))
        if taken.ended:
            assert state.accepting
            break
        assert taken.kept == (taken.forced is None)
        out.append(token if taken.forced is None else taken.forced)
        assert state.steps == len(out)
        assert len(closing.plan) <= budget - len(out)
        assert state.closes(closing.plan)
    return out
