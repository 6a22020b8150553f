"""Which cores a server's engine has, and how slow others make them just now.  Starts no server.

A virtual machine's cores share their units with cores of others, and of its own: the same Python
takes 1.6 times as long while the other half of a unit works.  An engine whose host is the limit is
as slow then, for seconds at a time.
"""

from __future__ import annotations

import argparse
import os
import time

from gateway import processes

STEPS = 250_000  # of the loop that tells: about 20 ms


def cores(text: str) -> set[int]:
    """Numbers of cores; raise ArgumentTypeError unless there are such, and others."""
    found, ours = {int(one) for one in text.split(",")}, os.sched_getaffinity(0)
    if not found < ours:
        raise argparse.ArgumentTypeError(
            f"choose some of {sorted(ours)}, but not all; {text!r} was given")
    return found


def keep(server: int, engine: set[int]) -> None:
    """Bind a server's engine to these cores, the rest of it keeps to ours; ValueError without."""
    (pid,) = (one for one in processes.children(server)
              if "engine.server" in processes.command_line(one))
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), engine)


def slow(engine: set[int]) -> float:
    """Seconds of a fixed loop on the slowest of these cores, 0 without any."""
    ours = os.sched_getaffinity(0)
    try:
        return max((_loop(core) for core in sorted(engine)), default=0.0)
    finally:
        os.sched_setaffinity(0, ours)


def _loop(core: int) -> float:
    os.sched_setaffinity(0, {core})
    table, start = dict.fromkeys(range(1000), 0), time.perf_counter()
    for i in range(STEPS):
        table[i % 1000] = i
    return time.perf_counter() - start
