"""Where one sequence stands in its grammar: llguidance's matcher, and what is forced.  No tensors.

Stop ids are never fed to a matcher (it cannot take them back): a row allows them exactly when its
state is accepting, and the engine ends the sequence on one.  Only calls that leave a matcher as it
was after an illegal token are used, as llguidance's error state never clears.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from engine.grammar import lexical
from engine.grammar.prose import Key, Prose
from engine.grammar.vocabulary import Vocabulary

ProseMasks = dict[Key, NDArray[np.int32]]
Past = tuple[int, Prose, "Past | None"]  # (step, the text before it, what was before that)


class State:
    """Where one sequence stands in its grammar; cheap to clone, can be rolled back any distance."""

    __slots__ = ("_ahead", "_legal", "_legal_at", "_lexical", "_past", "_prose", "_run",
                 "_vocabulary", "dear", "matcher", "prose_masks", "steps")  # fmt: skip

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        prose: Prose | None,
        prose_masks: ProseMasks,
        dear: bool = False,
    ) -> None:
        self.matcher = matcher  # for masks.py only, as is the next
        self.prose_masks = prose_masks  # of the grammar: masks of free text that were needed before
        self.dear = dear  # the grammar is, see dear.py
        self.steps = 0  # tokens accepted and not rolled back
        self._vocabulary = vocabulary
        self._prose = prose  # None: not in free text
        self._past: Past | None = None  # a linked list, as clones share it
        self._lexical = bytearray(1)  # behind each token, after what it was at the start
        self._run: list[int] | None = None  # the tokens that must come, see _forced; not asked yet
        self._legal: tuple[int, ...] = ()  # in a row, from behind so many tokens
        self._legal_at = 0
        # Tokens that a scout went over, the next one last, and what is forced behind each; None of
        # those inside a run.
        self._ahead: list[tuple[int, list[int] | None]] = []

    def accept(self, token: int) -> bool:
        """Take one token; False, and nothing changes, when it is illegal or a stop id."""
        if not self._vocabulary.legible(token):
            return False
        run = self._forced()
        if not self.matcher.try_consume_tokens([token]):
            return False
        known = self._recalled(token)
        if run and run.pop() != token:
            run.clear()
        self._note(token)
        if not run:
            self._run = known
            self._forced()
        return True

    def accept_all(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the first illegal one or stop id; return how many."""
        taken = 0
        while taken < len(tokens):
            run = self._forced()
            count = _shared(run, tokens, taken)
            if count < 2:
                if not self.accept(tokens[taken]):
                    break
                taken += 1
                continue
            moved = self.matcher.try_consume_tokens(list(tokens[taken : taken + count]))
            known = self._moved(tokens[taken : taken + moved])
            if moved:
                del run[-moved:]
                if not run:
                    self._run = known
                    self._forced()
            taken += moved
            if moved < count:  # the matcher reached one of its limits
                break
        return taken

    def scout(self, tokens: Sequence[int]) -> list[int | None]:
        """What must come at each place on the way over `tokens`, legal ones; this is not moved.

        None at a place: nothing is forced there.  There is an entry behind the last token, too; the
        list ends early at a place where another token must come.  What is found forced behind each
        token is kept for when it is accepted.
        """
        if not tokens:
            return [self.only]
        walker = self.clone()
        only: list[int | None] = []
        ahead: list[tuple[int, list[int] | None]] = []
        while True:
            place = len(only)
            run = walker._forced()
            count = _shared(run, tokens, place)
            part = tokens[place : place + count]
            if count < len(run):
                only += [*part, run[-count - 1]]
                break
            if not run:
                only.append(None)
                if place == len(tokens):
                    break
                part = tokens[place : place + 1]
            else:
                only += part
            walker.matcher.try_consume_tokens(list(part))
            walker._run = None
            ahead += [(token, None) for token in part[:-1]]
            ahead.append((part[-1], walker._forced().copy()))
        self._ahead = ahead[::-1]
        return only

    def _moved(self, tokens: Sequence[int]) -> list[int] | None:
        """The matcher moved over the tokens; return what was foreseen behind the last."""
        known = None
        for token in tokens:
            if (known := self._recalled(token)) is None and not self._ahead:
                break
        if self._prose is None:
            self._lexical += self._vocabulary.lexicals(self._lexical[-1], tokens)
            self.steps += len(tokens)
        else:
            for token in tokens:
                self._note(token)
        return known

    def _recalled(self, token: int) -> list[int] | None:
        """What a scout found forced behind the token that is being taken; None = not looked at."""
        if not self._ahead:
            return None
        foreseen, run = self._ahead.pop()
        if foreseen == token:
            return run
        self._ahead.clear()
        return None

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
            self._legal = ()
            self._ahead.clear()
            del self._lexical[-count:]
            while self._past and self._past[0] >= self.steps:
                _, self._prose, self._past = self._past

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are legal in a row from here; a stop id is not counted.

        A draft is asked about when it is made, and again by the step that verifies it.
        """
        count, known = len(tokens), self._legal
        if count and self._legal_at == self.steps and (*tokens,) == known[:count]:
            return count
        legal: int = self.matcher.validate_tokens(self._vocabulary.words(tokens))
        self._legal, self._legal_at = (*tokens[:legal],), self.steps
        return legal

    def allows(self, token: int) -> bool:
        """Whether a mask would hold the token: it is legal, or a stop id where those are."""
        if token in self._vocabulary.stops:
            return self.accepting
        return self.valid_prefix([token]) == 1

    def guessable(self, tokens: Sequence[int]) -> int:
        """How many of the tokens may be a draft: legal ones, in a dear grammar forced ones."""
        if self.dear:
            return _shared(self._forced(), tokens, 0)
        return self.valid_prefix(tokens)

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
        other = State(
            self.matcher.deep_copy(), self._vocabulary, self._prose, self.prose_masks, self.dear
        )
        other.steps, other._past = self.steps, self._past
        other._lexical = self._lexical.copy()
        other._run = None if self._run is None else self._run.copy()
        return other


def _shared(run: Sequence[int], tokens: Sequence[int], start: int) -> int:
    """How many of the tokens from `start` on follow the run, whose next token is its last."""
    most = min(len(run), len(tokens) - start)
    for count in range(most):
        if run[-1 - count] != tokens[start + count]:
            return count
    return most
