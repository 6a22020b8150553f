"""Who computes how many tokens this step, and what a step's result means.  Touches no tensors.

One rule: every sequence wants `len(tokens) + len(draft) - computed` tokens; each step lets
computed catch up with wanted within a budget.  Sequences that decode go first, so that prompts
never stall them; among prompts the shorter one goes first unless the longer one has waited for it
(rank).  When blocks run out the youngest sequence is preempted: it keeps its tokens, loses its
blocks, and comes back through the cache.

Continuous batching: Yu et al., Orca (2022).  Chunked prefill: Agrawal et al., Sarathi (2023).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache.blocks import OutOfBlocks

if TYPE_CHECKING:
    from cache.blocks import Block, BlockPool
    from cache.sessions import SessionTable
    from engine.accept import Accepted
    from engine.config import ResolvedConfig
    from engine.sequence import Sequence

PATIENCE = 2000.0  # prompt tokens that one second of waiting is worth when prompts are ordered


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step."""

    seq: Sequence
    start: int  # position of the first token computed
    count: int
    drafts: int  # how many of them are guesses, at the end; > 0 only when the row is `last`
    last: bool  # the row reaches the newest token: it gives at least one new token


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes."""

    rows: list[Row]
    fresh: list[int]  # ids of blocks that were handed out for it: their pages hold nothing of value
    copies: list[tuple[int, int]]  # (from, to) block ids to copy first: forks

    @property
    def tokens(self) -> int:
        """Flat tokens of the step."""
        return sum(row.count for row in self.rows)


@dataclass(slots=True)
class Scheduler:
    """The queue, the running set, and the two verbs plan and commit."""

    pool: BlockPool
    sessions: SessionTable
    config: ResolvedConfig
    lookahead: int = 0  # slots beyond the wanted tokens that a device draft writes
    waiting: list[Sequence] = field(default_factory=list)  # sorted by order
    paused: set[str] = field(default_factory=set)  # requests whose readers are behind
    running: list[Sequence] = field(default_factory=list)  # sorted by order
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    _fresh: list[int] = field(default_factory=list)
    _copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        bisect.insort(self.waiting, seq, key=_order)

    def find(self, request: str, index: int = -1) -> list[Sequence]:
        """Living sequences of a request (one choice when `index` >= 0), forks to come included."""
        found = []
        for seq in (*self.running, *self.waiting):
            if seq.submit.id == request:
                found += [s for s in (seq, *seq.siblings) if index in (-1, s.index)]
        return found

    def pause(self, request: str) -> None:
        """Give the request no rows until it is taken out of `paused`; unknown ones are ignored."""
        if self.find(request):
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
        return self.pool.match_part(parent, tokens[len(hits) * self.pool.size : -1])

    # ---- plan ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Choose this step's rows; take their blocks; preempt the youngest when there are none."""
        rows: list[Row] = []
        active = [seq for seq in self.running if seq.submit.id not in self.paused]
        decoders = [seq for seq in active if seq.decoding]
        prefills = [seq for seq in active if not seq.decoding]
        prompts = self.config.max_batch_tokens
        if decoders:
            # Every decoder has its token; prompts have theirs; drafts share what is left.
            prompts = min(prompts - len(decoders), self.config.mixed_tokens)
            held = prompts if prefills or self.waiting else 0
            spare = self.config.max_batch_tokens - len(decoders) - held
            for left, seq in zip(range(len(decoders), 0, -1), decoders, strict=True):
                if seq in self.running and (row := self._row(seq, 1 + spare // left, rows)):
                    rows.append(row)
                    spare -= row.drafts
        for seq in prefills:
            if seq in self.running and prompts > 0 and (row := self._row(seq, prompts, rows)):
                rows.append(row)
                prompts -= row.count
        while prompts > 0 and (admitted := self._admit()):
            if row := self._row(admitted, prompts, rows):
                rows.append(row)
                prompts -= row.count
        fresh, copies, self._fresh, self._copies = self._fresh, self._copies, [], []
        return Plan(rows, fresh, copies)

    def _row(self, seq: Sequence, budget: int, rows: list[Row]) -> Row | None:
        """This sequence's share, with blocks behind it; None when it has to wait."""
        count = min(seq.want, budget)
        while True:
            wanted = self._blocks_for(seq.computed + count + self.lookahead)
            need = wanted - len(seq.blocks)
            if need <= 0:
                break
            try:
                taken = self.pool.take(need)
            except OutOfBlocks:
                if seq.draft:
                    seq.drop_draft()
                    count = min(seq.want, budget)
                    continue
                if not self._make_room(seq, rows):
                    return None
                continue
            seq.blocks += taken
            self._fresh += [block.id for block in taken]
        last = seq.computed + count >= len(seq.tokens)
        drafts = seq.computed + count - len(seq.tokens) if last else 0
        return Row(seq, seq.computed, count, drafts, last)

    def _make_room(self, seq: Sequence, rows: list[Row]) -> bool:
        """Preempt the youngest sequence that has no row yet; False when that was `seq` itself."""
        planned = {row.seq.key for row in rows}
        for victim in reversed(self.running):
            if victim.key not in planned:
                self.preempt(victim)
                return victim is not seq
        return False

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks away; the sequence keeps its tokens and is computed again later."""
        self.running.remove(seq)
        self._keep_tail(seq)
        self._release(seq)
        seq.drop_draft()
        seq.computed = 0
        seq.keys = []
        seq.preempted += 1
        self.preemptions += 1
        self.add(seq)

    def _admit(self) -> Sequence | None:
        """Move the first waiting sequence to the running ones if its tokens find room."""
        ready = (seq for seq in self.waiting if seq.submit.id not in self.paused)
        seq = next(ready, None)
        if seq is None or self.active >= self.config.max_sequences:
            return None
        hits = self._match(seq)
        idle_hits = sum(block.users == 0 for block in hits)  # sharing makes them unavailable
        need = self._blocks_for(len(seq.tokens) + self.lookahead) - len(hits) + idle_hits
        spare = len(self.running)  # each running sequence may need a block soon
        if self.running and self.pool.available < need + spare:
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
        """Running sequences that are not paused: those that hold a slot of the batch."""
        return sum(seq.submit.id not in self.paused for seq in self.running)

    def _reclaim(self) -> None:
        """Somebody waits for blocks: the youngest paused sequence lends its own."""
        for seq in reversed(self.running):
            if seq.submit.id in self.paused:
                self.preempt(seq)
                return

    def _match(self, seq: Sequence) -> list[Block]:
        if not self.config.prefix_caching:
            return []
        return self.pool.match(seq.root, seq.tokens, len(seq.tokens) - 1)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.size)

    # ---- commit ----------------------------------------------------------------------------------

    def commit(self, row: Row, accepted: Accepted | None) -> None:
        """Book a row's result: `accepted` of a last row, None for a chunk in mid-prompt."""
        seq = row.seq
        if accepted is None:
            seq.computed = row.start + row.count
            self._publish(seq)
            return
        before = len(seq.tokens)
        seq.tokens += accepted.tokens
        # The newest token's KV does not exist yet: the step that reads it writes it.
        seq.computed = min(before + accepted.matched, len(seq.tokens) - 1)
        seq.drafted += row.drafts
        seq.accepted += accepted.matched
        seq.drop_draft()
        self._publish(seq)
        self._fork(seq)
        seq.finish = accepted.finish

    def _publish(self, seq: Sequence) -> None:
        """Give every block that is full of committed tokens its key: others can share it."""
        if not self.config.prefix_caching:
            return
        size = self.pool.size
        while (len(seq.keys) + 1) * size <= seq.computed:
            i = len(seq.keys)
            parent = seq.keys[-1] if seq.keys else seq.root
            block = seq.blocks[i]
            seq.keys.append(self.pool.publish(block, parent, seq.tokens[i * size : (i + 1) * size]))
            if block.key is not None:
                fresh = max(0, min(seq.prompt_len, (i + 1) * size) - i * size)
                seq.written = min(seq.written + fresh, seq.prompt_len - (seq.cached or 0))

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
                self.add(fork)
                continue
            self.pool.share(seq.blocks[:shared])
            fork.blocks = [*seq.blocks[:shared], *own]
            fork.keys = seq.keys[:shared]
            fork.computed = fork.prompt_len - 1
            self._copies.append((seq.blocks[shared].id, own[0].id))
            bisect.insort(self.running, fork, key=_order)

    def drop(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is; its full blocks stay cached."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        else:
            self._drop_sibling(seq)
            return
        if seq.siblings:  # the leader goes: the next choice becomes the leader
            fork, *fork.siblings = seq.siblings
            fork.cached = seq.cached
            seq.siblings = []
            self.add(fork)
        self._keep_tail(seq)
        if seq.keys:  # without a session too: what several use is nobody's own
            self.sessions.turn(seq.submit.session, seq.blocks[: len(seq.keys) + 1])
        self._release(seq)

    def _drop_sibling(self, seq: Sequence) -> None:
        for leader in (*self.running, *self.waiting):
            if seq in leader.siblings:
                leader.siblings.remove(seq)

    def _keep_tail(self, seq: Sequence) -> None:
        """Let the block that is not full be found too: the next turn goes on in its middle."""
        size, full = self.pool.size, len(seq.keys)
        tail = seq.tokens[full * size : seq.computed]
        if not self.config.prefix_caching or len(tail) < self.pool.part or len(tail) >= size:
            return
        block = seq.blocks[full]
        if block.key is None and block.twin is None:
            self.pool.publish(block, seq.keys[-1] if full else seq.root, tail)

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []

    def check(self) -> None:
        """Assert that pool, queue and running set agree."""
        self.pool.check()
        held = sum(len(seq.blocks) for seq in self.running)
        assert held >= self.pool.used, f"{self.pool.used} blocks in use, sequences hold {held}"
        for seq in self.waiting:
            assert not seq.blocks, f"waiting sequence {seq.key} holds {len(seq.blocks)} blocks"
        for seq in self.running:
            assert self._blocks_for(seq.computed) <= len(seq.blocks), f"{seq.key} lacks blocks"
            assert seq.computed < len(seq.tokens), f"{seq.key} computed more than it has"


def _order(seq: Sequence) -> tuple[int, float, int]:
    return seq.order
