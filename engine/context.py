"""Open a GPU's context while torch is still being imported.  Runs nothing on it, needs no torch.

The driver's start takes some tenths of a second, on hosts of many GPUs seconds.  It holds no lock
of Python's, so a thread can do it beside the imports; torch then finds the context open.
"""

from __future__ import annotations

import ctypes
import os
import threading

from engine.timeline import Timeline

LIBRARY = "libcuda.so.1"


def open_beside(device: str, timeline: Timeline) -> threading.Thread | None:
    """Begin to open the context that a config's `device` (auto, cuda, cpu) may want.

    `timeline` gets a span for it.  Whatever goes wrong, torch will meet it again and say so.
    """
    if device == "cpu":
        return None
    thread = threading.Thread(
        target=timeline.run, args=("context", open_context), name="context", daemon=True
    )
    thread.start()
    return thread


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
