"""Put the repository's root on the path, and skip what this machine cannot run.  Starts nothing."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Before anything imports Triton, whichever test comes first: kernels run by its interpreter where
# there is no GPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says nothing on a machine that others use.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a test marked `timed` anew when it fails: one good run shows what the code can do."""
    for item in items:
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=3, reruns_delay=1))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `model` or `gpu` with a sentence that says how to run them."""
    if item.get_closest_marker("model") and (why := _no_model()):
        pytest.skip(f"needs the real SmolLM2: {why}")
    if item.get_closest_marker("gpu") and _no_gpu():
        pytest.skip("needs a CUDA device: run `pytest -m gpu` on a machine that has one")


@functools.cache
def _no_model() -> str:
    from engine.checkpoint import BadCheckpoint, open_checkpoint  # only when a test asks for it

    try:
        open_checkpoint("smollm2")
    except BadCheckpoint as error:
        return str(error)
    return ""


@functools.cache
def _no_gpu() -> bool:
    import torch  # seconds: only when a test asks for it

    return not torch.cuda.is_available()
