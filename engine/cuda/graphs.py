"""Captured graphs by key: run once eagerly, capture, replay from then on.  Knows no kernel.

A graph costs memory.  Where none is left, what was to be captured has run all the same: it is
launched kernel by kernel from then on, which is slower and gives the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch

from engine.memory import out_of_memory

log = logging.getLogger("engine.cuda.graphs")


class Graphs:
    """One memory pool and one graph a key; without `capture` every body simply runs."""

    def __init__(self, capture: bool) -> None:
        self.capture = capture
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._refused: set[Hashable] = set()
        self.full = False  # there was no memory for some graph

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    @contextmanager
    def dry(self) -> Iterator[None]:
        """Within it bodies run each time and nothing is captured."""
        capture, self.capture = self.capture, False
        try:
            yield
        finally:
            self.capture = capture

    def run(self, key: Hashable, body: Callable[[], None], *, must: bool = True) -> None:
        """Do what `body` does: always the same launches for the same key, on fixed addresses.

        The first call of a key runs it, which also compiles kernels, and then captures it; that
        costs tens of milliseconds once.  Call on the stream that all of the step uses.
        Raise torch.OutOfMemoryError where a body has no memory to run in; without `must`, which
        says that it is wanted without a graph, too, also where its graph has none.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        body()
        if not self.capture or key in self._refused:
            return
        try:
            self._graphs[key] = self._captured(body)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.full = True
            if not must:
                raise
            self._refused.add(key)
            log.warning("no memory was left for the graph of %s: its kernels are launched one by "
                        "one, which is slower. To have room for it, start with a smaller "
                        "--gpu-memory-utilization", key)

    def _captured(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): that empties the allocator's cache and collects garbage.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with suppress(RuntimeError):  # of half a capture; the reason is what is being raised
                graph.capture_end()
            raise
        graph.capture_end()
        return graph
