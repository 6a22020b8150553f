"""Choose which idle block leaves: two recency queues, soft pins, demotion.  Knows no tokens.

    in use --> [ other | tool ] <--> pinned      victim: demoted; then by weighted age; then pinned

The next request after a tool call comes within seconds, after anything else within minutes.  So a
block of a tool turn is kept 4 times as long as others (plus 30 s), and is pinned over the gap that
its session is known for.  A pin only reorders: when nothing else is left, pinned blocks leave too.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

OTHER: Final = 0
TOOL: Final = 1
PINNED: Final = 2
NOWHERE: Final = 3  # in use, or free

TOOL_WEIGHT = 4.0  # a tool block goes first only when older than 4 x the other head's age ...
TOOL_SLACK_S = 30.0  # ... plus this


class Entry:
    """What eviction keeps about one block."""

    __slots__ = ("id", "lives", "order", "pins", "place", "stamp", "time", "warm")

    def __init__(self, id: int) -> None:
        self.id = id
        self.lives = 0  # how often it has left the cache: tells its contents apart
        self.place = NOWHERE
        self.warm = False  # its last turn ended in a tool call
        self.pins = 0  # live pins that hold it
        self.time = 0.0  # seconds on the clock when it was last used; -inf = demoted
        self.order = 0  # among equal times: the lower leaves first
        self.stamp = 0  # of its valid queue item; older items are dead


class Pin:
    """One soft pin: a chain held back from eviction until `until`; dead once lifted."""

    __slots__ = ("entries", "live", "number", "until")

    def __init__(self, number: int, until: float, entries: list[tuple[Entry, int]]) -> None:
        self.number = number  # pins are given way in this order
        self.until = until  # seconds on the clock
        self.entries = entries  # with the lives each had: a block reused since is not ours
        self.live = True


_Item = tuple[float, int, int, Entry]


class Eviction:
    """The idle published blocks, coldest first.  Every operation costs O(log n), amortised."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: tuple[list[_Item], list[_Item], list[_Item]] = ([], [], [])
        self._sizes = [0, 0, 0]
        self._count = 0  # of uses, pins and pushes: gives orders, numbers and stamps
        self._pins: OrderedDict[int, Pin] = OrderedDict()  # live ones, oldest first
        self._expiry: list[tuple[float, int, Pin]] = []
        self.pinned = 0  # blocks with at least one live pin, in use or not

    def __len__(self) -> int:
        return sum(self._sizes)

    def add(self, entry: Entry, now: float, warm: bool) -> None:
        """A block lost its last user at `now`.  Its class only rises here; `settle` lowers it."""
        assert entry.place == NOWHERE, f"block {entry.id} became idle twice"
        entry.time, entry.order = now, self._next()
        entry.warm = entry.warm or warm
        self._enter(entry)

    def refresh(self, entry: Entry, now: float) -> None:
        """An idle block was as good as used at `now`."""
        self.remove(entry)
        self.add(entry, now, entry.warm)

    def remove(self, entry: Entry) -> None:
        """The block is in use again; its pins stay."""
        assert entry.place != NOWHERE, f"block {entry.id} is not idle"
        self._sizes[entry.place] -= 1
        entry.place = NOWHERE

    def forget(self, entry: Entry) -> None:
        """The idle block leaves the cache, pins and all."""
        self.remove(entry)
        self.pinned -= entry.pins > 0
        entry.pins = 0
        entry.warm = False
        entry.lives += 1

    def settle(self, entry: Entry, warm: bool) -> None:
        """The block's last turn ended: `warm` after a tool call.  Keeps its age."""
        if entry.warm != warm:
            entry.warm = warm
            self._move(entry)

    def demote(self, entry: Entry) -> None:
        """Send an idle unpinned block to the front of the line, behind those demoted before it."""
        assert entry.place != NOWHERE and not entry.pins, f"block {entry.id} cannot be demoted"
        entry.warm = False
        entry.time, entry.order = -math.inf, self._next()
        self._move(entry)

    def pop(self) -> Entry:
        """Remove and return the block to evict; there must be one."""
        self.expire()
        victim = self._victim()
        self.forget(victim)
        return victim

    def pin(self, entries: Sequence[Entry], until: float, most: int) -> Pin:
        """Hold a chain (head first) back until `until`; at most `most` blocks are pinned in all.

        Older pins give way first; a chain longer than `most` has only its head pinned.
        """
        held = entries[:most]
        pin = Pin(self._next(), until, [(entry, entry.lives) for entry in held])
        for entry in held:
            entry.pins += 1
            entry.warm = True
            if entry.pins == 1:
                self.pinned += 1
                self._move(entry)
        self._pins[pin.number] = pin
        heapq.heappush(self._expiry, (until, pin.number, pin))
        while self.pinned > most:
            self.unpin(next(iter(self._pins.values())))
        return pin

    def unpin(self, pin: Pin) -> None:
        """Lift a pin: its blocks go back to where their age puts them in the tool queue."""
        if not pin.live:
            return
        pin.live = False
        del self._pins[pin.number]
        for entry, lives in pin.entries:
            if entry.lives == lives:
                entry.pins -= 1
                if not entry.pins:
                    self.pinned -= 1
                    self._move(entry)
        pin.entries.clear()

    def expire(self) -> None:
        """Lift the pins whose time is over."""
        now = self._clock()
        while self._expiry and (self._expiry[0][0] <= now or not self._expiry[0][2].live):
            self.unpin(heapq.heappop(self._expiry)[2])

    def check(self, entries: Sequence[Entry]) -> None:
        """Assert every invariant; `entries` are all blocks there are."""
        sizes, pinned = [0, 0, 0, 0], 0
        for entry in entries:
            sizes[entry.place] += 1
            pinned += entry.pins > 0
            belongs = PINNED if entry.pins else TOOL if entry.warm else OTHER
            assert entry.place in (NOWHERE, belongs), f"block {entry.id} is in the wrong queue"
        assert sizes[:3] == self._sizes, f"queues hold {self._sizes}, blocks say {sizes[:3]}"
        for place, queue in enumerate(self._queues):
            alive = sum(entry.place == place and entry.stamp == s for _, _, s, entry in queue)
            assert alive == sizes[place], f"queue {place} has {alive} live of {sizes[place]}"
        assert pinned == self.pinned, f"{pinned} blocks are pinned, {self.pinned} counted"
        pins: Counter[int] = Counter()
        for pin in self._pins.values():
            pins.update(entry.id for entry, lives in pin.entries if entry.lives == lives)
        assert all(entry.pins == pins[entry.id] for entry in entries), "a pin was lost or kept"

    def _victim(self) -> Entry:
        tool, other = self._head(TOOL), self._head(OTHER)
        if tool is None or other is None:
            victim = tool or other or self._head(PINNED)
            assert victim is not None, "eviction from an empty cache"
            return victim
        now = self._clock()
        older = now - tool.time > TOOL_WEIGHT * (now - other.time) + TOOL_SLACK_S
        return tool if older else other

    def _head(self, place: int) -> Entry | None:
        queue = self._queues[place]
        while queue:
            _, _, stamp, entry = queue[0]
            if entry.place == place and entry.stamp == stamp:
                return entry
            heapq.heappop(queue)
        return None

    def _move(self, entry: Entry) -> None:
        """Requeue an idle block after its class, pins or age changed."""
        if entry.place != NOWHERE:
            self.remove(entry)
            self._enter(entry)

    def _enter(self, entry: Entry) -> None:
        place = entry.place = PINNED if entry.pins else TOOL if entry.warm else OTHER
        queue = self._queues[place]
        self._sizes[place] += 1
        self._count = stamp = entry.stamp = self._count + 1
        heapq.heappush(queue, (entry.time, entry.order, stamp, entry))
        if len(queue) > 2 * self._sizes[place] + 64:  # mostly dead items: they must not pile up
            queue[:] = [i for i in queue if i[3].place == place and i[3].stamp == i[2]]
            heapq.heapify(queue)

    def _next(self) -> int:
        self._count += 1
        return self._count
