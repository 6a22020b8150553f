"""Who computes how many tokens this step, and what a step's result means.  Touches no tensors.

One rule: every sequence wants `len(tokens) + len(draft) - computed` tokens; each step lets
computed catch up with wanted within a budget.  Sequences that decode go first, so that prompts
never stall them; among prompts the shorter one goes first unless the longer one has waited for it
(rank).  When blocks run out the youngest sequence is preempted: it keeps its tokens, loses its
blocks, and comes back through the cache.

A plan may be made while the step before still flies (engine/runner.py): it starts behind what that
one computes and counts the tokens that it draws.  Blocks that a commit frees meanwhile can be
handed out at once, as the device runs its steps in order: whatever the flight still writes there
comes before the new owner's first write.  Only preemption needs exact state: a sequence that flies
is never preempted, the plan is left `short`, and the next one has to wait for the flight.

Continuous batching: Yu et al., Orca (2022).  Chunked prefill: Agrawal et al., Sarathi (2023).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from cache.blocks import OutOfBlocks
from engine.accept import Accepted, ending
from engine.plan import Plan, Row
from engine.publish import publish, publish_tail

if TYPE_CHECKING:
    from cache.blocks import Block, BlockPool
    from cache.sessions import SessionTable
    from engine.config import ResolvedConfig
    from engine.pace import Pace
    from engine.sequence import Sequence

_order = attrgetter("order")
PATIENCE = 2000.0  # prompt tokens that one second of waiting is worth when prompts are ordered


@dataclass(slots=True)
class Scheduler:
    """The queue, the running set, and the two verbs plan and commit."""

    pool: BlockPool
    sessions: SessionTable
    config: ResolvedConfig
    pace: Pace
    lookahead: int = 0  # slots beyond the wanted tokens that a device draft writes
    short_row: int = 1 << 30  # tokens of a row that a prompt's end may have with a draft behind it
    waiting: list[Sequence] = field(default_factory=list)  # sorted by order
    paused: set[str] = field(default_factory=set)  # requests whose readers are behind
    running: list[Sequence] = field(default_factory=list)  # sorted by order
    living: dict[str, list[Sequence]] = field(default_factory=dict)  # by request, forks to come too
    short: bool = False  # the last plan lacked blocks that only flying sequences could give
    preemptions: int = 0
    wasted: int = 0  # rows of sequences that had ended meanwhile, or got another token (Row.vain)
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    _fresh: list[int] = field(default_factory=list)
    _copies: list[tuple[int, int]] = field(default_factory=list)
    reads: bool = False  # the last plan found prompts to compute, and perhaps left some
    _held: bool = False  # the next plan admits nobody

    def add(self, choices: list[Sequence]) -> None:
        """Queue a request: the first choice, with the others to fork from it."""
        first, *first.siblings = choices
        self.living[first.submit.id] = list(choices)
        self._queue(first)

    def find(self, request: str, index: int = -1) -> list[Sequence]:
        """Living sequences of a request (one choice when `index` >= 0), forks to come included."""
        return [s for s in self.living.get(request, ()) if index in (-1, s.index)]

    def _queue(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=_order)

    def pause(self, request: str) -> None:
        """Give the request no rows until it is taken out of `paused`; unknown ones are ignored."""
        if request in self.living:
            self.paused.add(request)

    def lookup(self, root: bytes, tokens: list[int]) -> int:
        """Tokens of a prompt whose KV exists now."""
        if not self.config.prefix_caching:
            return 0
        hits = self.pool.match(root, tokens, len(tokens) - 1)
        part = self._part(root, tokens, hits)
        return len(hits) * self.pool.size + (part[1] if part else 0)

    def _part(
        self, root: bytes, tokens: list[int], hits: list[Block]
    ) -> tuple[Block, int] | None:
        """The block that begins like what follows the hits; never the whole prompt."""
        if not self.config.prefix_caching or (hits and hits[-1].key is None):
            return None
        parent = hits[-1].key if hits else root
        assert parent is not None
        found = self.pool.match_part(parent, tokens[len(hits) * self.pool.size : -1])
        back = self.lookahead > 0  # a device draft keeps features of whole blocks only
        return (found[0], found[1] - back) if found else None

    # ---- plan ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Choose this step's rows; take their blocks; preempt the youngest when there are none."""
        self.short = False
        rows: list[Row] = []
        decoders, prefills = self._split()
        self.reads = bool(prefills or self.waiting)
        prompts = self.config.max_batch_tokens
        if decoders:
            # Every decoder has its token; prompts have theirs; drafts share what is left.
            spare = prompts - len(decoders)
            prompts = min(spare, self._beside(decoders, prefills))
            self._decode(decoders, spare - prompts, rows)
        for seq in prefills:
            if prompts > 0 and seq in self.running and (row := self._row(seq, prompts, rows)):
                rows.append(row)
                prompts -= row.count
        if self._held:
            prompts, self._held = 0, False
        while prompts > 0 and (admitted := self._admit()):
            if row := self._row(admitted, prompts, rows):
                rows.append(row)
                prompts -= row.count
        if not rows:  # it is never launched: what forks want copied waits for the next one
            return Plan([], [], [])
        fresh, copies, self._fresh, self._copies = self._fresh, self._copies, [], []
        return Plan(rows, fresh, copies)

    def _beside(self, decoders: list[Sequence], prefills: list[Sequence]) -> int:
        """Prompt tokens that keep nobody's stream too long; 0 when no prompt waits."""
        if not prefills and not self.waiting:
            return 0
        backlog = sum(seq.want for seq in prefills) + sum(len(seq.tokens) for seq in self.waiting)
        return self.pace.budget(sum(1 + len(seq.draft) for seq in decoders), backlog)

    def _decode(self, decoders: list[Sequence], spare: int, rows: list[Row]) -> None:
        """Add the rows of those that decode, with `spare` draft tokens shared fairly."""
        preempted = self.preemptions
        size, ahead = self.pool.size, 1 + self.lookahead
        for left, seq in zip(range(len(decoders), 0, -1), decoders, strict=True):
            if self.preemptions != preempted and seq not in self.running:
                continue
            start = seq.computed + seq.flying
            if not seq.draft and start + ahead <= len(seq.blocks) * size:  # _row's usual result
                rows.append(Row(seq, start, 1, True, seq.pending > 0, (), seq.replaced))
                seq.flying += 1
                seq.pending += 1
                continue
            if row := self._row(seq, 1 + spare // left if seq.draft else 1, rows):
                rows.append(row)
                spare -= len(row.draft)

    def _split(self) -> tuple[list[Sequence], list[Sequence]]:
        """Those that decode and those with more to compute, as far as there are slots."""
        decoders: list[Sequence] = []
        prefills: list[Sequence] = []
        paused = self.paused
        room = self.config.max_sequences
        if len(self.running) > room:  # others took the slots of some that are back from a pause
            room -= sum(seq.flying > 0 for seq in self.running)
        for seq in self.running:
            if paused and seq.submit.id in paused:
                continue
            if not seq.flying:
                if room <= 0:
                    continue
                room -= 1
            known = len(seq.tokens) + seq.pending
            if seq.pending and (known >= seq.most or (seq.draft and not seq.early)):
                continue  # what flies draws its last token, or the one that a draft starts from
            decodes = known - seq.computed - seq.flying == 1  # as seq.decoding says
            (decoders if decodes else prefills).append(seq)
        return decoders, prefills

    def _row(self, seq: Sequence, budget: int, rows: list[Row]) -> Row | None:
        """This sequence's share, with blocks behind it; None when it has to wait."""
        start, known = seq.computed + seq.flying, seq.known
        count = min(seq.want, budget)
        if seq.draft and (own := seq.want - len(seq.draft)) > 1:
            count = min(count, max(own, self.short_row))  # in a longer one tokens had other bits
        while need := self._lacking(seq, start + count + self.lookahead):
            try:
                taken = self.pool.take(need)
            except OutOfBlocks:
                if seq.draft:
                    seq.drop_draft()
                    count = min(seq.want, budget)
                elif not self._make_room(seq, rows):
                    return None
                continue
            seq.blocks += taken
            self._fresh += [block.id for block in taken]
            break
        drafts = start + count - known
        last = drafts >= 0
        draft = tuple(seq.draft[:drafts]) if drafts > 0 else ()
        row = Row(seq, start, count, last, seq.pending > 0, draft, seq.replaced)
        seq.fly(row)
        return row

    def _make_room(self, seq: Sequence, rows: list[Row]) -> bool:
        """Preempt the youngest sequence that has no row yet; False when that was `seq` itself.

        Also False, and the plan is `short`, when the youngest flies: its state is not exact.
        """
        planned = {row.seq.key for row in rows}
        for victim in reversed(self.running):
            if victim.key in planned:
                continue
            if victim.flying:
                self.short = True
                return False
            self.preempt(victim)
            return victim is not seq
        return False

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks away; the sequence keeps its tokens and is computed again later."""
        assert not seq.flying, f"{seq.key} is preempted while {seq.flying} of its tokens fly"
        self.running.remove(seq)
        if self.config.prefix_caching:
            publish_tail(self.pool, seq)
        self._release(seq)
        seq.drop_draft()
        seq.computed = 0
        seq.keys = []
        seq.preempted += 1
        self.preemptions += 1
        self._queue(seq)

    def retreat(self, candidates: list[Sequence], count: int) -> None:
        """A step was too large: preempt the youngest, admit nobody next time.  Nothing may fly."""
        for seq in sorted(candidates, key=_order)[-count:]:
            self.preempt(seq)
        self._held = True

    def _admit(self) -> Sequence | None:
        """Move the first waiting sequence to the running ones if its tokens find room."""
        ready = (seq for seq in self.waiting if seq.submit.id not in self.paused)
        seq = next(ready, None)
        if seq is None or self.active >= self.config.max_sequences:
            return None
        hits = self._match(seq)
        idle_hits = sum(block.users == 0 for block in hits)  # sharing makes them unavailable
        need = self._lacking(seq, len(seq.tokens) + self.lookahead) - len(hits) + idle_hits
        if self.running and self.pool.available < need + len(self.running):  # each may need one
            self._reclaim()
            return None
        self.waiting.remove(seq)
        part = self._part(seq.root, seq.tokens, hits)
        self.pool.share(hits)
        seq.blocks = list(hits)
        seq.keys = [block.key for block in hits if block.key is not None]
        seq.computed = len(hits) * self.pool.size
        if part is not None and self.pool.available:
            # The copy is the first thing the step does, so even a block that `take` has just
            # evicted still holds what it held.
            (own,) = self.pool.take(1)
            seq.blocks.append(own)
            seq.computed += part[1]
            self._copies.append((part[0].id, own.id))
        if seq.cached is None:  # a sequence that comes back finds its own blocks: no merit
            seq.cached = seq.computed
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += seq.computed
        bisect.insort(self.running, seq, key=_order)
        return seq

    @property
    def active(self) -> int:
        """Running sequences that hold a slot of the batch: not paused, or still flying."""
        if not self.paused:
            return len(self.running)
        return sum(seq.flying > 0 or seq.submit.id not in self.paused for seq in self.running)

    def _reclaim(self) -> None:
        """Somebody waits for blocks: the youngest paused sequence lends its own."""
        for seq in reversed(self.running) if self.paused else ():
            if seq.submit.id in self.paused:
                if seq.flying:
                    self.short = True
                else:
                    self.preempt(seq)
                return

    def _match(self, seq: Sequence) -> list[Block]:
        return (self.pool.match(seq.root, seq.tokens, len(seq.tokens) - 1)
                if self.config.prefix_caching else [])

    def _lacking(self, seq: Sequence, tokens: int) -> int:
        return max(0, -(-tokens // self.pool.size) - len(seq.blocks))

    # ---- commit ----------------------------------------------------------------------------------

    def commit(self, row: Row, accepted: Accepted | None) -> None:
        """Book a row's result: `accepted` of a last row, None for a chunk in mid-prompt."""
        seq = row.seq
        assert not seq.gone, f"a result of {seq.key} is booked after its end"
        seq.flying -= row.count
        if accepted is None:
            seq.computed = row.start + row.count
            self._publish(seq)
            return
        seq.pending -= 1
        before = len(seq.tokens)
        seq.tokens += accepted.tokens
        # The newest token's KV does not exist yet: the step that reads it writes it.
        seq.computed = min(before + accepted.matched, len(seq.tokens) - 1)
        if row.draft:
            seq.drafted += len(row.draft)
            seq.accepted += accepted.matched
        if accepted.forced or accepted.undrawn:  # the latter draws behind its newest token again
            seq.replace()
            seq.computed -= accepted.forced and self.lookahead > 0  # a device draft consumed it
        if not seq.flying:  # else the next step verifies what was guessed behind this one
            seq.drop_draft()
        self._publish(seq)
        if seq.siblings:
            self._fork(seq)
        seq.finish = accepted.finish

    def commit_one(self, row: Row, token: int) -> str:
        """The same for a free sequence without a draft, as most rows are; return its `finish`."""
        seq = row.seq
        seq.flying -= row.count
        seq.pending -= 1
        computed = seq.computed = len(seq.tokens)
        seq.tokens.append(token)
        if (len(seq.keys) + 1) * self.pool.size <= computed:
            self._publish(seq)
        if seq.siblings:
            self._fork(seq)
        seq.finish = ending(token, seq.stop_ids, seq.most - computed - 1)
        return seq.finish

    def _publish(self, seq: Sequence) -> None:
        if (len(seq.keys) + 1) * self.pool.size <= seq.computed and self.config.prefix_caching:
            publish(self.pool, seq)

    def cancel(self, plan: Plan) -> None:
        """The plan did not fly: its rows are wanted as before.  Its copies and clears are done."""
        for row in plan.rows:
            if not row.vain:
                row.seq.stay(row)

    def _fork(self, seq: Sequence) -> None:
        """Start the other choices on the prompt's KV: share full blocks, copy the last."""
        siblings, seq.siblings = seq.siblings, []
        shared = (seq.prompt_len - 1) // self.pool.size  # each computes the last prompt token
        for fork in siblings:
            fork.cached = seq.cached
            room = self.active < self.config.max_sequences
            try:
                own = self.pool.take(1) if room else []
            except OutOfBlocks:
                own = []
            if not own:  # it comes through the queue, and through the cache
                self._queue(fork)
                continue
            self.pool.share(seq.blocks[:shared])
            fork.blocks = [*seq.blocks[:shared], *own]
            fork.keys = seq.keys[:shared]
            fork.computed = fork.prompt_len - 1
            self._copies.append((seq.blocks[shared].id, own[0].id))
            bisect.insort(self.running, fork, key=_order)

    def drop(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is; its full blocks stay cached."""
        choices = self.living[seq.submit.id]
        choices.remove(seq)
        if not choices:
            del self.living[seq.submit.id]
            self.paused.discard(seq.submit.id)
        seq.gone = True
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        else:
            for leader in choices:
                if seq in leader.siblings:
                    leader.siblings.remove(seq)
            return
        if seq.siblings:  # the leader goes: the next choice becomes the leader
            fork, *fork.siblings = seq.siblings
            fork.cached = seq.cached
            seq.siblings = []
            self._queue(fork)
        if self.config.prefix_caching:
            publish_tail(self.pool, seq)
        if seq.keys:  # without a session too: what several use is nobody's own
            self.sessions.turn(seq.submit.session, seq.blocks[: len(seq.keys) + 1])
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
