"""What the workers of one server know of each other: numbers in shared memory.  Takes no locks.

    engine's | worker 0: places, lag, counters | worker 1: ... |

Each part has one writer: the server's own process writes the engine's, a worker its own.  A number
is eight aligned bytes and is read whole; two numbers may be one update apart.  A worker that is
started again goes on from the counters of the one before, so that no counter ever falls.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from engine.messages import DRAFT_PLACES, DRAFT_SOURCES, Stats
from gateway.counts import Counts

_LISTS = {"draft_sources": 2 * len(DRAFT_SOURCES), "draft_places": DRAFT_PLACES}  # their lengths
_SINGLE = (
    "prompt_tokens", "generated_tokens", "preemptions", "prefix_queries", "prefix_hits", "drafts",
    "drafted_tokens", "accepted_tokens", "closing_refusals", "closing_tokens", "closed_early",
    "unopened", "redrawn",
)  # fmt: skip
# The counters of Stats, by field; those that are lists have a name for each entry.
TOTALS = (*_SINGLE, *(f"{field}.{i}" for field, size in _LISTS.items() for i in range(size)))
_STATS = tuple(field for field in Stats.__struct_fields__ if field not in _LISTS)
_ENGINE = 2 + len(TOTALS) + len(_STATS)  # heard, restarts
_PLACES = 3  # queued, their tokens, open
_LAG = _PLACES  # its place in a worker's part
_COUNTS = _LAG + 1
_WORKER = _COUNTS + len(Counts().flat())
_BYTES = 8


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine as the server's own process sees it: the same for every worker."""

    heard: float  # monotonic seconds, one clock for all processes
    restarts: int
    totals: Mapping[str, int]  # counters by field of Stats, over all engines since the start
    stats: Stats  # of it the gauges: its lists may be left out


def totals_of(stats: Stats) -> list[int]:
    """What an engine counted, in the order of TOTALS."""
    found = [getattr(stats, field) for field in _SINGLE]
    for field, size in _LISTS.items():
        found += (getattr(stats, field) or [0] * size)[:size]
    return found


class Sheet:
    """The shared memory of one server; `fd` goes to its workers."""

    def __init__(self, fd: int, workers: int) -> None:
        self.fd = fd
        self.workers = workers
        memory = mmap.mmap(fd, (_ENGINE + workers * _WORKER) * _BYTES)
        self._numbers = memoryview(memory).cast("d")

    @classmethod
    def make(cls, workers: int) -> Sheet:
        """New memory, all zero (Linux)."""
        fd = os.memfd_create("slipstream-workers")
        os.ftruncate(fd, (_ENGINE + workers * _WORKER) * _BYTES)
        return cls(fd, workers)

    def tell_engine(self, view: EngineView) -> None:
        """Replace the engine's part."""
        self._numbers[:_ENGINE] = array("d", [
            view.heard, view.restarts, *(view.totals[field] for field in TOTALS),
            *(getattr(view.stats, field) for field in _STATS),
        ])  # fmt: skip

    def engine(self) -> EngineView:
        """The engine's part."""
        heard, restarts, *numbers = self._numbers[:_ENGINE].tolist()
        whole = [int(number) for number in numbers]
        counters = dict(zip(TOTALS, whole[: len(TOTALS)], strict=True))
        told = dict(zip(_STATS, whole[len(TOTALS) :], strict=True))
        stats = msgspec.structs.replace(Stats(), **told)
        return EngineView(heard, int(restarts), counters, stats)

    def part(self, worker: int) -> memoryview[float]:
        """A worker's numbers."""
        assert 0 <= worker < self.workers, f"there is no worker {worker}"
        start = _ENGINE + worker * _WORKER
        return self._numbers[start : start + _WORKER]

    def bury(self, worker: int) -> None:
        """A worker died: it holds no places any more; what it counted stays."""
        self.part(worker)[:_COUNTS] = array("d", [0.0] * _COUNTS)

    @property
    def open(self) -> int:
        """Requests that are open at any worker."""
        return int(sum(self.part(worker)[2] for worker in range(self.workers)))


class Share:
    """One worker's part of the sheet, and what the others wrote."""

    def __init__(self, sheet: Sheet, worker: int) -> None:
        self._own = sheet.part(worker)
        self._others = [sheet.part(one) for one in range(sheet.workers) if one != worker]
        self._sheet = sheet

    def tell_places(self, queued: int, queued_tokens: int, open_requests: int) -> None:
        """What of the server's limits this worker's requests take."""
        own = self._own
        own[0], own[1], own[2] = queued, queued_tokens, open_requests

    def places_elsewhere(self) -> tuple[int, int, int]:
        """The same of all other workers together."""
        queued = tokens = opened = 0.0
        for part in self._others:
            queued, tokens, opened = queued + part[0], tokens + part[1], opened + part[2]
        return int(queued), int(tokens), int(opened)

    def tell_counts(self, counts: Counts, lag_s: float) -> None:
        """What this worker has counted, and by how much its event loop is late."""
        self._own[_LAG:] = array("d", [lag_s, *counts.flat()])

    def counted_before(self, counts: Counts) -> None:
        """Add what the worker before this one had counted."""
        counts.add(self._own[_COUNTS:].tolist())

    def server_counts(self) -> tuple[Counts, float]:
        """What all workers have counted, and the largest lag of an event loop in seconds."""
        total, parts = Counts(), [self._own, *self._others]
        for part in parts:
            total.add(part[_COUNTS:].tolist())
        return total, max(part[_LAG] for part in parts)

    def engine(self) -> EngineView:
        """The engine, as every worker sees it."""
        return self._sheet.engine()
