"""Grammars made ready, in a small pool, and kept: Lark -> Compiled -> State.  Knows no tensors."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from engine.grammar.costly import Costly, Refusal
from engine.grammar.dear import dear
from engine.grammar.hints import read
from engine.grammar.planner import Planner, Plans
from engine.grammar.prose import Prose
from engine.grammar.state import State
from engine.grammar.trial import Limits, Setup
from engine.grammar.vocabulary import Vocabulary
from engine.messages import Grammar

KEPT = 256  # compiled grammars
KEPT_CHARACTERS = 32_000_000  # of Lark text, all kept grammars together
TEXT_LIMIT = 8_000_000  # characters of one grammar

# Fuel bounds the time of a hostile grammar: a mask that needs all of it takes 0.1 s, and all masks
# of a grammar together are bounded by the states.  It lasts from mask to mask; accepted tokens,
# drafts and plans spend it too, and a lexer that runs out refuses all that is new.  The row limit
# allows 1,000 optional properties in one object; the cost of an object's first mask grows with
# their square (80 ms there, 2.6 s at 5,000).
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 50_000_000,  # to make the lexer; of all tools of a request together
    "step_lexer_fuel": 2_000_000,
    "step_max_items": 200_000,
    "max_items_in_row": 4_000,
    "max_lexer_states": 250_000,
    "max_grammar_size": 500_000,
}


log = logging.getLogger("engine.grammar.matcher")


class GrammarRefused(Exception):
    """The grammar cannot be used; `code`, `message` and HTTP `status` are fit for the client."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


class Compiled:
    """A grammar that is ready: its start can be copied any number of times."""

    def __init__(
        self, lark: str, start: State, first_mask: NDArray[np.int32], planner: Planner
    ) -> None:
        self.lark = lark
        self.planner = planner  # of endings; it has planned from the start
        self._start = start
        self.first_mask = first_mask  # int32 [ceil(vocab / 32)], read-only

    def start(self) -> State:
        """A fresh state at the beginning of the grammar."""
        return self._start.clone()


Done = Callable[[Compiled | GrammarRefused], None]


