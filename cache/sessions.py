"""Remember sessions: their gaps, pins and private blocks.  Never decides what a request may read.

A session's request arrives (`touch`), its sequence finishes (`turn`), the gateway says how that
turn ended (`turn_ended`), and one day that the session is over (`ended`).  Only `touch` makes a
row, so what comes late for an ended session finds none and changes nothing.  Losing a row costs
speed, nothing else.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from cache.blocks import Block, BlockPool, Owner
from cache.config import CacheConfig
from cache.eviction import NOWHERE, Pin

GAP_WEIGHT = 0.3  # of the newest gap in the moving average
PIN_GAPS = 3.0  # a pin lasts so many usual gaps: covers the p90 of measured tool gaps
OPEN_TURNS = 1024  # finished turns whose end may still be named by the gateway
BRANCHES = 8  # chains of one session that are open, or pinned: as many as a request has choices

_Chain = list[tuple[Block, int]]  # with the lives each had: a block reused since is not ours


class Session(Owner):
    """One session's row; owns the blocks that no other session has used."""

    __slots__ = ("gap_s", "key", "pins", "requests", "used_at", "waiting_since")

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self.key = key
        self.requests = 0
        self.used_at = 0.0  # seconds on the clock
        self.waiting_since: float | None = None  # its last turn ended then, in a tool call
        self.gap_s: float | None = None  # moving average from a tool call to the next request
        self.pins: list[Pin] = []  # one a branch, the newest last; some may be over


class SessionTable:
    """All sessions of one engine, least recently used first; bounded in rows, time and memory."""

    def __init__(
        self, pool: BlockPool, config: CacheConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._config = config.check()
        self._clock = clock
        self._pin_limit = int(config.pin_share * pool.total)  # blocks
        self._rows: OrderedDict[bytes, Session] = OrderedDict()
        self._open: OrderedDict[bytes, list[_Chain]] = OrderedDict()  # turns not named yet
        self._pinners: dict[bytes, Session] = {}  # rows with pins, some of which may be over

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def pinned(self) -> int:
        """Sessions that hold a pin now."""
        self._pool.idle.expire()
        for key in [k for k, row in self._pinners.items() if not any(p.live for p in row.pins)]:
            del self._pinners[key]
        return len(self._pinners)

    def touch(self, key: bytes) -> Session:
        """A request of the session arrived: learn its gap; return its row, new if need be."""
        now = self._clock()
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Session(key)
        self._rows.move_to_end(key)
        row.requests += 1
        row.used_at = now
        if row.waiting_since is not None:
            # A gap beyond the longest pin teaches no more than one as long as it.
            gap = min(now - row.waiting_since, self._config.pin_max_s)
            old = gap if row.gap_s is None else row.gap_s
            row.gap_s = old + GAP_WEIGHT * (gap - old)
            row.waiting_since = None
        self._drop_old(now)
        return row

    def turn(self, key: bytes | None, blocks: Sequence[Block]) -> None:
        """A sequence of the session finished with these blocks, head first; call before `release`.

        One turn may have several (choices, sub-agents).  `key` None: a request of no session,
        which only makes the blocks that it used shared.
        """
        chain = self._pool.resident(blocks)
        row = self._rows.get(key) if key is not None else None
        self._pool.claim(chain, row)
        if key is None or row is None:
            return
        for pin in row.pins:
            if _continues(chain, pin):  # held for the request that has just been answered
                self._pool.idle.unpin(pin)
        branches = self._open.setdefault(key, [])
        branches.append([(block, block.lives) for block in chain])
        del branches[:-BRANCHES]
        self._open.move_to_end(key)
        if len(self._open) > OPEN_TURNS:
            self._open.popitem(last=False)

    def turn_ended(self, key: bytes, tool_call: bool) -> None:
        """The turn that just finished ended; after a tool call it is pinned over the usual gap."""
        row = self._rows.get(key)
        if row is None:
            return
        chains = [_alive(chain) for chain in self._open.pop(key, [])]
        row.waiting_since = self._clock() if tool_call else None
        if tool_call and self._pin_limit:
            self._pin(row, chains)  # first, so that most blocks change queue only once
        for chain in chains:
            for block in chain:
                if tool_call or not block.shared:  # on shared ones a tool session may still count
                    self._pool.idle.settle(block, warm=tool_call)

    def ended(self, key: bytes) -> None:
        """The session is over: what it alone used leaves next, tails first; shared blocks stay."""
        row = self._rows.pop(key, None)
        self._open.pop(key, None)
        if row is None:
            return
        self._unpin(row)
        for block in self._pool.disown(row):  # what another stream still uses just ages
            if block.place != NOWHERE and not block.pins:
                self._pool.idle.demote(block)

    def check(self) -> None:
        """Assert every invariant of the table and its pool."""
        self._pool.check()
        assert len(self._rows) <= self._config.max_sessions
        assert len(self._open) <= OPEN_TURNS and self._open.keys() <= self._rows.keys()
        assert all(0 < len(chains) <= BRANCHES for chains in self._open.values())
        assert self._pool.idle.pinned <= self._pin_limit, "pins hold more than their share"
        owned = 0
        for key, row in self._rows.items():
            assert row.key == key and (row.gap_s is None or row.gap_s >= 0)
            for id, block in row.blocks.items():
                assert block.id == id and block.owner is row and not block.shared
            owned += len(row.blocks)
        assert owned <= self._pool.total

    def _pin_s(self, row: Session) -> float:
        config = self._config
        if row.gap_s is None:
            return config.pin_default_s
        return min(max(PIN_GAPS * row.gap_s, config.pin_min_s), config.pin_max_s)

    def _pin(self, row: Session, chains: list[list[Block]]) -> None:
        """Pin each chain that is left; the branches pinned longest ago give way."""
        until = self._clock() + self._pin_s(row)
        idle = self._pool.idle
        row.pins += [idle.pin(chain, until, self._pin_limit) for chain in chains if chain]
        live = [pin for pin in row.pins if pin.live]
        for pin in live[:-BRANCHES]:
            idle.unpin(pin)
        row.pins = live[-BRANCHES:]
        self._pinners[row.key] = row

    def _unpin(self, row: Session) -> None:
        for pin in row.pins:
            self._pool.idle.unpin(pin)
        row.pins.clear()
        self._pinners.pop(row.key, None)

    def _drop_old(self, now: float) -> None:
        """Forget rows that are idle for too long or too many; their blocks just age."""
        while self._rows:
            row = next(iter(self._rows.values()))
            idle = now - row.used_at > self._config.session_idle_s
            if not idle and len(self._rows) <= self._config.max_sessions:
                return
            del self._rows[row.key]
            self._open.pop(row.key, None)
            self._unpin(row)
            self._pool.disown(row)


def _alive(chain: _Chain) -> list[Block]:
    """The blocks of a chain that are still what they were, head first."""
    return [block for block, lives in chain if block.lives == lives]


def _continues(chain: list[Block], pin: Pin) -> bool:
    """Whether a chain begins with all that a pin holds."""
    last = len(pin.entries) - 1
    return 0 <= last < len(chain) and chain[last] is pin.entries[last][0]
