"""Enqueue kernels, or only make them ready, on many threads at once.  Writes none.

A first start on a machine has about a hundred kernels to compile, each of which keeps one thread
busy for a sixth of a second, and a stub in C for each kind of launch.  `compiling` turns every
`enqueue` into a request to compile and to load, so that the code that will launch the kernels names
them, and all are made side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Event
from typing import Any

import torch
import triton
from torch import Tensor

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


def library(x: Tensor, w: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Enqueue x W^T to `out`, or `add` it, by the library that torch calls; see kernels/matmul.py.

    Nothing where launches are only named: there is nothing to compile, and perhaps no weight yet.
    """
    if _named.get() is not None:
        return
    if add:
        out.addmm_(x, w.t())
    else:
        torch.mm(x, w.t(), out=out)


@contextmanager
def compiling(
    threads: int, device: torch.device, stop: Event | None = None
) -> Iterator[None]:
    """Within it this thread's kernels are compiled and not run; all are loaded when it ends.

    On a GPU, that is.  A kernel that cannot be compiled or loaded is passed over here; its launch
    will say why.  `stop`, once set, has everything passed over that was not begun.
    """
    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of a pool's thread: where its kernels are loaded

    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        with triton.AsyncCompileMode(_Loading(pool, stop or Event()), ignore_errors=True):
            token = _named.set(set())
            try:
                yield
            finally:
                _named.reset(token)


class _Loading(Executor):
    """Loads each kernel where it was compiled: that builds the stub which launches it, too."""

    def __init__(self, pool: Executor, stop: Event) -> None:
        self._pool, self._stop = pool, stop

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Compile by `fn`, then load; the future has the kernel."""
        return self._pool.submit(self._loaded, fn, *args, **kwargs)

    def _loaded(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._stop.is_set():
            raise RuntimeError("the start was given up")
        kernel = fn(*args, **kwargs)
        with suppress(Exception):  # too large for this device, or no C compiler: see `compiling`
            _ = kernel.run  # looking at it loads it
        return kernel


def _kind(value: object) -> Hashable:
    """All of an argument that Triton makes another kernel for, and perhaps more."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    return type(value), value
