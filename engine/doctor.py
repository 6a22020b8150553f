"""`slipstream doctor`: what this machine has and what it lacks, for an issue.  Changes nothing."""

from __future__ import annotations

import importlib.util
import json
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
DRIVER = Path("/proc/driver/nvidia/version")
COMPILERS = ("gcc", "clang")  # one of them builds the stubs through which Triton launches


def report(model: str) -> Iterator[Row]:
    """Every finding, one after the other; nothing raises."""
    yield "Python", f"{platform.python_version()} on {platform.platform()}", True
    yield _torch()
    yield from _gpus()
    yield _triton()
    yield from _picks()
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

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return "torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {build}", True


def _gpus() -> Iterator[Row]:
    """A row for each GPU that torch sees, or one that says why there is none."""
    driver = _driver()
    count = 0
    if importlib.util.find_spec("torch") is not None:
        import torch  # late, as above

        count = torch.cuda.device_count()
    for number in range(count):
        try:
            free, total = torch.cuda.mem_get_info(number)
            major, minor = torch.cuda.get_device_capability(number)
            name = torch.cuda.get_device_name(number)
        except RuntimeError as error:  # a GPU that is lost, or held by one process alone
            yield f"GPU {number}", f"cannot be used: {str(error).splitlines()[0]:.200}", False
            continue
        yield (f"GPU {number}", f"{name}, compute capability {major}.{minor}, {free / 1e9:.1f} GB "
               f"free of {total / 1e9:.1f} GB, driver {driver or 'unknown'}", True)
    if not count:
        found = f"driver {driver} is loaded, but torch sees no GPU; CPU is served" if driver else (
            "none: CPU is served")
        yield "GPU", found, True


def _driver() -> str:
    """The version of NVIDIA's kernel module; empty without one."""
    try:
        words = DRIVER.read_text().partition("\n")[0].split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _triton() -> Row:
    """Its version, its compiler, and how warm its cache is: a first start compiles every kernel."""
    needed = False
    if importlib.util.find_spec("torch") is not None:
        import torch  # late, as above

        needed = torch.cuda.is_available()
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton", "not installed" + (": pip install triton" if needed else
                                            " (only a GPU needs it)"), not needed
    compiler = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), "")
    cache, writable = _triton_cache()
    lacks = "" if compiler else f", no C compiler ({', '.join(COMPILERS)}): install one"
    return "triton", f"{version}, {cache}{lacks}", not needed or (bool(compiler) and writable)


def _triton_cache() -> tuple[str, bool]:
    """What Triton's cache of compiled kernels holds, and whether it can grow."""
    home = os.environ.get("TRITON_HOME", "~")
    folder = Path(os.environ.get("TRITON_CACHE_DIR", f"{home}/.triton/cache")).expanduser()
    there = folder
    while not there.exists():
        there = there.parent
    writable = os.access(there, os.W_OK)
    state = "" if writable else ", not writable: set TRITON_CACHE_DIR"
    if there != folder:
        return f"cache {folder} is empty: the first start compiles{state}", writable
    sizes = [path.stat().st_size for path in folder.glob("*/*") if path.is_file()]
    return (f"cache {folder}: {sum(1 for _ in folder.glob('*'))} entries, "
            f"{sum(sizes) / 1e6:.1f} MB{state}", writable)


def _picks() -> Iterator[Row]:
    """Where a GPU's measured choice of kernels is kept; a first start of a model measures."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        return
    import torch  # late, as above

    if not torch.cuda.is_available():
        return
    from engine.cuda.picks import store_path

    path = store_path()
    if path is None:
        yield "picks", "not kept, there is no home folder: set XDG_CACHE_HOME", False
        return
    try:
        known = len(json.loads(path.read_text())["picks"])
    except FileNotFoundError:
        yield "picks", f"{path} is not there: the first start measures kernels", True
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield "picks", f"{path} cannot be read ({error}): the next start measures anew", False
    else:
        yield "picks", f"{path}: {known} kernels chosen by what was measured", True


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
