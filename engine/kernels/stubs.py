"""Load each of Triton's launch stubs from a file of its own.  Builds none.

CPython finds an extension that it has loaded by its file's inode number, and opens the file twice
to learn that number and to load (Python/dynload_shlib.c).  When another thread or process puts the
same stub into Triton's cache in between, the number noted is that of a file that is gone; the next
stub that is given it is taken for the first, and its kernels are called with the wrong arguments.
Two engines that start at once on a new machine meet this.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from threading import Lock
from types import ModuleType

from triton.runtime import build

Load = Callable[[str, str], ModuleType]


def apart(load: Load) -> Load:
    """`load(name, path)`, from a copy that nobody replaces, and once for each path."""
    known: dict[tuple[str, str], ModuleType] = {}
    lock = Lock()

    def loaded(name: str, path: str) -> ModuleType:
        # A path in Triton's cache has a hash of its source, so what it names does not change.
        with lock:
            if (name, path) not in known:
                try:
                    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
                        # Gone from the disk afterwards, while its number stays taken: it is mapped.
                        known[name, path] = load(name, shutil.copy(path, folder))
                except (OSError, ImportError):  # no room there, or mounted noexec
                    known[name, path] = load(name, path)
            return known[name, path]

    return loaded


def install() -> None:
    """Have Triton load so.  Nothing where it loads otherwise, as versions without stubs may."""
    load = getattr(build, "_load_module_from_path", None)
    if load is not None and load.__module__ == build.__name__:
        build._load_module_from_path = apart(load)
