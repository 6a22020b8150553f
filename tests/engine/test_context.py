"""Opening a GPU's context early: the driver's calls in order, nothing where there is none.

The driver is played; whether torch takes the context over is seen on a card.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import context
from engine.context import load_beside, load_libraries, open_beside, open_context
from engine.timeline import Timeline


class Driver:
    """libcuda: records calls; `broken` gives an error."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[tuple[object, ...]] = []

    def _did(self, name: str, *values: object) -> int:
        self.calls.append((name, *values))
        return 100 if name == self.broken else 0

    def cuInit(self, flags: int) -> int:
        return self._did("init", flags)

    def cuDeviceGet(self, device, ordinal: int) -> int:
        device._obj.value = 7
        return self._did("get", ordinal)

    def cuDevicePrimaryCtxRetain(self, found, device) -> int:
        return self._did("retain", device.value)


def play(monkeypatch, driver: Driver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)


def test_the_context_of_the_first_gpu_is_kept(monkeypatch):
    driver = Driver()
    play(monkeypatch, driver)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")  # both: what is set here is undone
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    assert open_context()
    assert driver.calls == [("init", 0), ("get", 0), ("retain", 7)]
    assert context.os.environ["CUDA_MODULE_LOADING"] == "LAZY"


@pytest.mark.parametrize(("broken", "calls"), [("init", 1), ("get", 2), ("retain", 3)])
def test_a_driver_that_fails_is_asked_no_further(monkeypatch, broken, calls):
    driver = Driver(broken)
    play(monkeypatch, driver)
    assert not open_context()
    assert len(driver.calls) == calls


def test_a_machine_without_a_driver_has_no_context(monkeypatch):
    monkeypatch.setattr(context, "LIBRARY", "libno-such-driver.so.1")
    assert not open_context()


def test_it_is_opened_beside_the_imports_unless_a_cpu_is_asked_for(monkeypatch):
    driver, timeline = Driver(), Timeline()
    play(monkeypatch, driver)
    assert open_beside("cpu", timeline) is None
    for device in ("auto", "cuda"):
        thread = open_beside(device, timeline)
        assert thread is not None and thread.daemon
        thread.join(10)
    assert [span.name for span in timeline.spans()] == ["context"] * 2
    assert len(driver.calls) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a real driver")
def test_torch_works_in_a_context_that_was_open_before():
    assert open_context()
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert not open_context(64)


def test_torchs_libraries_are_loaded_beside_and_torch_works_with_them():
    code = """
import sys
from engine.context import load_beside
from engine.timeline import Timeline
timeline = Timeline()
load_beside(timeline).join()
assert "torch" not in sys.modules and "libtorch_cpu" in open("/proc/self/maps").read()
import torch
print([span.name for span in timeline.spans()], (torch.ones(3) @ torch.ones(3)).item())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent.parent,
                          capture_output=True, text=True, timeout=60)
    assert done.stdout == "['libraries'] 3.0\n", done.stderr


def test_libraries_that_are_not_there_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(context, "TORCH", (("libno-such.so", 2), ("libtorch.so", 2)))
    assert load_libraries() == 0
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert load_libraries() == 0
    timeline = Timeline()
    load_beside(timeline).join(10)
    assert [span.name for span in timeline.spans()] == ["libraries"]
