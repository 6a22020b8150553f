"""Explain a schema to a person: what is enforced, what is forced, what may come.  Prints nothing.

Runs without a model's weights; `rejection` needs not even a tokenizer, as it walks bytes.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from engine.checkpoint import open_checkpoint
from engine.grammar.clean import ENFORCED, LISTS, MAPS, SINGLES, escape
from engine.grammar.matcher import Compiled, Compiler, GrammarRefused
from engine.grammar.schema import Checked, embed, modern
from engine.grammar.state import State
from engine.grammar.verdict import Node
from engine.grammar.vocabulary import Vocabulary
from engine.messages import Grammar

SAMPLE_TOKENS = 1_000  # at most; a schema that asks for more has no sample here
_LONG = 120  # tokens, behind which the sample looks for its end
_BYTES = 262  # ids of llguidance's own byte tokenizer, of which the first 256 are the bytes
_BETWEEN = 4  # tokens, from mask to mask
_SHOWN = 60  # bytes of what must come next


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of some keywords of one subschema."""

    pointer: str
    keywords: tuple[str, ...]
    state: str  # enforced, rewritten, dropped, or ignored: means nothing to a validator either
    why: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A random output of the grammar."""

    pieces: tuple[tuple[str, bool], ...]  # (text, whether the grammar left no other)
    tokens: int
    forced: int  # of these
    whole: bool  # False: it did not end within SAMPLE_TOKENS

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds of the calling thread."""

    compile_ms: float
    first_mask_ms: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """Where a text leaves the grammar."""

    at: int  # characters before the first that cannot stand there; the text's length = it ends
    expected: str  # the text that must come, or a description of the characters that may


def rows(schema: object, checked: Checked) -> Iterator[Row]:
    """What became of each keyword of the schema, subschema by subschema in reading order."""
    kept = dict(_nodes(checked.schema))
    gone: dict[str, list[Any]] = {}
    for one in checked.dropped:
        gone.setdefault(one.pointer, []).append(one)
    source = dict(_nodes(modern(schema))) if isinstance(schema, dict) else {}
    otherwise = set(checked.rewritten)
    for pointer, node in source.items():
        said = tuple(key for key in node if (pointer, key) in otherwise)
        enforced = tuple(key for key in node if key in kept.get(pointer, {}) and key not in said)
        dropped = {one.keyword for one in gone.get(pointer, ())}
        ignored = tuple(key for key in node if key not in {*dropped, *enforced, *said})
        if enforced:
            yield Row(pointer, enforced, "enforced")
        if said:
            yield Row(pointer, said, "rewritten", "enforced in other words")
        for one in gone.pop(pointer, ()):
            yield Row(pointer, (one.keyword,), "dropped", one.why)
        if ignored:
            yield Row(pointer, ignored, "ignored", _ignored(ignored))
    for pointer, rest in gone.items():
        yield from (Row(pointer, (one.keyword,), "dropped", one.why) for one in rest)


def _ignored(keywords: tuple[str, ...]) -> str:
    if "nullable" in keywords:
        return "not of JSON Schema; to allow null write it into 'type'"
    if ENFORCED.intersection(keywords):
        return "it allows everything, or went with what was dropped"
    return "it allows everything"


def _nodes(schema: Node) -> Iterator[tuple[str, Node]]:
    """(pointer, subschema) of a schema in reading order."""
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        pointer, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield pointer, node
        below: list[tuple[str, Any]] = []
        for key, value in node.items():
            here = f"{pointer}/{escape(key)}"
            if key in MAPS and isinstance(value, dict):
                below += ((f"{here}/{escape(name)}", part) for name, part in value.items())
            elif key in LISTS and isinstance(value, list):
                below += ((f"{here}/{i}", part) for i, part in enumerate(value))
            elif key in SINGLES:
                below.append((here, value))
        stack += reversed(below)


