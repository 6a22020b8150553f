"""`slipstream doctor`: what this machine has and what it lacks, for an issue.  Changes nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from engine.checkpoint import open_checkpoint
from engine.model_config import BadCheckpoint
from engine.threads import cores

Row = tuple[str, str, bool]  # what, value, fine
LIBRARIES = ("tokenizers", "llguidance", "safetensors", "msgspec", "starlette", "uvicorn")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
PORT = 8000
NEEDS_GB = 2.0


def report(model: str) -> Iterator[Row]:
    """Every finding, one after the other; nothing raises."""
    yield "Python", f"{platform.python_version()} on {platform.platform()}", True
    yield _torch()
    for library in LIBRARIES:
        yield _library(library)
    yield _cpu()
    yield _memory()
    yield _disk()
    yield _port(PORT)
    yield _model(model)


def _torch() -> Row:
    if importlib.util.find_spec("torch") is None:
        return "torch", "not installed: pip install torch", False
    import torch  # late: takes seconds, and everything else works without

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = ", ".join(gpus) or "no GPU (CPU is served)"
    return "torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {found}", True


def _library(name: str) -> Row:
    try:
        return name, metadata.version(name), True
    except metadata.PackageNotFoundError:
        return name, f"not installed: pip install {name}", False


def _cpu() -> Row:
    usable = len(cores())
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "CPU", f"{platform.processor()}, {usable} usable cores", True
    facts: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    flags = facts.get("flags", "").split()
    has = " ".join(flag for flag in FLAGS if flag in flags) or "none of " + " ".join(FLAGS)
    return "CPU", f"{facts.get('model name', '?')}, {usable} usable cores, {has}", True


def _memory() -> Row:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return "memory", f"{free:.1f} GB free of {total:.1f} GB", free >= NEEDS_GB


def _disk() -> Row:
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    writable = os.access(folder, os.W_OK)
    state = "" if writable else ", not writable: set XDG_CACHE_HOME"
    return "cache folder", f"{folder}: {free:.1f} GB free{state}", writable and free >= NEEDS_GB


def _port(port: int) -> Row:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return f"port {port}", f"{error.strerror}; serve with --port 0 or another", False
    return f"port {port}", "free", True


def _model(name: str) -> Row:
    try:
        checkpoint = open_checkpoint(name)
    except BadCheckpoint as error:
        return f"model {name}", str(error), False
    size = sum(path.stat().st_size for path in checkpoint.files) / 1e6
    shape = checkpoint.config
    return (
        f"model {name}",
        f"{checkpoint.architecture}, {shape.layers} layers of {shape.hidden}, {size:.0f} MB, "
        f"up to {shape.max_len:,} tokens; python {sys.executable}",
        True,
    )
