"""What the doctor says about GPUs, drivers and kernel caches.  Needs none of them."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # other tests of the same run interpret kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import engine.cuda.picks  # noqa: F401  before a GPU is played: it looks at the real one
from engine import doctor

VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (x)
GCC version:  gcc version 12.3.0
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """No GPU, no driver, an empty kernel cache; tests add what they need."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    seen(monkeypatch, 0)


def seen(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (139_000_000_000, 150 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Card {number}")


def test_without_a_gpu_one_plain_line_says_so(tmp_path):
    assert list(doctor._gpus()) == [("GPU", "none: CPU is served", True)]
    (tmp_path / "version").write_text(VERSION)
    ((_, value, _),) = doctor._gpus()
    assert "driver 580.82.07 is loaded, but torch sees no GPU" in value


def test_each_gpu_has_a_line_with_what_an_issue_needs(monkeypatch, tmp_path):
    (tmp_path / "version").write_text(VERSION)
    seen(monkeypatch, 2)
    first, second = doctor._gpus()
    assert first == ("GPU 0", "Card 0, compute capability 9.0, 139.0 GB free of 150.0 GB, "
                     "driver 580.82.07", True)
    assert second[:1] == ("GPU 1",)


def test_a_gpu_that_cannot_be_used_is_a_finding_and_the_others_are_told(monkeypatch):
    seen(monkeypatch, 2)

    def broken(number: int) -> tuple[int, int]:
        if number == 0:
            raise RuntimeError("CUDA error: device lost\nCompile with ...")
        return 1, 2

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    first, second = doctor._gpus()
    assert first == ("GPU 0", "cannot be used: CUDA error: device lost", False)
    assert second[2]


def test_the_cuda_build_of_torch_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "built for CUDA 13.0" in doctor._torch()[1]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in doctor._torch()[1]


def test_the_kernel_cache_is_told_empty_full_or_closed(monkeypatch, tmp_path):
    assert "is empty: the first start compiles" in doctor._triton()[1]
    folder = tmp_path / "cache"
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        (folder / name / "kernel.cubin").write_bytes(b"x" * 1_000_000)
    assert f"cache {folder}: 2 entries, 2.0 MB" in doctor._triton()[1]
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "not writable: set TRITON_CACHE_DIR" in doctor._triton()[1]
    assert doctor._triton()[2]  # without a GPU nothing is compiled
    seen(monkeypatch, 1)
    assert not doctor._triton()[2]


def test_triton_and_its_compiler_are_missed_only_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor._triton()[2]
    seen(monkeypatch, 1)
    name, value, fine = doctor._triton()
    assert (name, fine) == ("triton", False)
    assert "no C compiler" in value
    monkeypatch.setenv("CC", "/opt/cc")
    assert doctor._triton()[2]

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", absent)
    assert doctor._triton() == ("triton", "not installed: pip install triton", False)
    seen(monkeypatch, 0)
    assert doctor._triton() == ("triton", "not installed (only a GPU needs it)", True)


def test_the_choice_of_kernels_is_told_where_a_gpu_needs_it(monkeypatch, tmp_path):
    assert list(doctor._picks()) == []
    seen(monkeypatch, 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "slipstream" / "picks.json"
    assert list(doctor._picks()) == [
        ("picks", f"{path} is not there: the first start measures kernels", True)]
    path.parent.mkdir()
    path.write_text(json.dumps({"device": "x", "picks": [[1], [2], [3]]}))
    assert list(doctor._picks()) == [
        ("picks", f"{path}: 3 kernels chosen by what was measured", True)]
    for damaged in ("{", "[]", "{}", '{"picks": 3}'):
        path.write_text(damaged)
        ((_, value, fine),) = doctor._picks()
        assert "cannot be read" in value and not fine


def test_the_whole_report_raises_nothing_and_holds_the_new_lines(tmp_path):
    rows = {name: (value, fine) for name, value, fine in doctor.report(str(Path(tmp_path) / "no"))}
    assert rows["GPU"] == ("none: CPU is served", True)
    assert {"torch", "triton", "memory", "CPU"} <= set(rows)
