"""Draft tokens of a step, from whoever guesses: asked for, cut to what is legal, counted.

It guesses nothing itself: host proposers are given to it (proposer.py), device drafts come with a
step's results.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.messages import DRAFT_PLACES, DRAFT_SOURCES
from engine.proposer import ASLEEP, FREE, HOST, Draft, Load, Turn

if TYPE_CHECKING:

    from engine.accept import Accepted
    from engine.plan import Plan, Row
    from engine.proposer import AnyDraft, HostDrafts, Ran
    from engine.scheduler import Scheduler
    from engine.sequence import Sequence

_ORDER = {source: place for place, source in enumerate(DRAFT_SOURCES)}
RECOVER = 64  # times that drafts are asked for until they may be a token longer again
MOST_WAIT = 16  # tokens between two looks at a sequence for which little was found


class Guessing:
    """The proposers of one engine, and what came of their drafts."""

    def __init__(
        self, host: HostDrafts | None, head: AnyDraft | None, most: int, vocab: int,
        short: int = 1 << 30, piped: bool = False,
    ) -> None:  # fmt: skip
        """`most`: draft tokens a sequence and step; `vocab`: ids are below it; `short` tokens of a
        row have each the bits that they have by themselves; `piped`: steps may run ahead."""
        self._short, self._piped = short, piped
        self.host = host
        self._device = head.source if head is not None else ""
        self._most = most
        self._vocab = vocab
        self._cap = most  # draft tokens a sequence; fewer after a step that was too large
        self._asked = 0  # times
        self._runs_ahead = False  # the newest step does not wait for this
        self.rests = 0  # steps that an answer still holds for: nobody is asked, nor told anything
        self._rested = 0  # how many there were since the proposer was asked
        self.rounds = 0  # rows that verified a draft
        self.drafted = 0  # tokens verified
        self.accepted = 0
        self.places = [0] * max(most, DRAFT_PLACES)  # accepted, by place in the chain
        self.verified: Counter[str] = Counter()  # tokens, by source
        self.matched: Counter[str] = Counter()

    @property
    def sources(self) -> list[str]:
        """Whom a request may name."""
        host = self.host.sources if self.host is not None else ()
        return [*host, *filter(None, [self._device])]

    def begin(self, seq: Sequence, rest: int) -> None:
        """Guess what follows a prompt that was queued: the step that ends it verifies that, too.

        Of the prompt `rest` tokens are to be computed.  Behind many none is verified at once: in a
        row that is not short a token has other bits than by itself.  Then the next step does that,
        behind a token that only the device knows.
        """
        behind = self._piped and seq.history is None and rest >= self._short
        limit = min(self._room(seq), self._short - (1 if behind else rest))
        if self.host is None or seq.submit.drafts == "off" or limit < 1:
            return
        draft = self.host.begin(_turn(seq, limit), not self._runs_ahead)
        if draft.tokens:
            self._keep(seq, draft, self.host.source)

    def prepare(self, scheduler: Scheduler) -> None:
        """Let the host guess what it can while the device still drafts for the same step."""
        if self.host is not None:
            self.host.prepare([_turn(seq, limit) for seq, limit in self._asking(scheduler)
                               if not seq.pending])

    def propose(self, scheduler: Scheduler) -> None:
        """Ask the host proposer for all that decode; it sees what the device drafted for them.

        One whose newest token only the device knows cannot take a draft.  While steps run ahead of
        the host that is so of all; then one that is alone has it judged what a guess were worth.
        """
        if self.host is None or self.rests:
            return
        if self._runs_ahead and scheduler.active > 1:
            if any(seq.pending for seq in scheduler.running):
                return
        self._asked += 1
        if self._cap < self._most and self._asked % RECOVER == 0:
            self._cap += 1
        found = self._asking(scheduler)
        asked = [seq for seq, _ in found if not seq.pending]
        turns = [_turn(seq, limit) for seq, limit in found if not seq.pending]
        if not turns:
            if len(found) == 1:
                self._look(*found[0])
            return
        for seq, draft in zip(asked, self.host.propose(turns, _beside(scheduler)), strict=True):
            if draft.tokens:
                self._keep(seq, draft, self.host.source)
            seq.guessed = []

    def _asking(self, scheduler: Scheduler) -> list[tuple[Sequence, int]]:
        """Those that decode and may take a draft behind what flies, and how long it may be."""
        return [
            (seq, limit) for seq in scheduler.running
            if seq.decoding and not seq.draft and seq.submit.drafts != "off"
            and seq.submit.id not in scheduler.paused and (limit := self._room(seq)) >= 1
        ]  # fmt: skip

    def _look(self, seq: Sequence, limit: int) -> None:
        """Have the proposer judge it, the more seldom the less there was to find."""
        assert self.host is not None
        if len(seq.tokens) < seq.look_at:
            return
        worth = self.host.look(_turn(seq, limit), seq.grammar is not None)
        seq.vainly = 0 if worth >= 1 else min(2 * seq.vainly + 1, MOST_WAIT)
        seq.look_at = len(seq.tokens) + 1 + seq.vainly

    def ahead(self, plan: Plan, scheduler: Scheduler) -> int:
        """What follows a plan, as HostDrafts.ahead says it."""
        if self.rests and plan.drawing > 1 and not plan.masked:
            self.rests -= 1
            self._rested += 1
            return ASLEEP
        self.rests = 0
        if self.host is None and not self._device:
            return FREE
        found = self._most
        if self.host is not None:
            masked = 2 * len(plan.masked) > plan.drawing
            load = Load(plan.drawing, _beside(scheduler), masked, 1 + self._rested)
            self._rested = 0
            found = self.host.ahead(load, self._most if self._device else 0)
            if found == ASLEEP and not plan.masked:
                self.rests = self.host.holds - 1
        if found >= 0 or found == HOST:
            found = self._wanted(plan, found)
            # Nobody has to be asked for the next step: who wakes for it is seen in that one.
            if self._piped and all(row.seq.early for row in plan.rows if row.last):
                found = ASLEEP if found == HOST else FREE
        self._runs_ahead = found in (FREE, ASLEEP)
        return found

    def _wanted(self, plan: Plan, length: int) -> int:
        """`length`, or as much of it as somebody may take; FREE where nobody may."""
        longest, able = 0, False
        for row in plan.rows:
            submit = row.seq.submit
            if not row.last or submit.drafts == "off":
                continue
            # A row draws one token itself; behind the last there is nothing to verify.
            room = min(submit.max_drafts, row.seq.remaining - 2)
            able = able or room > 0
            if submit.drafts in ("auto", self._device):
                longest = max(longest, room)
        return min(length, longest) if able else FREE

    def retreat(self, seqs: list[Sequence], waiting: list[Sequence]) -> None:
        """A step was too large with their drafts: those are dropped, and later ones shorter.

        So are those of `waiting` sequences, made when they might be longer.
        """
        self._cap = max(1, self._cap // 2)
        for seq in (*seqs, *waiting):
            seq.drop_draft()

    def _room(self, seq: Sequence) -> int:
        """Draft tokens that may be verified for it now: the row's own token comes behind them."""
        return min(self._most, self._cap, seq.remaining - 1, seq.submit.max_drafts)

    def take(self, seq: Sequence, tokens: list[int]) -> None:
        """What the device drafted for a sequence."""
        tokens = tokens[: seq.submit.max_drafts]
        if seq.submit.drafts not in ("auto", self._device):
            return
        if self.host is not None:
            seq.guessed = tokens  # it chooses
        else:
            self._keep(seq, Draft(tokens), self._device)

    def _keep(self, seq: Sequence, draft: Draft, source: str) -> None:
        """Its legal beginning: what the grammar cannot take is not worth a row.

        An id that no token has would end the step, and with it the engine: a prediction may hold
        one, where a tokenizer knows more tokens than its model.
        """
        tokens = draft.tokens[: max(0, self._room(seq))]
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab:
            bad = (not 0 <= token < self._vocab for token in tokens)
            tokens = tokens[: next(place for place, is_bad in enumerate(bad) if is_bad)]
        if seq.grammar is not None:
            tokens = tokens[: seq.grammar.guessable(tokens)]
        seq.draft = tokens
        seq.sources = draft.sources[: len(tokens)] or (source,) * len(tokens)

    def booked(self, row: Row, accepted: Accepted) -> None:
        """Count what a row with a draft gave; to be called before its sequence moves on."""
        seq, count, right = row.seq, len(row.draft), accepted.matched
        self.rounds += 1
        self.drafted += count
        self.accepted += right
        for place in range(right):
            self.places[place] += 1
        sources = seq.sources[:count]
        for source in set(sources):
            looked, found = sources.count(source), sources[:right].count(source)
            self.verified[source] += looked
            seq.verified[source] += looked
            if found:
                self.matched[source] += found
                seq.matched[source] += found
        if self.host is not None:
            # Behind an end nothing was judged: only a token that differs is a miss.
            seen = count if len(accepted.tokens) > right else right
            self.host.observe(seq.key, sources, min(seen, right + 1), right)

    def ran(self, ran: Ran) -> None:
        """Tell the proposer what a step took."""
        if self.host is not None:
            self.host.timed(ran)

    def ended(self, session: bytes) -> None:
        """A session is over."""
        if self.host is not None:
            self.host.ended(session)

    def forget(self, seq: Sequence) -> None:
        """The sequence is over."""
        if self.host is not None:
            self.host.forget(seq.key)


