"""A text of token ids that finds its own repeats, as LZ77 coders do.  Guesses nothing.

    tokens    a  b  c  a  b  d  a  b
    before   -1 -1 -1 -1  1 -1 -1  4      head[hash(a, b)] = 7: where the pair (a, b) ended last
                                          before[7] = 4, before[4] = 1: where it ended before that

Hash chains over pairs of tokens (deflate: RFC 1951, section 4, there over three bytes).  A chain
holds all pairs of one hash, so what it names is compared before it counts.  Text is only added, so
a place once found stays right.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Container, Sequence

import numpy as np

NO_ID = -1  # stands for an id that is no int32, and parts two texts; nobody drafts it
BULK = 48  # tokens from which on numpy is faster than a loop
FIRST_BITS = 6
LOAD = 2  # tokens a slot at most; pairs repeat, so a chain holds few strangers
VISITS = 2  # chain links followed for each match wanted: the others share a hash, not the pair

# Odd multipliers that spread the pair over the upper bits (Knuth, TAOCP 3, section 6.4).
_A, _B, _ALL = 0x9E3779B1, 0x85EBCA77, 0xFFFFFFFF


class Chains:
    """An append-only text, and for each pair of tokens where it stood before."""

    __slots__ = ("_bits", "_head", "before", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")  # read it, never change it
        self.before = array("i")  # the end of an earlier pair of the same hash, or -1
        self._bits = FIRST_BITS
        self._head = array("i", [-1]) * (1 << FIRST_BITS)

    def __len__(self) -> int:
        """Tokens in the text."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that the text and its index hold, spare room included."""
        size = sys.getsizeof
        return size(self.tokens) + size(self.before) + size(self._head) + size(self)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end; ids that are no int32 become NO_ID."""
        start = len(self.tokens)
        if start + len(tokens) > LOAD * len(self._head):
            self.tokens.extend(ids(tokens))
            self._grow()
        elif len(tokens) >= BULK:
            self.tokens.extend(ids(tokens))
            self._link(start)
        else:
            self._one_by_one(tokens)

    def matches(
        self, context: Sequence[int], most: int = 16, reach: int = 32,
        known: Container[int] = (),
    ) -> list[tuple[int, int]]:
        """Where the end of `context` stood before: (position of what follows, match length).

        The newest `most` places at which its last two tokens stand and something follows, longest
        match first, then newest.  Lengths count from 2 to `reach` tokens.  Places whose position
        is in `known` are left out.  The time does not depend on the length of the text.
        """
        size = len(context)
        if size < 2:
            return []
        tokens, before = self.tokens, self.before
        first, second = context[-2], context[-1]
        at = self._head[((first * _A + second * _B) & _ALL) >> (32 - self._bits)]
        if at == len(tokens) - 1 and at >= 0:
            at = before[at]  # nothing follows the text's own end
        found: list[tuple[int, int]] = []
        for _ in range(VISITS * most):
            if at < 0 or len(found) == most:
                break
            if tokens[at] == second and tokens[at - 1] == first and at + 1 not in known:
                length, longest = 2, min(reach, size, at + 1)
                while length < longest and tokens[at - length] == context[-1 - length]:
                    length += 1
                found.append((at + 1, length))
            at = before[at]
        found.sort(key=_best_first)
        return found

    def check(self) -> None:
        """Assert that every chain goes backwards through pairs of its own hash, and is whole."""
        ends: dict[int, int] = {}
        for at in range(1, len(self.tokens)):
            slot = self._slot(self.tokens[at - 1], self.tokens[at])
            assert self.before[at] == ends.get(slot, -1), f"position {at}: broken chain"
            ends[slot] = at
        heads = {slot: at for slot, at in enumerate(self._head) if at >= 0}
        assert heads == ends, "head table and text disagree"
        assert len(self.before) == len(self.tokens) <= LOAD * len(self._head)

    def _slot(self, first: int, second: int) -> int:
        return ((first * _A + second * _B) & _ALL) >> (32 - self._bits)

    def _one_by_one(self, tokens: Sequence[int]) -> None:
        """A few tokens, each linked as it is added."""
        text, before, head, shift = self.tokens, self.before, self._head, 32 - self._bits
        for token in tokens:
            at = len(text)
            try:
                text.append(token)
            except OverflowError:
                text.append(NO_ID)
            if at:
                slot = ((text[at - 1] * _A + text[at] * _B) & _ALL) >> shift
                before.append(head[slot])
                head[slot] = at
            else:
                before.append(-1)

    def _grow(self) -> None:
        """A head table with room for as much text again, and all links anew."""
        self._bits = max(FIRST_BITS, (len(self.tokens) - 1).bit_length())
        self._head = array("i", [-1]) * (1 << self._bits)
        self.before = array("i")
        self._link(0)

    def _link(self, start: int) -> None:
        """Link the tokens from `start` on: sorted by (slot, position), a chain is a run."""
        if not start and self.tokens:
            self.before.append(-1)  # no pair ends here
            start = 1
        count = len(self.tokens) - start
        if count < 1:
            return
        ids = np.frombuffer(self.tokens, np.uint32)[start - 1 :]
        slots = (ids[:-1] * np.uint32(_A) + ids[1:] * np.uint32(_B)) >> np.uint32(32 - self._bits)
        keys = slots.astype(np.int64) << 32
        keys |= np.arange(start, start + count)
        keys.sort()
        places, slots = keys.astype(np.int32), (keys >> 32).astype(np.int32)
        opens = np.empty(count + 1, bool)  # a run of one slot begins here
        opens[0] = opens[-1] = True
        np.not_equal(slots[1:], slots[:-1], out=opens[1:-1])
        first, last = opens[:-1], opens[1:]
        head = np.frombuffer(self._head, np.int32)
        earlier = np.empty(count, np.int32)
        earlier[1:] = places[:-1]
        earlier[first] = head[slots[first]]
        head[slots[last]] = places[last]
        before = np.empty(count, np.int32)
        before[places - start] = earlier
        self.before.frombytes(before.tobytes())


def _best_first(match: tuple[int, int]) -> tuple[int, int]:
    return -match[1], -match[0]


def ids(tokens: Sequence[int]) -> array[int]:
    """Token ids as int32; what is none becomes NO_ID."""
    try:
        return array("i", tokens)
    except OverflowError:
        return array("i", [token if -(2**31) <= token < 2**31 else NO_ID for token in tokens])
