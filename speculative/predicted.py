"""Where an output stands in its prediction, through edits.  Knows no other text.

    prediction   a b c d e f g h i        a client's guess of the whole output
    output       a b X                    changed: c -> X; the next is taken to be d until seen
                 a b X Y d e              inserted: d, e found again behind the place left

The place moves with each token that agrees.  Behind one that does not, the nearest place ahead that
ends in the newest tokens is taken; else the place moves on as if a token had been replaced.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from speculative.chains import Chains

BEHIND, AHEAD = 8, 64  # tokens around an edit that are looked through for its end
LOST = 3  # tokens without agreement after which nothing is guessed
REACH = 16  # tokens compared at most


class Place(NamedTuple):
    """A place in the prediction."""

    at: int = 0  # index of the token that should come next
    run: int = 0  # tokens that agreed up to here
    lost: int = 0  # output tokens since the last agreement; at the start none
    left: int = 0  # where the last two tokens agreed: the next edit begins here


class Prediction:
    """One prediction; many choices may follow it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._chains = Chains()
        self._chains.extend(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._chains.nbytes

    @property
    def tokens(self) -> array[int]:
        """The prediction; not to be changed."""
        return self._chains.tokens

    def follow(self, place: Place, output: Sequence[int], count: int) -> Place:
        """The place after the newest `count` tokens of the output's end."""
        first = len(output) - count
        tokens = self._chains.tokens
        for index in range(first, len(output)):
            at, run, lost, left = place
            if at < len(tokens) and tokens[at] == output[index]:
                place = Place(at + 1, run + 1, 0, at + 1 if run else left)
            else:
                place = self._found(left, lost + 1, output[max(0, index + 1 - REACH) : index + 1])
        return place

    def _found(self, left: int, lost: int, newest: Sequence[int]) -> Place:
        """The place whose tokens before it are the output's newest, or the next one."""
        tokens = self._chains.tokens
        expected = left + lost
        best, run, far = expected, 0, 0
        token = newest[-1]
        low = max(0, left - BEHIND)
        for at, other in enumerate(tokens[low : left + min(lost, AHEAD) + AHEAD], low + 1):
            if other != token:
                continue
            length, longest = 1, min(at, len(newest))
            while length < longest and tokens[at - 1 - length] == newest[-1 - length]:
                length += 1
            if length > run or (length == run and abs(at - expected) < far):
                best, run, far = at, length, abs(at - expected)
        if run < 2:
            for at, length in self._chains.matches(newest, most=4, reach=REACH):
                if length > max(run, 2):
                    best, run = at, length
        if run > 1:
            return Place(best, run, 0, best)
        if run and best > left:  # one token alone says nothing behind us
            return Place(best, 1, lost, left)
        return Place(expected, 0, lost, left)