class Explainer:
    """A grammar, over the tokens of a model and over bytes."""

    def __init__(self, checked: Checked) -> None:
        self._checked = checked
        self.lark = f"start: %json {embed(checked.schema)}\n"

    def rows(self, schema: object) -> list[Row]:
        """What became of each keyword of the schema that was checked."""
        return list(rows(schema, self._checked))

    def rejection(self, text: str) -> Rejection | None:
        """Where the text leaves the grammar, whatever its white space; None when it is whole."""
        spaced, origin = _spaced(text)
        state = self._bytes.start()
        raw = spaced.encode("utf-8", "replace")
        taken = follow(state, raw, _BYTES)
        if taken == len(raw) and state.accepting:
            return None
        at = len(raw[:taken].decode(errors="ignore"))
        return Rejection(origin[at], _expected(state))

    @cached_property
    def _bytes(self) -> Compiled:
        return _compile(Compiler("byte", _BYTES, [_BYTES - 1]), self.lark)

    def sample(self, model: str, seed: int) -> tuple[Sample, Cost]:
        """A random output in the model's tokens, and what its grammar costs there.

        Raises ValueError for a grammar that cannot be compiled.
        """
        found = open_checkpoint(model)
        compiler = Compiler(found.tokenizer_json, found.config.vocab, found.stop_ids)
        compiled = _compile(compiler, self.lark)
        start = time.thread_time()
        matcher = llguidance.LLMatcher(compiler.vocabulary.tokenizer, self.lark, log_level=0)
        built = time.thread_time()
        fill_next_token_bitmask(matcher, _row(compiler.vocabulary.size))
        cost = Cost(1e3 * (built - start), 1e3 * (time.thread_time() - built))
        return walk(compiler.vocabulary, compiled.start(), seed), cost


def _compile(compiler: Compiler, lark: str) -> Compiled:
    try:
        return compiler.compile(Grammar(lark))
    except GrammarRefused as refused:
        raise ValueError(refused.message) from None
    finally:
        compiler.close()


