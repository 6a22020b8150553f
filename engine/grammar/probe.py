"""A scratch matcher that is asked byte by byte.  Decides nothing; planner.py does.

llguidance judges tokens by their bytes, so a text may be tried as single bytes and cut into tokens
afterwards; a control token, which has no bytes, is written as llguidance does: \\xff[id].
`validate_tokens` with a stop id behind the text says, without moving the matcher,
whether the output may end there; that takes a microsecond, and moving to the end and back 25.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.grammar.vocabulary import Vocabulary

CONTROL = 0xFF  # no UTF-8 text holds this byte
_CONTROL = re.compile(rb"\xff\[(\d+)\]")
TEXT_LIMIT = 32_768  # bytes of a plan
MASK_STEPS = 8  # what a mask costs, in calls that look at one token


class Stuck(Exception):
    """A search cannot go on: its steps are spent, or no tokens spell the text."""


class Broken(Exception):
    """The matcher reached one of its limits: this way is none; Probe.back leads out of it."""


class Letters:
    """The tokens of single bytes, and which fillers are cheap, of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = vocabulary.tokenizer
        self.vocabulary = vocabulary
        self.end: int = tokenizer.eos_token
        self.token = [-1] * 256  # -1: the vocabulary has no such token
        for letter in range(CONTROL):
            # A tokenizer may put a space before a text; the greedy one does not.
            greedy = tokenizer.greedy_tokenize(chr(letter)) if letter < 128 else []
            tokens: list[int] = greedy or tokenizer.tokenize_bytes(bytes([letter]))
            if len(tokens) == 1 and vocabulary.piece(tokens[0]) == bytes([letter]):
                self.token[letter] = tokens[0]
        known = [letter for letter in range(CONTROL) if self.token[letter] >= 0]
        self.letter = {self.token[letter]: letter for letter in known}
        controls = (t for t in range(vocabulary.size) if tokenizer.is_special_token(t))
        self.controls = [token for token in controls if token not in vocabulary.stops]
        self.known = np.array(known, dtype=np.uint8)
        # Where a mask says what of both may come.
        ids = np.array([*(self.token[letter] for letter in known), *self.controls])
        self.word, self.shift = ids // 32, (ids % 32).astype(np.int32)
        #: printable ASCII is there: what JSON is written in
        self.whole = all(self.token[letter] >= 0 for letter in range(0x20, 0x7F))
        self.closers = [spelt for end in _CLOSERS if (spelt := self.cut(end))]
        lengths = {f: len(tokenizer.tokenize_bytes(f * 64)) for f in _FILLERS}
        self.fillers = sorted(_FILLERS, key=lambda filler: lengths[filler])  # cheapest first

    def spell(self, text: bytes) -> list[int] | None:
        """The text as single-byte and control tokens; None when one of them is missing."""
        if CONTROL in text:
            return self._mixed(text, self.spell)
        tokens = [self.token[letter] for letter in text]
        return tokens if -1 not in tokens else None

    def cut(self, text: bytes) -> list[int] | None:
        """The text as the tokenizer cuts it, or as single bytes where that changes it."""
        if CONTROL in text:
            return self._mixed(text, self.cut)
        tokens: list[int] = self.vocabulary.tokenizer.tokenize_bytes(text)
        if b"".join(map(self.vocabulary.piece, tokens)) == text:
            return tokens
        return self.spell(text)

    def _mixed(
        self, text: bytes, tokens_of: Callable[[bytes], list[int] | None]
    ) -> list[int] | None:
        tokens: list[int] = []
        for place, part in enumerate(_CONTROL.split(text)):
            found = [int(part)] if place % 2 else tokens_of(part)
            if found is None:
                return None
            tokens += found
        return tokens

    def without(self, plan: list[int], text: bytes) -> list[int] | None:
        """The plan behind `text`; None when its bytes do not start with that."""
        for place, token in enumerate(plan):
            piece = self.vocabulary.piece(token)
            if len(piece) > len(text):
                rest = self.cut(piece[len(text) :]) if piece.startswith(text) else None
                return None if rest is None else [*rest, *plan[place + 1 :]]
            if not text.startswith(piece):
                return None
            text = text[len(piece) :]
            if not text:
                return plan[place + 1 :]
        return None


_CLOSERS = (b'"', b"}", b"]", b'"}', b'"]')
_FILLERS = (b"a", b"-", b"=", b"*", b" ", b"#", b"_", b"0", b"x", b".")