class Compiler:
    """Compiles grammars for one vocabulary, in a small pool, and keeps the ones used last."""

    def __init__(
        self, tokenizer_json: str, vocab: int, stop_ids: Sequence[int], threads: int = 2,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        """`vocab` is the number of rows of the output head; ids without a token are never legal.

        `limits`: of what is submitted and not plain, which is first tried apart; None = it is not.
        """
        self.vocabulary = Vocabulary(tokenizer_json, vocab, stop_ids)
        self._limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        setup = Setup(tokenizer_json, vocab, list(stop_ids))
        self._costly = None if limits is None else Costly(setup, limits)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, str]] = OrderedDict()  # code, message
        self._characters = 0
        self._plans = Plans()

    def cached(self, grammar: Grammar) -> Compiled | None:
        """The compiled grammar when it is kept; never compiles."""
        key = _key(grammar)
        with self._lock:
            if found := self._kept.get(key):
                self._kept.move_to_end(key)
            return found

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile here and now, or take it from the cache; raise GrammarRefused."""
        if found := self.cached(grammar):
            return found
        key = _key(grammar)
        if refused := self._refused.get(key):
            raise GrammarRefused(*refused)
        try:
            compiled = self._compile(grammar)
        except GrammarRefused as refusal:
            with self._lock:  # a client asks again, and a search in vain is the longest
                self._refused[key] = refusal.code, refusal.message
                while len(self._refused) > KEPT:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            if key not in self._kept:  # two threads may have compiled the same text
                self._kept[key] = compiled
                self._characters += len(grammar.lark)
            while len(self._kept) > KEPT or self._characters > KEPT_CHARACTERS:
                _, old = self._kept.popitem(last=False)
                self._characters -= len(old.lark)
        return compiled

    def forget(self, grammar: Grammar | None) -> None:
        """Compile it anew next time: all copies of a broken matcher share what is used up."""
        with self._lock:
            if grammar and (old := self._kept.pop(_key(grammar), None)):
                self._characters -= len(old.lark)

    def submit(self, grammar: Grammar, done: Done) -> None:
        """Compile in the pool and call `done` from there, exactly once.

        What is costly is tried apart before; nothing else waits for that.
        """
        self._pool.submit(self._run, grammar, done)

    def close(self) -> None:
        """Forget what is queued, let the pool end, and the process of trials at once."""
        if self._costly is not None:
            self._costly.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, grammar: Grammar, done: Done) -> None:
        costly = self._costly
        if costly is None or _key(grammar) in self._refused or not costly.holds(grammar):
            return self._finish(grammar, done)

        def tried(refusal: Refusal | None) -> None:
            if refusal is not None:
                done(GrammarRefused(*refusal))
            else:
                self._pool.submit(self._finish, grammar, done)

        costly.submit(grammar, tried)

    def _finish(self, grammar: Grammar, done: Done) -> None:
        try:
            result: Compiled | GrammarRefused = self.compile(grammar)
        except GrammarRefused as refused:
            result = refused
        except BaseException:  # the library may panic: whoever waits must hear of it
            log.exception("a grammar of %d characters broke the compiler", len(grammar.lark))
            result = GrammarRefused(
                "grammar_failed",
                "The schemas of this request could not be compiled. Simplify them, or send fewer.",
            )
        done(result)

    def _compile(self, grammar: Grammar) -> Compiled:
        if len(grammar.lark) > TEXT_LIMIT:
            raise GrammarRefused(
                "grammar_too_large",
                f"The grammar has {len(grammar.lark):,} characters; at most {TEXT_LIMIT:,} are "
                "accepted. Send fewer tools or smaller schemas.",
            )
        matcher = llguidance.LLMatcher(
            self.vocabulary.tokenizer, grammar.lark, log_level=0, limits=self._limits
        )
        if matcher.is_error():
            log.info("a grammar was refused: %.200s", matcher.get_error())
            raise GrammarRefused(
                "invalid_schema",
                "The schemas of this request cannot be made into a grammar. Simplify them: smaller "
                "patterns and ranges, fewer nested alternatives.",
            )
        unspent = matcher.deep_copy()
        # A grammar can compile and still break at its first mask: better here than in a step.
        mask = np.zeros((1, (self.vocabulary.size + 31) // 32), dtype=np.int32)
        fill_next_token_bitmask(matcher, mask)
        if matcher.is_error() or not mask.any():
            raise _too_complex()
        mask.flags.writeable = False
        free = grammar.trigger or grammar.opening
        prose = Prose(grammar.trigger.encode(), b"", grammar.opening.encode()) if free else None
        start = State(matcher, self.vocabulary, prose, {}, dear(grammar.lark))
        planner = Planner(start, self.vocabulary, read(grammar.lark), self._plans)
        if planner.start_plan is None:
            raise GrammarRefused(
                "no_finite_instance",
                "No output that satisfies the schemas of this request was found within the limits. "
                "Give each recursive schema a way to end (an optional property, null, an empty "
                "array), and simplify patterns and long minimums.",
            )
        _refuel(unspent, np.zeros_like(mask))  # the planner may have spent what copies share
        if unspent.is_error():
            raise _too_complex()
        return Compiled(grammar.lark, start, mask[0], planner)


def _refuel(matcher: llguidance.LLMatcher, mask: NDArray[np.int32]) -> None:
    """Give all copies of a matcher a mask's fuel again, by a mask that this one had not computed.

    Where a token is forced llguidance computes none, so it is the mask behind those.
    """
    if forced := matcher.compute_ff_tokens():
        matcher.consume_tokens(forced)
    if not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask)


def _too_complex() -> GrammarRefused:
    return GrammarRefused(
        "grammar_too_complex",
        "The schemas of this request are too complex to enforce, or nothing satisfies "
        "them. Use fewer optional properties or smaller patterns.",
    )


def _key(grammar: Grammar) -> bytes:
    free = f"{grammar.trigger}\0{grammar.opening}"
    return hashlib.sha256(f"{free}\0{grammar.lark}".encode()).digest()
