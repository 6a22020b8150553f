"""End a process together with the one that started it.  Watches nothing itself; Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` (a process id) dies; Linux only.

    More exactly: when the thread of it that started us ends.
    """
    if not sys.platform.startswith("linux"):
        return
    set_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        sys.exit("The process that started this one is gone.")
