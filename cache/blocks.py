"""Hand out, share, find and take back KV blocks.  Never touches tensors; see pages.py for those.

    free --take--> private --publish--> in use <--share, release--> cached --evict--> free

A published block can be found by its key.  A key may collide, so a hit counts only when the block
has the same token ids *and* hangs below the very block that was matched before it (`before` is the
serial of that one, and serials are never reused): no collision can hand out another prompt's KV.
"""

from __future__ import annotations

import heapq
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from cache import prefix
from cache.eviction import NOWHERE, Entry, Eviction

PART = 8  # an eighth of a block must agree before it is worth copying

_by_id = attrgetter("id")


class OutOfBlocks(Exception):
    """The pool cannot give that many blocks now; nothing was changed."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(
            f"{wanted} KV blocks are wanted, {available} can be had: end or preempt a sequence "
            "first, or start with a larger --cache.kv-bytes."
        )
        self.wanted = wanted
        self.available = available


class Owner:
    """Somebody who alone has used some published blocks; keeps exactly those that still exist."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}  # by id


class Block(Entry):
    """The bookkeeping of `size` tokens of KV; its memory is page `id`."""

    __slots__ = (
        "before", "depth", "draft_valid", "key", "owner", "packed", "parent",
        "serial", "shared", "spares", "twin", "users",
    )  # fmt: skip

    def __init__(self, id: int) -> None:
        super().__init__(id)
        self.users = 0  # sequences that hold it
        self.key: bytes | None = None  # None = not published
        self.parent = b""  # the key before it in the chain, or the tenant's root
        self.serial = 0  # which publication this is, never reused; 0 = not published
        self.before = 0  # serial of the block before it; 0 = first of a chain
        self.depth = 0  # blocks before it
        self.packed = b""  # the token ids, as prefix.pack gives them
        self.draft_valid = False  # the draft's KV of these tokens is there too
        self.owner: Owner | None = None  # the only session that used it
        self.shared = False  # several sessions used it
        self.twin: Block | None = None  # private, because this equal one was published first
        self.spares: list[Block] = []  # private equals of this published one

    @property
    def tokens(self) -> array[int]:
        """The ids of a published block."""
        ids = array("I")
        ids.frombytes(self.packed)
        return ids

    def __repr__(self) -> str:
        name = self.key.hex()[:8] if self.key else "private"
        return f"Block({self.id}, {name}, users={self.users})"


