"""llguidance's matcher behind a small interface: Lark -> Compiled -> State.  Knows no tensors.

Stop ids are never fed to a matcher (it cannot take them back): a row allows them exactly when its
state is accepting, and the engine ends the sequence on one.  Only calls that leave a matcher as it
was after an illegal token are used, as llguidance's error state never clears.
"""

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

from engine.grammar import lexical
from engine.grammar.costly import Costly, Refusal
from engine.grammar.hints import read
from engine.grammar.planner import Planner
from engine.grammar.prose import Key, Prose
from engine.grammar.trial import Limits, Setup
from engine.grammar.vocabulary import Vocabulary
from engine.messages import Grammar

ProseMasks = dict[Key, NDArray[np.int32]]
Past = tuple[int, Prose, "Past | None"]  # (step, the text before it, what was before that)

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


class State:
    """Where one sequence stands in its grammar; cheap to clone, can be rolled back any distance."""

    __slots__ = ("_lexical", "_past", "_prose", "_run", "_vocabulary", "matcher", "prose_masks",
                 "steps")  # fmt: skip

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        prose: Prose | None,
        prose_masks: ProseMasks,
    ) -> None:
        self.matcher = matcher  # for masks.py only, as is the next
        self.prose_masks = prose_masks  # of the grammar: masks of free text that were needed before
        self.steps = 0  # tokens accepted and not rolled back
        self._vocabulary = vocabulary
        self._prose = prose  # None: not in free text
        self._past: Past | None = None  # a linked list, as clones share it
        self._lexical = bytearray(1)  # behind each token, after what it was at the start
        self._run: list[int] | None = None  # the tokens that must come, see _forced; not asked yet

    def accept(self, token: int) -> bool:
        """Take one token; False, and nothing changes, when it is illegal or a stop id."""
        if not self._vocabulary.legible(token):
            return False
        run = self._forced()
        if not self.matcher.try_consume_tokens([token]):
            return False
        if run and run.pop() != token:
            run.clear()
        self._note(token)
        if not run:
            self._run = None
            self._forced()
        return True

    def accept_all(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the first illegal one or stop id; return how many."""
        for taken, token in enumerate(tokens):
            if not self.accept(token):
                return taken
        return len(tokens)

    def _forced(self) -> list[int]:
        """What must come, the next token last.

        Where the tokenizer would cut a text depends on where it begins.  So a run is kept from
        where its text became forced, and is asked for there by whoever comes by: what is forced
        then is a function of the tokens that were taken, not of the steps they came in.
        """
        if self._run is None:
            self._run = [] if self.finished else self.matcher.compute_ff_tokens()[::-1]
        return self._run

    def _note(self, token: int) -> None:
        """The matcher moved over a token."""
        if self._prose is None:
            self._lexical.append(self._vocabulary.lexical(self._lexical[-1], token))
        else:
            self._read(self._prose, self._vocabulary.piece(token))
        self.steps += 1

    def _read(self, prose: Prose, piece: bytes) -> None:
        """Take a token of free text; what of it lies behind the trigger is JSON."""
        self._past = (self.steps, prose, self._past)
        self._prose = prose.after(piece)
        text = b"" if self._prose else prose.beyond(piece)
        self._lexical.append(lexical.after(lexical.OUTSIDE, text))

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        assert 0 <= count <= self.steps, f"rollback of {count} after {self.steps} tokens"
        if count:
            rolled = self.matcher.rollback(count)
            assert rolled, self.matcher.get_error()
            self.steps -= count
            self._run = None
            del self._lexical[-count:]
            while self._past and self._past[0] >= self.steps:
                _, self._prose, self._past = self._past

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are legal in a row from here; a stop id is not counted."""
        legal: int = self.matcher.validate_tokens(self._vocabulary.words(tokens))
        return legal

    def closes(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens, none of them a stop id, are legal from here and may end the output.

        The matcher judges a stop id behind them and does not move: a microsecond or two, where
        moving to the end and back takes 25.
        """
        judged: int = self.matcher.validate_tokens([*tokens, self._vocabulary.letters.end])
        return judged == len(tokens) + 1 or (not tokens and self.accepting)

    @property
    def lexical(self) -> int:
        """Where the JSON text stands (lexical.py); outside a string while it is free text."""
        return self._lexical[-1]

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer itself would cut them; often none.

        As long as there are some the mask holds the first of them alone.
        """
        return self._forced()[::-1]

    @property
    def only(self) -> int | None:
        """The next token, where it must come; then the mask holds no other."""
        run = self._forced()
        return run[-1] if run else None

    @property
    def finished(self) -> bool:
        """The grammar is closed: nothing more may come."""
        stopped: bool = self.matcher.is_stopped()
        return stopped and not self.broken

    @property
    def accepting(self) -> bool:
        """The output may end here: stop ids are legal."""
        accepting: bool = self.matcher.is_accepting()
        return accepting

    @property
    def broken(self) -> bool:
        """The matcher hit one of its limits: no token is legal any more, and none ever will be."""
        broken: bool = self.matcher.is_error()
        return broken

    def prose_keys(self, tokens: Sequence[int]) -> list[Key]:
        """The key of each mask from here over the (legal) tokens, as far as they are free text."""
        keys: list[Key] = []
        prose = self._prose
        for token in tokens:
            if prose is None:
                return keys
            keys.append(prose.key)
            prose = prose.after(self._vocabulary.piece(token))
        return keys if prose is None else [*keys, prose.key]

    def clone(self) -> State:
        """An independent copy."""
        other = State(self.matcher.deep_copy(), self._vocabulary, self._prose, self.prose_masks)
        other.steps, other._past = self.steps, self._past
        other._lexical = self._lexical.copy()
        other._run = None if self._run is None else self._run.copy()
        return other


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
        start = State(matcher, self.vocabulary, prose, {})
        planner = Planner(start, self.vocabulary, read(grammar.lark))
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
