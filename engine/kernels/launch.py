"""Enqueue kernels, or only make them ready, on many threads at once.  Writes none.

A first start on a machine has about a hundred kernels to compile, each of which keeps one thread
busy for a sixth of a second, and a stub in C for each kind of launch.  `compiling` turns every
`enqueue` into a request to compile and to load, so that the code that will launch the kernels names
them, and all are made side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial
from threading import Event
from typing import Any

import torch
import triton
from torch import Tensor

from engine.kernels import stubs
from engine.kernels.processes import Task, Workers, described, own_process

MOST_WORKERS = 8  # processes that compile: each imports torch, for seconds,
ENOUGH = 6  # so that many kernels must be missing in Triton's cache before it is worth it

stubs.install()

# What was named within `compiling`; None where kernels are launched.  A thread's own: one may name
# kernels while another one launches some.
_named: ContextVar[set[Hashable] | None] = ContextVar("named", default=None)


def enqueue(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """What to call with the kernel's arguments: its launch, or its compilation."""
    named = _named.get()
    if named is None:
        launch: Callable[..., object] = kernel[grid]
        return launch

    def name(*values: Any, **options: Any) -> None:
        # A model names each kernel once a layer and bucket: thousands of times, and Triton takes
        # a tenth of a millisecond for each as long as the kernel is not there.
        key = (kernel, *map(_kind, values), *((at, _kind(options[at])) for at in options))
        if key not in named:
            named.add(key)
            kernel.warmup(*values, grid=grid, **options)

    return name


def library(x: Tensor, w: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Enqueue x W^T to `out`, plus `residual` (which may be `out`), by torch's own library.

    See kernels/matmul.py for what it gives.  Nothing where launches are only named: there is
    nothing to compile, and perhaps no weight yet.
    """
    if _named.get() is not None:
        return
    if residual is None:
        torch.mm(x, w.t(), out=out)
    elif residual is out:
        out.addmm_(x, w.t())
    else:  # torch copies the residual first
        torch.addmm(residual, x, w.t(), out=out)


@contextmanager
def compiling(
    threads: int, device: torch.device, stop: Event | None = None, missed: Event | None = None
) -> Iterator[None]:
    """Within it this thread's kernels are compiled and not run; all are loaded when it ends.

    On a GPU, that is.  A kernel that cannot be compiled or loaded is passed over here; its launch
    will say why.  `stop`, once set, has everything passed over that was not begun.  So has
    `missed`, which is set when a kernel was not in Triton's cache: for who only wants to load.
    """
    ends = [event for event in (stop, missed) if event is not None]

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of a pool's thread: where its kernels are loaded

    workers = Workers(min(MOST_WORKERS, threads // 2) if own_process() and missed is None else 0)
    with (
        closing(workers),
        ThreadPoolExecutor(threads, initializer=begin) as pool,
        _heard(workers.start, ENOUGH) if missed is None else _heard(missed.set, 1),
        triton.AsyncCompileMode(_Loading(pool, workers, ends), ignore_errors=True),
    ):
        token = _named.set(set())
        try:
            yield
        finally:
            _named.reset(token)


@contextmanager
def _heard(missed: Callable[[], None], enough: int) -> Iterator[None]:
    """Call `missed`, once or more often, when `enough` kernels were not in Triton's cache."""
    before = triton.knobs.compilation.listener
    misses: list[bool] = []

    def listen(*given: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            misses.append(True)  # not a count: several threads do this
            if len(misses) >= enough:
                missed()
        if before is not None:
            before(*given, cache_hit=cache_hit, **more)

    triton.knobs.compilation.listener = listen
    try:
        yield
    finally:
        triton.knobs.compilation.listener = before


class _Loading(Executor):
    """Loads each kernel where it was compiled: that builds the stub which launches it, too."""

    def __init__(self, pool: Executor, workers: Workers, ends: list[Event]) -> None:
        self._pool, self._workers, self._ends = pool, workers, ends
        self._order: list[tuple[str, str]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Compile by `fn`, then load; the future has the kernel."""
        task = described(fn, self._order)
        return self._pool.submit(self._loaded, task, partial(fn, *args, **kwargs))

    def _loaded(self, task: Task | None, compile: Callable[[], Any]) -> Any:
        if any(end.is_set() for end in self._ends):
            raise RuntimeError("the start was given up, or this way of starting")
        if task is not None and self._workers.ready:
            with suppress(Exception):  # compiled here, then
                self._workers.compile(task)
        kernel = compile()
        with suppress(Exception):  # too large for this device, or no C compiler: see `compiling`
            _ = kernel.run  # looking at it loads it
        return kernel


def _kind(value: object) -> Hashable:
    """All of an argument that Triton makes another kernel for, and perhaps more."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    if is_dataclass(value):  # a tensor descriptor
        return type(value), *(_kind(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, list | tuple):
        return type(value), *map(_kind, value)
    return type(value), value
