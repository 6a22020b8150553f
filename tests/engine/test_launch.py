"""Naming kernels instead of launching them: once each, for this thread, loaded.  Compiles none."""

from __future__ import annotations

import inspect
import os
import threading
import time
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # other tests of the same run interpret kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from triton.runtime._async_compile import active_mode  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from engine.kernels import launch  # noqa: E402
from engine.kernels.launch import compiling, enqueue, library  # noqa: E402

CPU = torch.device("cpu")


class Compiled:
    """What Triton's compiler returns: `run` loads it, and may find that it does not fit."""

    def __init__(self, fits: bool) -> None:
        self.fits = fits
        self.loaded_by = ""

    @property
    def run(self) -> object:
        self.loaded_by = threading.current_thread().name
        if not self.fits:
            raise RuntimeError("out of shared memory")
        return print


class Kernel:
    """A kernel as Triton's: launched by kernel[grid](...), compiled by warmup through the mode."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.launched: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
        self.named: list[tuple[Any, ...]] = []
        self.made: list[Compiled] = []
        self.finished: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *values, **options: self.launched.append((grid, values))

    def warmup(self, *values: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.named.append((*values, *options.items()))

        def compile() -> Compiled:
            if self.fault == "compile":
                raise ValueError("no such instruction")
            self.made.append(Compiled(self.fault != "load"))
            return self.made[-1]

        submit = active_mode.get().submit  # newer ones also want to know what to do on a failure
        more = [print] if "cleanup_fn" in inspect.signature(submit).parameters else []
        submit((id(self), len(self.named)), compile, self.finished.append, *more)


def test_a_kernel_is_named_once_for_what_triton_tells_apart_and_loaded_by_the_pool():
    kernel, x = Kernel(), torch.zeros(64)
    with compiling(2, CPU):
        for _ in range(30):  # layers
            for rows in (1, 2):
                enqueue(kernel, (rows,))(x, rows, 1e-5, BLOCK=64)
        enqueue(kernel, (1,))(x[1:], 1, 1e-5, BLOCK=64)  # at an address that is no multiple of 16
        enqueue(kernel, (1,))(x.double(), 1, 1e-5, BLOCK=64)
        enqueue(kernel, (1,))(x, 1, 1e-5, BLOCK=128)
        enqueue(kernel, (1,))(x, True, 1e-5, BLOCK=64)  # equal to 1, and of another type
        enqueue(kernel, (1,))(torch.zeros(64, device="meta"), 1, 1e-5, BLOCK=64)  # no memory: as x
    assert len(kernel.named) == 6 and not kernel.launched
    assert len(kernel.finished) == 6
    assert all("ThreadPool" in made.loaded_by for made in kernel.made)
    enqueue(kernel, (3,))(x, 1)
    assert [grid for grid, _ in kernel.launched] == [(3,)] and len(kernel.named) == 6


def test_tensor_descriptors_are_told_apart_by_what_they_say():
    kernel, x = Kernel(), torch.zeros(64, 64)
    with compiling(1, CPU):
        for _ in range(3):
            for block in ([16, 16], [16, 32]):
                enqueue(kernel, (1,))(TensorDescriptor.from_tensor(x, block))
        enqueue(kernel, (1,))(TensorDescriptor.from_tensor(x.bfloat16(), [16, 16]))
    assert len(kernel.named) == 3


def test_what_cannot_be_compiled_or_loaded_does_not_stop_the_others():
    kernels = [Kernel("compile"), Kernel("load"), Kernel()]
    with compiling(2, CPU):
        for kernel in kernels:
            enqueue(kernel, (1,))(1)
    assert [len(kernel.finished) for kernel in kernels] == [0, 1, 1]


def test_what_was_not_begun_when_the_start_is_given_up_is_not_compiled():
    kernels, stop = [Kernel() for _ in range(20)], threading.Event()
    stop.set()
    with compiling(2, CPU, stop):
        for kernel in kernels:
            enqueue(kernel, (1,))(1)
    assert all(kernel.named and not kernel.made for kernel in kernels)


class Played:
    """The processes that compile, as `launch` sees them."""

    def __init__(self, count: int) -> None:
        self.count, self.started, self.closed = count, 0, False
        self.tasks: list[object] = []

    @property
    def ready(self) -> bool:
        return self.started > 0

    def start(self) -> None:
        self.started += 1

    def compile(self, task: object) -> None:
        self.tasks.append(task)
        if len(self.tasks) == 2:
            raise TimeoutError("a worker hangs")

    def close(self) -> None:
        self.closed = True


def test_enough_kernels_that_were_not_cached_start_processes_which_get_the_rest(monkeypatch):
    made: list[Played] = []
    monkeypatch.setattr(launch, "Workers", lambda count: made.append(Played(count)) or made[-1])
    monkeypatch.setattr(launch, "described", lambda compile, order: "task")
    monkeypatch.setattr(launch, "own_process", lambda: True)
    heard: list[bool] = []
    told = triton.knobs.compilation

    def listener(*, cache_hit: bool) -> None:
        heard.append(cache_hit)

    monkeypatch.setattr(told, "listener", listener)
    kernels = [Kernel() for _ in range(5)]
    with compiling(2, CPU):
        enqueue(kernels[0], (1,))(1)
        while not kernels[0].made:
            time.sleep(0.01)
        for hit in (True, True, *[False] * (launch.ENOUGH - 1)):
            told.listener(cache_hit=hit)  # Triton says so, from whatever thread compiled
        assert not made[0].started
        told.listener(cache_hit=False)
        for kernel in kernels[1:]:
            enqueue(kernel, (1,))(1)
    assert made[0].tasks == ["task"] * 4 and made[0].closed and made[0].count == 1
    monkeypatch.setattr(launch, "own_process", lambda: False)
    with compiling(2, CPU):
        pass
    assert made[1].count == 0  # none in somebody else's program
    assert all(kernel.finished for kernel in kernels)  # also the one whose worker hung
    assert heard == [True, True, *[False] * launch.ENOUGH] and told.listener is listener


def test_a_kernel_that_was_not_cached_ends_a_loading_that_wanted_no_other(monkeypatch):
    made: list[Played] = []
    monkeypatch.setattr(launch, "Workers", lambda count: made.append(Played(count)) or made[-1])
    monkeypatch.setattr(launch, "own_process", lambda: True)
    told, missed = triton.knobs.compilation, threading.Event()
    kernels = [Kernel() for _ in range(3)]
    with compiling(1, CPU, missed=missed):
        enqueue(kernels[0], (1,))(1)
        while not kernels[0].made:
            time.sleep(0.01)
        told.listener(cache_hit=True)
        assert not missed.is_set()
        told.listener(cache_hit=False)
        for kernel in kernels[1:]:
            enqueue(kernel, (1,))(1)
    assert missed.is_set() and not made[0].started and made[0].count == 0
    assert [len(kernel.made) for kernel in kernels] == [1, 0, 0]
    with compiling(1, CPU):
        for kernel in kernels[1:]:
            enqueue(kernel, (1,))(1)
    assert all(kernel.finished for kernel in kernels)


def test_other_threads_launch_while_one_names():
    kernel = Kernel()
    with compiling(1, CPU):
        other = threading.Thread(target=lambda: enqueue(kernel, (7,))(1))
        other.start()
        other.join()
        enqueue(kernel, (1,))(1)
    assert [grid for grid, _ in kernel.launched] == [(7,)]
    assert len(kernel.named) == 1


def test_a_naming_that_fails_leaves_launching_as_it_was():
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError), compiling(1, CPU):
        print(1 / 0)
    enqueue(kernel, (2,))(1)
    assert [grid for grid, _ in kernel.launched] == [(2,)]


def test_a_library_product_is_computed_or_left_alone():
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    out = torch.full((2, 4), 7.0)
    with compiling(1, CPU):
        library(x, torch.empty(4, 3, device="meta"), out)
        library(x, w, out, out)
    assert out.eq(7.0).all()
    library(x, w, out, out)
    assert torch.allclose(out, 7.0 + x @ w.t())
    library(x, w, out)
    assert torch.equal(out, x @ w.t())
