"""The whole cache room under random use, beside a model of what every page holds.  No tensors.

The model knows the contents of each page (tenant and all tokens up to its end), so a hit that is
not exactly the asked prefix fails at once; the same machine runs with honest and broken hashes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache import prefix
from cache.blocks import Block, BlockPool, OutOfBlocks
from cache.config import CacheConfig
from cache.sessions import SessionTable

SIZE, TOTAL = 2, 12
ROOTS = [prefix.root(b"a"), prefix.root(b"b")]
KEYS = [None, b"s", b"t", b"u"]
PICK = st.integers(0, 1_000)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


@dataclass
class Running:
    """One sequence of the model."""

    root: bytes
    session: bytes | None
    tokens: list[int]
    blocks: list[Block]
    keys: list[bytes] = field(default_factory=list)  # of its full blocks, as publish returned them


class Cache(RuleBasedStateMachine):
    digest = staticmethod(prefix.digest)

    def __init__(self):
        super().__init__()
        self.patch = mock.patch.object(prefix, "digest", type(self).digest)
        self.patch.start()
        self.now = 0.0
        self.pool = BlockPool(TOTAL, SIZE, lambda: self.now)
        self.table = SessionTable(
            self.pool, CacheConfig(max_sessions=2, session_idle_s=500.0), lambda: self.now
        )
        self.running: list[Running] = []
        self.pages: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def teardown(self):
        self.patch.stop()

    @initialize()
    def begin(self):
        assert self.pool.available == TOTAL

    def page(self, run, number):
        return (run.root, tuple(run.tokens[: (number + 1) * SIZE]))

    def settle(self, run):
        """Write and publish the full blocks that are new."""
        for number in range(len(run.keys), len(run.tokens) // SIZE):
            block = run.blocks[number]
            self.pages[block.id] = self.page(run, number)
            parent = run.keys[-1] if run.keys else run.root
            tokens = run.tokens[number * SIZE : (number + 1) * SIZE]
            run.keys.append(self.pool.publish(block, parent, tokens))

    @rule(root=st.sampled_from(ROOTS), session=st.sampled_from(KEYS), tokens=TOKENS)
    def start(self, root, session, tokens):
        if session is not None:
            self.table.touch(session)
        hits = self.pool.match(root, tokens, len(tokens) - 1)
        assert len(hits) * SIZE < len(tokens)
        run = Running(root, session, tokens, hits, [block.key for block in hits])
        for number, block in enumerate(hits):
            assert self.pages[block.id] == self.page(run, number), "a false share"
        self.look_at_part(run, hits)
        self.pool.share(hits)
        if self.take(run, -(-len(tokens) // SIZE) - len(hits)):
            self.running.append(run)
            self.settle(run)

    def look_at_part(self, run, hits):
        """What is offered for copying holds the KV of exactly the tokens that it says."""
        done = len(hits) * SIZE
        parent = hits[-1].key if hits else run.root
        if (found := self.pool.match_part(parent, run.tokens[done:])) is not None:
            block, count = found
            root, tokens = self.pages[block.id]
            assert root == run.root, "another tenant's page"
            assert tokens[: done + count] == tuple(run.tokens[: done + count]), "a false part"

    def take(self, run, count):
        before = (self.pool.used, self.pool.cached, self.pool.free_count)
        possible = count <= TOTAL - before[0]
        try:
            blocks = self.pool.take(count)
        except OutOfBlocks as refusal:
            assert not possible and refusal.wanted == count
            assert before == (self.pool.used, self.pool.cached, self.pool.free_count)
            self.pool.release(run.blocks)
            return False
        assert possible and len({block.id for block in blocks}) == count
        assert [b.id for b in blocks] == sorted(b.id for b in blocks)
        held = {block.id for other in self.running for block in other.blocks}
        assert not held & {block.id for block in blocks}, "a block in use was handed out"
        assert all(block.users == 1 and block.key is None for block in blocks)
        run.blocks = run.blocks + blocks
        return True

    @precondition(lambda self: self.running)
    @rule(pick=PICK, tokens=TOKENS)
    def grow(self, pick, tokens):
        run = self.running[pick % len(self.running)]
        tokens = run.tokens + tokens
        if not self.take(run, -(-len(tokens) // SIZE) - len(run.blocks)):
            self.running.remove(run)  # preempted
            return
        run.tokens = tokens
        self.settle(run)

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def fork(self, pick):
        run = self.running[pick % len(self.running)]
        full = len(run.tokens) // SIZE
        self.pool.share(run.blocks[:full])
        self.running.append(
            Running(run.root, run.session, run.tokens[: full * SIZE], run.blocks[:full],
                    run.keys[:full])
        )  # fmt: skip

    @precondition(lambda self: self.running)
    @rule(pick=PICK, warm=st.booleans())
    def preempt(self, pick, warm):
        run = self.running.pop(pick % len(self.running))
        self.pool.release(run.blocks, warm=warm)

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def finish(self, pick):
        run = self.running.pop(pick % len(self.running))
        full = len(run.keys)
        if (tail := run.tokens[full * SIZE :]) and run.blocks[full].key is None:
            self.pages[run.blocks[full].id] = (run.root, tuple(run.tokens))
            self.pool.publish(run.blocks[full], run.keys[-1] if full else run.root, tail)
        self.table.turn(run.session, run.blocks)
        self.pool.release(run.blocks)

    @rule(session=st.sampled_from(KEYS[1:]), tool_call=st.booleans())
    def turn_ended(self, session, tool_call):
        self.table.turn_ended(session, tool_call)

    @rule(session=st.sampled_from(KEYS[1:]))
    def ended(self, session):
        self.table.ended(session)

    @rule(seconds=st.sampled_from([0.1, 8.0, 61.0, 600.0]))
    def wait(self, seconds):
        self.now += seconds
        assert self.table.pinned <= len(self.table)

    @invariant()
    def all_is_consistent(self):
        self.table.check()
        users = Counter(block.id for run in self.running for block in run.blocks)
        assert len(users) == self.pool.used
        for run in self.running:
            for block in run.blocks:
                assert block.users == users[block.id]

    @invariant()
    def what_a_running_sequence_published_is_found(self):
        for run in self.running:
            public = self.pool.resident(run.blocks)
            found = self.pool.match(run.root, run.tokens, len(run.tokens))
            assert found[: len(public)] == public


class CollidingCache(Cache):
    digest = staticmethod(lambda parent, packed: bytes([parent[0] & 1 ^ packed[0]]) * 16)


class ConstantCache(Cache):
    digest = staticmethod(lambda parent, packed: b"k" * 16)


settings.register_profile("cache", max_examples=40, stateful_step_count=40, deadline=None)
for machine in (Cache, CollidingCache, ConstantCache):
    machine.TestCase.settings = settings.get_profile("cache")

TestCache = Cache.TestCase
TestCollidingCache = CollidingCache.TestCase
TestConstantCache = ConstantCache.TestCase
