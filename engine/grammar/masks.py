"""The grammar masks of a whole step, natively and at once.  Samples nothing, changes no state.

A mask row is ceil(vocab / 32) int32 words; bit v % 32 of word v // 32: token v may come next.
Row `first + i` of a request is for the position after its first i drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import llguidance
import numpy as np
import torch
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from engine.grammar.state import State

Request = tuple[int, State, Sequence[int]]  # first row, state before the drafts, drafts

# Requests from which several threads are quicker than one.  Measured beside an H200 on 16 slow
# cores, with 4 threads, calls of real schemas: of 32 requests with four drafts each a step's masks
# take 3.6 ms instead of 8.5, of eight 1.5 instead of 2.0; of two they gain nothing.
WIDE = 4


class Masks:
    """One buffer of mask rows for all steps."""

    def __init__(self, vocab: int, rows: int, threads: int = 1) -> None:
        """`rows` is the most that one step can need; `threads` share it from WIDE requests on."""
        self._vocab = vocab
        self._pad = vocab - 1  # the last rows of a head often are no token: hardly ever legal
        words = (vocab + 31) // 32
        self._open = np.full(words, -1, dtype=np.int32)  # every token of the vocabulary
        if vocab % 32:
            self._open[-1] = (1 << vocab % 32) - 1
        self._rows = np.empty((rows, words), dtype=np.int32)
        self._rows[:] = self._open
        self._bits = self._rows.view(np.uint32)
        self._tensor = torch.from_numpy(self._rows)
        self._alone = llguidance.LLExecutor(num_threads=1)
        self._shared = llguidance.LLExecutor(num_threads=threads) if threads > 1 else self._alone
        self._written: list[int] = []  # rows that are not open
        self.legal: list[int] = []
        self.filled: list[int] = []  # rows of the newest step that forbid something
        self.only: dict[int, int] = {}  # the token of those that are not written, see fill

    def fill(
        self, requests: Sequence[Request], rows: int | None = None, lean: Collection[int] = (),
        apart: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """The masks of one step: a view, int32 [rows, ceil(vocab / 32)], good until the next call.

        Rows that no request covers allow everything.  A request covers len(drafts) + 1 rows; after
        the call `legal[i]` is how many drafts of request i are legal (a stop id is not): the engine
        cuts the draft there, and the rows behind that are all zero.

        Of the requests whose places are in `lean` only the first row is computed in which no token
        is forced: later ones allow everything, but where one is.  (That row gives a lexer its fuel,
        so there has to be one a step.)  So do rows behind what is legal, which nobody looks at.

        With `apart` rows of one token are not written and not in `filled`, but in `only`: most rows
        of a step with drafts are such, and a mask has kilobytes.
        """
        if self._written:
            self._rows[self._written] = self._open
            self._written.clear()
        self.legal.clear()
        self.filled.clear()
        self.only.clear()
        fresh: list[Request] = []
        judges: list[State] = []  # who judged each request's last rows
        for place, (row, state, drafts) in enumerate(requests):
            end = row + len(drafts) + 1
            assert end <= len(self._rows), f"row {end} of {len(self._rows)}"
            request = self._scouted(row, state, drafts, place in lean)
            judges.append(state if request is None else request[1])
            if request is not None and not self._recall(*request):
                fresh.append(request)
        self._compute(fresh)
        if self.only and not apart:
            self._write_only()
        self._close_broken(requests, judges)
        for row, state, drafts in fresh:
            self._remember(row, state, drafts)
        return self._tensor if rows is None else self._tensor[:rows]

    def _scouted(
        self, row: int, state: State, drafts: Sequence[int], lean: bool
    ) -> Request | None:
        """What of a request must be computed: all from the first row on in which no token is
        forced, or of a lean one that row; None = nothing.  Forced rows go to `only`.

        Where a text is forced a mask is one token, so it needs no computing; another cut of that
        text is no way to go on, so the draft is cut there.
        """
        only = state.scout(drafts[: state.valid_prefix(drafts)] if drafts else ())
        legal = len(only) - 1
        self.legal.append(legal)
        gaps: list[int] = []
        for place, token in enumerate(only, row):
            if token is None:
                gaps.append(place)
            else:
                self.only[place] = token
        end = row + len(drafts) + 1
        if lean:
            del gaps[1:]
        elif row + legal + 1 < end:
            self._rows[row + legal + 1 : end] = 0
            self._written += range(row + legal + 1, end)
        self.filled += gaps
        if not lean:
            self.filled += range(row + legal + 1, end)
        if not gaps:
            return None
        begin = gaps[0]
        self._written += gaps if lean else range(begin, row + legal + 1)
        start = state
        if begin > row:
            start = state.clone()
            start.accept_all(drafts[: begin - row])
        return begin, start, () if lean else drafts[begin - row : legal]

    def _write_only(self) -> None:
        """Write the rows of one token, also in place of what was computed."""
        at, tokens = np.array([*self.only.items()]).T
        self._rows[at] = 0
        self._bits[at, tokens >> 5] = np.uint32(1) << (tokens & 31).astype(np.uint32)
        self._written += self.only
        self.filled = sorted((*self.filled, *self.only))
        self.only.clear()

    def _compute(self, fresh: Sequence[Request]) -> None:
        """Compute all rows of these requests, whose drafts are legal, in one native call.

        llguidance sets the stop ids of a row exactly when that row's state is accepting, also when
        the grammar is closed there.
        """
        executor = self._shared if len(fresh) >= WIDE else self._alone
        if any(drafts for _, _, drafts in fresh):
            # This call refuses empty drafts, and stops at an illegal one: it has then written the
            # row before that and nothing behind, where the next request's rows may lie.
            padded: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
            for row, state, drafts in fresh:
                if tokens := list(drafts) or self._refused(state):
                    padded.append((state.matcher, row, tokens))
                else:
                    self._rows[row] = self._open  # every token was found to be legal
            fill_next_token_bitmask_par_with_draft_tokens(executor, padded, self._rows)
        elif fresh:  # with pads, such a step would take up to a third longer
            plain = [(state.matcher, row) for row, state, _ in fresh]
            fill_next_token_bitmask_par(executor, plain, self._rows)

    def _refused(self, state: State) -> list[int]:
        """One token of the vocabulary that is illegal here, or none where all are legal.

        The matcher itself is asked, as a grammar may name any special token.  That changes nothing
        in it, and neither does the refused draft (an id outside the vocabulary would break it).
        What was found last is tried first, so that one question mostly is enough.
        """
        for _ in range(self._vocab):
            if not state.matcher.validate_tokens([self._pad]):
                return [self._pad]
            self._pad = (self._pad + 1) % self._vocab
        return []

    def _close_broken(self, requests: Sequence[Request], judges: Sequence[State]) -> None:
        """Zero the rows of matchers that hit a limit: llguidance allows a stop id in them."""
        for i, state in enumerate(judges):
            if state.broken:
                first, _, drafts = requests[i]
                rows = range(first, first + len(drafts) + 1)
                self._rows[first : rows.stop] = 0
                self.legal[i] = 0
                self.filled = sorted({*self.filled, *rows})
                self._written += rows
                for row in rows:
                    self.only.pop(row, None)

    def _recall(self, row: int, state: State, drafts: Sequence[int]) -> bool:
        """Copy the rows of free text that were computed before; False when one is missing."""
        keys = state.prose_keys(drafts)
        known = state.prose_masks
        if len(keys) <= len(drafts) or any(key not in known for key in keys):
            return False
        for i, key in enumerate(keys, row):
            self._rows[i] = known[key]
        return True

    def _remember(self, row: int, state: State, drafts: Sequence[int]) -> None:
        if not state.broken:
            for i, key in enumerate(state.prose_keys(drafts), row):
                if key not in state.prose_masks:
                    state.prose_masks[key] = self._rows[i].copy()
