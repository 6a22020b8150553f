"""Enqueue kernels, or only compile them, on many threads at once.  Knows none of them.

A first start on a machine has about a hundred kernels to compile, each of which keeps one thread
busy for half a second.  `compiling` turns every `enqueue` into a request to compile, so that the
code that will launch them names them, and all are compiled side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton

_only_compile = False


def enqueue(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """What to call with the kernel's arguments: its launch, or its compilation."""
    if _only_compile:
        return partial(kernel.warmup, grid=grid)
    launch: Callable[..., object] = kernel[grid]
    return launch


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Within it kernels are compiled and not run; everything is compiled when it ends.

    A kernel that cannot be compiled is passed over here; its launch will say why.
    """
    global _only_compile
    with (
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        _only_compile = True
        try:
            yield
        finally:
            _only_compile = False
