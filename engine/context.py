"""Open a GPU's context and load torch's libraries beside the imports.  Runs nothing on a GPU.

The driver's start takes some tenths of a second, on hosts of many GPUs seconds; the libraries as
long.  Neither holds a lock of Python's, as `import torch` does while it loads them, so threads can
do both while this one reads the tokenizer; torch then finds them there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path

from engine.timeline import Timeline

LIBRARY = "libcuda.so.1"
# As torch loads them itself, in this order; not those that call Python.
TORCH = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_NOW))


def open_beside(device: str, timeline: Timeline) -> threading.Thread | None:
    """Begin to open the context that a config's `device` (auto, cuda, cpu) may want.

    `timeline` gets a span for it.  Whatever goes wrong, torch will meet it again and say so.
    """
    if device == "cpu":
        return None
    return _beside("context", open_context, timeline)


def load_beside(timeline: Timeline) -> threading.Thread:
    """Begin to load the libraries that `import torch` will want; the same holds."""
    return _beside("libraries", load_libraries, timeline)


def _beside(name: str, work: Callable[[], object], timeline: Timeline) -> threading.Thread:
    thread = threading.Thread(target=timeline.run, args=(name, work), name=name, daemon=True)
    thread.start()
    return thread


def load_libraries() -> int:
    """Load torch's libraries for this process; how many there were."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return 0
    # Not ctypes.CDLL(path): that keeps Python's lock meanwhile.
    try:
        load = ctypes.CDLL(None).dlopen
    except (OSError, TypeError, AttributeError):  # not a system with dlopen
        return 0
    load.restype = ctypes.c_void_p
    for count, (name, how) in enumerate(TORCH):
        path = Path(found.origin).parent / "lib" / name
        if load(os.fsencode(path), how) is None:
            return count
    return len(TORCH)


def open_context(ordinal: int = 0) -> bool:
    """Open the primary context of a visible GPU and keep it to the process's end.

    That is the one that torch uses.  False where there is no driver or no such GPU.
    """
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    # Torch sets this before it calls the driver, which reads it once: kernels are loaded when used.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return bool(
        cuda.cuInit(0) == 0
        and cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )
