"""Compile kernels in other processes.  Loads none, launches none, and starts late.

Triton turns a kernel's Python into its first form under Python's lock, so the 150 of a first start
keep one core busy for seconds, however many threads ask.  A worker has a lock of its own and
writes what it compiled to Triton's cache on disk, where the one who asked finds it.  Whatever goes
wrong in a worker costs time only: who asked compiles what it does not find.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from threading import Lock
from typing import Any, NamedTuple

PATIENCE_S = 60.0  # for one kernel; then it is compiled where it was asked for


class Task(NamedTuple):
    """A kernel in words that another process understands."""

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: tuple[Any, ...]  # of a GPUTarget
    options: dict[str, Any]
    order: list[tuple[str, str]]  # kernels as they were first named, this one among them


def described(compile: Callable[..., Any], order: list[tuple[str, str]]) -> Task | None:
    """What Triton's `compile` closure is about to compile; None when it is not as we know it.

    `order` gains the kernel's module and name: a kernel's key in Triton's cache depends on which
    kernels had theirs computed before, when they call the same functions.
    """
    try:
        known = inspect.getclosurevars(compile).nonlocals
        source, target = known["src"], known["target"]
        which = source.fn.fn.__module__, source.fn.fn.__name__
        if which not in order:
            order.append(which)
        return Task(
            *which, source.signature, source.constants, source.attrs,
            (target.backend, target.arch, target.warp_size), dict(known["options"].__dict__),
            list(order),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):
        return None


def own_process() -> bool:
    """Whether this is an engine's own process: workers import its main module, and may do so.

    A program that uses the library is somebody else's: imported again, it would run again.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "engine.server"


class Workers:
    """Up to `count` processes; none before `start`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._first: list[Future[None]] = []

    @property
    def ready(self) -> bool:
        """Some worker is up: it has imported what takes seconds."""
        return any(first.done() for first in self._first)

    def start(self) -> None:
        """Begin to start them, once; from any thread.

        They end at the latest with the thread that called, so that none outlives a killed engine.
        """
        with self._lock:
            if self._pool is not None or not self._count:
                return
            self._pool = ProcessPoolExecutor(
                self._count, get_context("spawn"), _begin, (os.getpid(),)
            )
            self._first = [self._pool.submit(_stand_by) for _ in range(self._count)]

    def compile(self, task: Task) -> None:
        """Return when the task is in Triton's cache; raise whatever prevented that."""
        assert self._pool is not None, "no worker was started"
        self._pool.submit(compile_task, task).result(PATIENCE_S)

    def close(self) -> None:
        """Have them end; waits for none."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _begin(parent: int) -> None:
    """In a worker, first of all: no GPU is opened, and everything is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from engine.parent import die_with_parent

    die_with_parent(parent)
    import_module("triton")
    import_module("torch")


def _stand_by() -> None:
    """Show that a worker is up."""


def compile_task(task: Task) -> None:
    """In a worker: compile into Triton's cache; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for module, name in task.order:
        _ = getattr(import_module(module), name).cache_key  # looking at it computes it
    kernel = getattr(import_module(task.module), task.name)
    source = ASTSource(kernel, task.signature, task.constants, task.attributes)
    triton.compile(source, target=GPUTarget(*task.target), options=task.options)