class BlockPool:
    """All blocks of one engine, counted and found.  One thread; `check` says what always holds."""

    def __init__(
        self, total: int, size: int = prefix.BLOCK, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert total > 0 and size > 0, f"a pool of {total} blocks of {size} tokens"
        self.total = total
        self.size = size  # tokens a block
        self.part = max(1, size // PART)  # tokens
        self.used = 0  # blocks with users
        self.evictions = 0  # published blocks dropped so far
        self._clock = clock
        self._blocks: list[Block] = []  # by id; made when first handed out
        self._fresh = 0  # ids from here on are free
        self._holes: list[int] = []  # heap of the other free ids
        self._index: dict[bytes, Block] = {}  # key -> the published block
        self._child: dict[bytes, Block] = {}  # parent -> the newest block below it
        self._serial = 0
        self.idle = Eviction(clock)  # published blocks without users

    @property
    def cached(self) -> int:
        """Published blocks without users."""
        return len(self.idle)

    @property
    def free_count(self) -> int:
        """Blocks that hold nothing."""
        return self.total - self._fresh + len(self._holes)

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out now; cached and pinned ones included."""
        return self.total - self.used

    def take(self, count: int) -> list[Block]:
        """Return `count` private blocks with one user each, ids rising; raise OutOfBlocks.

        Never-used ids go first and together, so that a prompt's pages lie side by side; then
        holes; then the coldest cached blocks are evicted.
        """
        if count > self.available:
            raise OutOfBlocks(count, self.available)
        taken = [self._next_free() for _ in range(count)]
        taken.sort(key=_by_id)
        for block in taken:
            block.users = 1
        self.used += count
        return taken

    def match(self, parent: bytes, tokens: Sequence[int], limit: int) -> list[Block]:
        """The longest cached chain of full blocks below `parent` that covers <= `limit` tokens.

        `parent` is a tenant's root, or the key of a block that the caller holds (then `tokens` are
        those after it).  Nothing changes: `share` the result before the next `take`.
        """
        found: list[Block] = []
        before = self._serial_of(parent)
        if before is None:
            return found
        packed, step = prefix.pack(tokens), self.size * 4
        for start in range(0, min(len(tokens), limit) // self.size * step, step):
            piece = packed[start : start + step]
            key = prefix.digest(parent, piece)
            block = self._index.get(key)
            if block is None or not _is(block, parent, before, piece):
                break
            found.append(block)
            parent, before = key, block.serial
        return found

    def match_part(self, parent: bytes, tokens: Sequence[int]) -> tuple[Block, int] | None:
        """A block below `parent` that begins like `tokens`, and how many tokens agree.

        For the caller to copy: KV of a prefix is KV of that prefix, whatever came after it.  Only
        the newest child is looked at; fewer than PART tokens are not worth a copy.
        """
        child = self._child.get(parent)
        if child is None or child.parent != parent or child.before != self._serial_of(parent):
            return None
        pairs = enumerate(zip(child.tokens, tokens, strict=False))
        least = min(len(child.packed) // 4, len(tokens))
        count = next((at for at, (ours, theirs) in pairs if ours != theirs), least)
        return (child, count) if count >= self.part else None

    def share(self, blocks: Iterable[Block]) -> None:
        """Give each block one more user."""
        for block in blocks:
            if not block.users:
                assert block.key is not None, f"block {block.id} is free and cannot be shared"
                self.idle.remove(block)
                self.used += 1
            block.users += 1

    def release(self, blocks: Sequence[Block], warm: bool = False) -> None:
        """Take one user from each block of a chain, given head first.

        The tail becomes the coldest, so that children are evicted before their parents.  `warm`
        says that somebody will want the chain within seconds (a preempted sequence).
        """
        now = self._clock()
        for block in reversed(blocks):
            assert block.users > 0, f"block {block.id} released twice"
            block.users -= 1
            if block.users:
                continue
            self.used -= 1
            if block.key is None:
                self._free(block, now)
            else:
                self.idle.add(block, now, warm)

    def discard(self, blocks: Iterable[Block]) -> None:
        """Let nobody find what these hold any more, as far as nobody uses it: it is not sound.

        What hangs below them cannot be reached either, and leaves as it gets cold.
        """
        for block in blocks:
            if block.key is not None and not block.users:
                self.idle.forget(block)
                self._unpublish(block)
                self._free(block, self._clock())

    def publish(self, block: Block, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Let a block be found; return the key under which its chain goes on.

        A block that is not full (the tail of a turn) can be found by `match_part` only.

        `parent` is the root, or what `publish` returned for the block before (or its `.key`), which
        the caller still holds.  The tokens must be final: never drafts.  When an equal block was
        published first this one stays private.  When the key belongs to another prompt's block in
        use, or the parent is gone, it stays private and so does everything after it.
        """
        assert block.users > 0, f"{block} is free and cannot be published"
        assert block.key is None and block.twin is None, f"{block} is published twice"
        assert 0 < len(tokens) <= self.size, f"{len(tokens)} tokens in a block of {self.size}"
        before = self._serial_of(parent)
        if before is None:
            return _nobodys_key()
        packed = prefix.pack(tokens)
        key = prefix.digest(parent, packed)
        there = self._index.get(key)
        if there is not None:
            if _is(there, parent, before, packed):
                block.twin = there
                there.spares.append(block)
                return key
            if there.users or there.spares:
                return _nobodys_key()
            self.idle.forget(there)  # a collision, or its own parent is gone: it gives way
            self._unpublish(there)
            self._free(there, self._clock())
        self._serial += 1
        block.key, block.parent, block.before, block.packed = key, parent, before, packed
        block.depth = self._index[parent].depth + 1 if before else 0
        block.serial = self._serial
        self._index[key] = block
        self._child[parent] = block
        return key

    def resident(self, blocks: Iterable[Block]) -> list[Block]:
        """The published blocks that stand for the head of a chain, up to its first private one."""
        chain: list[Block] = []
        for block in blocks:
            block = block.twin or block
            if block.key is None:
                break
            chain.append(block)
        return chain

    def claim(self, blocks: Iterable[Block], owner: Owner | None) -> None:
        """Note who used these published blocks; a second owner, or None, makes a block shared."""
        for block in blocks:
            if block.shared or (block.owner is owner and owner is not None):
                continue
            if block.owner is None and owner is not None:
                block.owner = owner
                owner.blocks[block.id] = block
            else:
                self._disown(block)
                block.shared = True

    def disown(self, owner: Owner) -> list[Block]:
        """End an owner's claims; return what it alone used, deepest first."""
        blocks = sorted(owner.blocks.values(), key=attrgetter("depth"), reverse=True)
        for block in blocks:
            block.owner = None
        owner.blocks.clear()
        return blocks

    def check(self) -> None:
        """Assert every invariant of the pool; O(total), for tests and a debug flag."""
        assert [block.id for block in self._blocks] == list(range(len(self._blocks)))
        free = {*range(self._fresh, self.total), *self._holes}
        assert len(free) == self.free_count, "an id is free twice"
        assert self.free_count + self.cached + self.used == self.total, (
            f"free {self.free_count} + cached {self.cached} + used {self.used} != {self.total}"
        )
        for block in self._blocks:
            self._check_block(block, block.id in free)
        assert sum(block.users > 0 for block in self._blocks) == self.used
        assert sum(block.key is not None for block in self._blocks) == len(self._index)
        for parent, child in self._child.items():
            assert child.key in self._index and child.parent == parent, f"{child} is no child"
        self.idle.check(self._blocks)

    def _check_block(self, block: Block, free: bool) -> None:
        assert block.users >= 0, f"{block} has users < 0"
        idle = block.place != NOWHERE
        assert free + idle + (block.users > 0) == 1, f"{block} is in {free + idle} lists"
        if block.key is None:
            assert not (block.serial or block.pins or block.owner or block.shared or block.spares)
        else:
            assert self._index.get(block.key) is block, f"{block} is not in the index"
            assert prefix.digest(block.parent, block.packed) == block.key, f"{block} is misnamed"
            assert block.twin is None and 0 < block.serial <= self._serial
            assert block.owner is None or block.owner.blocks.get(block.id) is block
        for spare in block.spares:
            assert spare.twin is block and spare.users > 0, f"{spare} is no spare of {block}"
        assert block.twin is None or block in block.twin.spares, f"{block} lost its twin"

    def _serial_of(self, parent: bytes) -> int | None:
        """The serial of a parent: 0 for a root, None when the block is gone."""
        if len(parent) != prefix.KEY_BYTES:
            return 0
        block = self._index.get(parent)
        return None if block is None else block.serial

    def _next_free(self) -> Block:
        if self._fresh < self.total:
            if self._fresh == len(self._blocks):
                self._blocks.append(Block(self._fresh))
            self._fresh += 1
            return self._blocks[self._fresh - 1]
        if self._holes:
            return self._blocks[heapq.heappop(self._holes)]
        block = self._blocks[self.idle.pop().id]
        self._unpublish(block)
        return block

    def _unpublish(self, block: Block) -> None:
        """Empty a block that has just left the cache; an equal private one takes its name over."""
        assert block.key is not None, f"{block} is not published"
        self.evictions += 1
        del self._index[block.key]
        if self._child.get(block.parent) is block:
            del self._child[block.parent]
        self._disown(block)
        if block.spares:
            self._promote(block)
        block.key, block.parent, block.packed = None, b"", b""
        block.serial = block.before = block.depth = 0
        block.draft_valid = block.shared = False

    def _promote(self, old: Block) -> None:
        """The first spare becomes the published one: same content, so same serial and children."""
        assert old.key is not None, f"{old} is not published"
        new, *others = old.spares
        new.key, new.parent, new.before, new.packed = old.key, old.parent, old.before, old.packed
        new.serial, new.depth, new.warm, new.shared = old.serial, old.depth, old.warm, old.shared
        new.twin, new.spares = None, others
        for spare in others:
            spare.twin = new
        old.spares = []
        self._index[old.key] = new
        self._child[old.parent] = new

    def _disown(self, block: Block) -> None:
        if block.owner is not None:
            del block.owner.blocks[block.id]
            block.owner = None

    def _free(self, block: Block, now: float) -> None:
        twin = block.twin
        if twin is not None:
            twin.spares.remove(block)
            block.twin = None
            if not twin.users:  # its children were used through us: it must not be colder than they
                self.idle.refresh(twin, now)
        block.draft_valid = False
        if block.id == self._fresh - 1:
            self._fresh -= 1  # keeps the next prompt's ids next to this one's
        else:
            heapq.heappush(self._holes, block.id)


def _is(block: Block, parent: bytes, before: int, packed: bytes) -> bool:
    """Whether a block found by its key is what was looked for."""
    return block.before == before and block.packed == packed and block.parent == parent


def _nobodys_key() -> bytes:
    """A parent that no lookup can arrive at: what hangs below it stays private."""
    return secrets.token_bytes(prefix.KEY_BYTES)
