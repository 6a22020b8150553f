"""Captured graphs by key: run once eagerly, capture, replay from then on.  Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch


class Graphs:
    """One memory pool and one graph a key; without `capture` every body simply runs."""

    def __init__(self, capture: bool) -> None:
        self.capture = capture
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

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

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Do what `body` does: always the same launches for the same key, on fixed addresses.

        The first call of a key runs it, which also compiles kernels, and then captures it; that
        costs tens of milliseconds once.  Call on the stream that all of the step uses.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        body()
        if self.capture:
            self._graphs[key] = self._captured(body)

    def _captured(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): that empties the allocator's cache and collects garbage.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
        return graph
