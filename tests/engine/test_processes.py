"""Kernels compiled by other processes: what they wrote is found.  Loads none, needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():  # other tests of the same run interpret kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.kernels.processes import Task, Workers, described, own_process

ROOT = Path(__file__).parent.parent.parent

# In a process of its own, for here Triton may be set to interpret.
SCRIPT = """
import time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.kernels.norm import _norm
from engine.kernels.processes import Workers, described
from engine.kernels.sampler_score import _pick

TARGET = GPUTarget("cuda", 90, 32)
NORM = {"x": "*bf16", "picked": "*bf16", "gain": "*bf16", "out": "*bf16", "width": "i32",
        "eps": "fp32", "PICKED": "constexpr", "BLOCK": "constexpr", "OVERLAP": "constexpr"}
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **more: hits.append(cache_hit)

def asked(block):
    src = ASTSource(_norm, NORM, {"PICKED": False, "BLOCK": block, "OVERLAP": 0}, {})
    target = TARGET
    options = type("Options", (), {})()
    options.num_warps = 4
    return lambda: triton.compile(src, target=target, options=options.__dict__)

if __name__ == "__main__":
    _ = _pick.cache_key  # calls what others call: keys must be computed in the same order
    order = [("engine.kernels.sampler_score", "_pick")]
    workers = Workers(1)
    workers.start()
    while not workers.ready:
        time.sleep(0.05)
    for block in (64, 128):
        compile = asked(block)
        workers.compile(described(compile, order))
        compile()
    asked(256)()
    workers.close()
    print(hits, len(order))
"""


def test_what_a_worker_compiled_is_found_in_the_cache(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                   "HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120,
    )
    assert ended.stdout == "[True, True, False] 2\n", ended.stderr[-2000:]


def test_a_closure_that_is_not_as_we_know_it_is_left_to_its_owner():
    order: list[tuple[str, str]] = []
    src = SimpleNamespace(fn=None)
    assert described(lambda: None, order) is None
    assert described(lambda: src, order) is None
    assert not order


def test_only_the_main_module_of_an_engine_is_imported_by_workers(monkeypatch):
    """A user's script without a guard would start another engine in each worker."""
    assert not own_process()
    main = sys.modules["__main__"]
    for name, ours in (("engine.server", True), ("slipstream", False), ("script", False)):
        monkeypatch.setattr(main, "__spec__", SimpleNamespace(name=name), raising=False)
        assert own_process() is ours
    monkeypatch.setattr(main, "__spec__", None)
    assert not own_process()


def test_no_process_is_started_where_there_are_no_cores_for_it():
    workers = Workers(0)
    workers.start()
    assert not workers.ready
    workers.close()


def broken() -> None:
    raise OSError("no such thing")


def test_a_worker_that_cannot_begin_fails_its_tasks_and_keeps_nobody(monkeypatch):
    workers = Workers(1)
    monkeypatch.setattr("engine.kernels.processes._begin", broken)
    workers.start()
    task = Task("os", "path", {}, {}, {}, (), {}, [])
    with pytest.raises(Exception, match=r"terminated|initializer"):
        workers.compile(task)
    assert workers.ready  # nobody waits for it: the next asks, and fails at once
    workers.close()