def counted(verified: Counter[str], matched: Counter[str]) -> list[int]:
    """Both counts, of each of DRAFT_SOURCES in turn; the last has what no other names."""
    found = [0] * (2 * len(DRAFT_SOURCES))
    for offset, counts in enumerate((verified, matched)):
        for source, count in counts.items():
            found[2 * _ORDER.get(source, len(DRAFT_SOURCES) - 1) + offset] += count
    return found


def _beside(scheduler: Scheduler) -> int:
    """About how many prompt tokens the next step computes."""
    if not (scheduler.reads or scheduler.waiting):
        return 0
    ahead = sum(seq.want for seq in scheduler.running
                if not seq.decoding and not (seq.draft and seq.pending))
    if scheduler.active < scheduler.config.max_sequences:
        ahead += sum(len(seq.tokens) for seq in scheduler.waiting)
    return min(ahead, scheduler.config.mixed_tokens)


def _turn(seq: Sequence, limit: int) -> Turn:
    submit, grammar = seq.submit, seq.grammar
    return Turn(
        seq.key, seq.tokens, seq.prompt_len, limit, submit.session, submit.namespace,
        grammar.forced if grammar is not None else _nothing, submit.predicted,
        submit.drafts, seq.guessed, grammar.guessable if grammar is not None else None,
    )  # fmt: skip


def _nothing() -> list[int]:
    """What a sequence without a grammar is forced to say."""
    return []