def _row(vocab: int) -> NDArray[np.int32]:
    return np.zeros((1, (vocab + 31) // 32), dtype=np.int32)


def _legal(state: State, vocabulary_size: int) -> list[int]:
    """The tokens that may come next."""
    row = _row(vocabulary_size)
    fill_next_token_bitmask(state.matcher, row)
    bits = np.unpackbits(row.view(np.uint8)[0], bitorder="little")[:vocabulary_size]
    return [int(token) for token in np.flatnonzero(bits)]


def follow(state: State, tokens: Sequence[int], vocabulary_size: int) -> int:
    """Accept tokens up to the first illegal one, with masks between as in serving; how many.

    What a matcher may spend on its lexer is counted from mask to mask.
    """
    taken = 0
    while taken < len(tokens):
        piece = tokens[taken : taken + _BETWEEN]
        accepted = state.accept_all(piece)
        taken += accepted
        if accepted < len(piece):
            break
        fill_next_token_bitmask(state.matcher, _row(vocabulary_size))
    return taken


def _spaced(text: str) -> tuple[str, list[int]]:
    """The JSON text with the white space that a grammar pins; each character's place in `text`.

    The list has one entry more, for the end.  Nothing is parsed: what is no JSON stays none.
    """
    out: list[str] = []
    origin: list[int] = []
    inside = escaped = False
    for at, letter in enumerate(text):
        if not inside and letter in " \t\r\n":
            continue
        out.append(letter)
        origin.append(at)
        if inside:
            inside = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            inside = True
        elif letter in ",:":
            out.append(" ")
            origin.append(at)
    return "".join(out), [*origin, len(text)]


def _expected(state: State) -> str:
    """What may come in a state over bytes."""
    legal = [byte for byte in _legal(state, _BYTES) if byte < 256]
    must, at = bytearray(), state.clone()
    only = legal
    while len(only) == 1 and not at.accepting and len(must) < _SHOWN:
        must.append(only[0])
        at.accept(only[0])
        only = [byte for byte in _legal(at, _BYTES) if byte < 256]
    if text := must.decode(errors="ignore"):
        return text
    said = _characters(legal)
    return "the end" if not said else f"{said} or the end" if state.accepting else said


_CLASSES = {"a digit": "0123456789", "a small letter": "abcdefghijklmnopqrstuvwxyz",
            "a capital letter": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}  # fmt: skip


def _characters(legal: list[int]) -> str:
    """A set of bytes in words."""
    letters = {chr(byte) for byte in legal if 0x20 <= byte < 0x7F}
    if len(letters) > 80:
        return "any character of a string"
    said = []
    for name, members in _CLASSES.items():
        if letters.issuperset(members):
            said.append(name)
            letters.difference_update(members)
    said += (repr(letter) for letter in sorted(letters))
    if any(byte >= 0x80 for byte in legal):
        said.append("a character beyond ASCII")
    return said[0] if len(said) == 1 else "one of: " + ", ".join(said) if said else ""


def walk(vocabulary: Vocabulary, state: State, seed: int) -> Sample:
    """A random output from this state on."""
    return _Walk(vocabulary, state, seed).run()


class _Walk:
    """Random legal tokens from the start of a grammar to its end."""

    def __init__(self, vocabulary: Vocabulary, state: State, seed: int) -> None:
        self._vocabulary = vocabulary
        self._state = state
        self._random = random.Random(seed)
        self._said: list[tuple[bytes, bool]] = []
        self._text = bytearray()
        pieces = [vocabulary.piece(token) for token in range(vocabulary.size)]
        self._ends = {inside: np.array([_openness(piece, inside) for piece in pieces])
                      for inside in (False, True)}  # fmt: skip
        self._words = np.array([len(piece) > 1 and piece.strip().isalnum() for piece in pieces])

    def run(self) -> Sample:
        whole = False
        while len(self._said) < SAMPLE_TOKENS and not whole:
            if forced := self._state.forced():
                self._say(forced, True)
                continue
            legal = [token for token in _legal(self._state, self._vocabulary.size)
                     if token not in self._vocabulary.stops]  # fmt: skip
            may_end = self._state.accepting
            whole = not legal or (may_end and (self._long or self._random.random() < 0.5))
            if not whole:
                self._say([self._choose(np.array(legal))], False)
        forced_count = sum(forced for _, forced in self._said)
        return Sample(_joined(self._said), len(self._said), forced_count, whole)

    def _say(self, tokens: list[int], forced: bool) -> None:
        taken = self._state.accept_all(tokens)
        assert taken == len(tokens), f"{taken} of {len(tokens)} tokens were legal"
        for token in tokens:
            piece = self._vocabulary.piece(token)
            self._said.append((piece, forced))
            self._text += piece

    @property
    def _long(self) -> bool:
        return len(self._said) >= _LONG

    def _choose(self, legal: NDArray[np.int64]) -> int:
        """A word mostly; what closes now and then, and always once the sample is long."""
        words = legal[self._words[legal]]
        if self._long or not words.size or self._random.random() < _ENDS:
            inside = bool(_ESCAPE.sub(b"", self._text).count(b'"') % 2)
            ends = self._ends[inside][legal]
            if self._long or ends.min() < _NEUTRAL:
                return int(legal[ends.argmin()])
        return int(self._random.choice(words if words.size else legal))


_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_ENDS = 0.2  # of the tokens of a short sample close something, where that is legal
_NEUTRAL = 40


def _openness(piece: bytes, inside: bool) -> int:
    """The smaller, the sooner a text ends that takes this token, inside a string or outside."""
    closers = (b'"',) if inside else (b"}]", b'"', b",")
    first, length = piece[:1], min(len(piece), 9)
    for rank, letters in enumerate(closers):
        if first and first in letters:
            return 10 * rank + length
    return _NEUTRAL + length + (10 if first in (b"{", b"[") and not inside else 0)


def _joined(said: list[tuple[bytes, bool]]) -> tuple[tuple[str, bool], ...]:
    """The pieces as text, neighbours of one kind together; a code point may span some tokens."""
    runs: list[tuple[bytes, bool]] = []
    for piece, forced in said:
        unfinished = bool(runs) and runs[-1][0].decode(errors="ignore").encode() != runs[-1][0]
        if runs and (runs[-1][1] == forced or unfinished):
            runs[-1] = (runs[-1][0] + piece, runs[-1][1])
        else:
            runs.append((piece, forced))
    return tuple((raw.decode(errors="replace"), forced) for raw, forced in runs)