class Probe:
    """A matcher of its own, moved over bytes and back.

    Counts bound its work: `steps`, calls that look at one token, and `endless`, ways that turn out
    to have no end.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, letters: Letters, steps: int, endless: int,
        mask_steps: int = MASK_STEPS,
    ) -> None:  # fmt: skip
        """`mask_steps`: what a mask counts as."""
        self._origin = matcher
        self._matcher = matcher.deep_copy()
        self._path: list[int] = []  # tokens that were pushed
        self._letters = letters
        self._token = letters.token
        self._mask = np.zeros((1, (letters.vocabulary.size + 31) // 32), dtype=np.int32)
        self.steps, self.endless, self._mask_steps = steps, endless, mask_steps

    def reach(self, text: bytes) -> int:
        """How many tokens of the text are legal from here."""
        self._spend(1 + len(text) // 8)
        count: int = self._matcher.validate_tokens(self._tokens(text))
        return count

    def legal(self, text: bytes) -> bool:
        """Whether the text may come next."""
        self._spend(1 + len(text) // 8)
        tokens = self._tokens(text)
        count: int = self._matcher.validate_tokens(tokens)
        return count == len(tokens)

    def ends(self, text: bytes) -> bool:
        """Whether the output may end behind the text."""
        self._spend(1 + len(text) // 8)
        tokens = [*self._tokens(text), self._letters.end]
        count: int = self._matcher.validate_tokens(tokens)
        return count == len(tokens)

    def forced(self) -> bytes:
        """The text that must come next; often none.

        What must go on without end, to a limit of the matcher, is no way.  To learn that takes 40
        ms, so it has a count of its own.
        """
        if self.endless < 0:
            raise Stuck
        self._spend(1)
        text: bytes = self._matcher.compute_ff_bytes()
        if len(text) > TEXT_LIMIT:
            self.endless -= 1
            raise Broken if self.endless >= 0 else Stuck
        return text

    def row(self) -> bytes:
        """The bytes that may come next, each once, in order; CONTROL stands for control tokens."""
        known, flags = self._letters.known, self._flags()
        row: bytes = known[flags[: len(known)]].tobytes()
        return row + bytes([CONTROL]) if flags[len(known) :].any() else row

    def controls(self) -> list[bytes]:
        """The control tokens that may come next."""
        ids = self._letters.controls
        flags = self._flags()[len(self._letters.known) :]
        return [b"\xff[%d]" % token for token, may in zip(ids, flags, strict=True) if may]

    def push(self, text: bytes) -> None:
        """Move over a legal text."""
        self._spend(1 + len(text) // 2)
        tokens = self._tokens(text)
        if not self._matcher.consume_tokens(tokens):
            raise Broken
        self._path += tokens

    def pop(self, text: bytes) -> None:
        """Move back over the text that was pushed last."""
        if text:
            count = len(self._tokens(text))
            if not self._matcher.rollback(count):
                raise Broken
            del self._path[-count:]

    @property
    def depth(self) -> int:
        """How far it has moved, for `back`."""
        return len(self._path)

    def tail(self, most: int) -> bytes:
        """The bytes that it moved over last, at most so many; none before a control token."""
        letters = bytearray()
        for token in reversed(self._path[-most:]):
            letter = self._letters.letter.get(token)
            if letter is None:
                break
            letters.append(letter)
        return bytes(reversed(letters))

    def back(self, depth: int) -> None:
        """Return to where it stood with that depth, though the matcher may have broken since."""
        del self._path[depth:]
        self._matcher = self._origin.deep_copy()
        if not self._matcher.consume_tokens(self._path):
            raise Stuck  # the lexer, which all copies share, has no room for more states

    def _tokens(self, text: bytes) -> list[int]:
        tokens = [self._token[letter] for letter in text]
        if -1 in tokens:  # a control token, or a byte that the vocabulary lacks
            spelt = self._letters.spell(text)
            if spelt is None:
                raise Stuck
            return spelt
        return tokens

    def _flags(self) -> NDArray[np.bool_]:
        """Whether each known byte, and each control token, may come next."""
        self._spend(self._mask_steps)
        fill_next_token_bitmask(self._matcher, self._mask)
        flags: NDArray[np.bool_] = (
            self._mask[0, self._letters.word] >> self._letters.shift & 1
        ).astype(bool)
        return flags

    def _spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise Stuck
