"""Which cores a server's engine has, and how slow others make them just now.  Starts no server.

A virtual machine's cores share their units with cores of others, and of its own: on the H200's host
the same Python takes 145 us or 275 on any of the sixteen, for seconds at a time.  An engine whose
host is the limit is as slow then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time

from gateway import processes

STEPS = 4_000  # of the loop that tells: about 0.3 ms
EVERY_S = 0.02


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


class Watch(threading.Thread):
    """How slow cores are while something else runs on them: a loop now and then, by its CPU time.

    Being preempted does not count, a unit shared with another machine does.
    """

    def __init__(self, engine: set[int]) -> None:
        super().__init__(daemon=True)
        self._cores, self._seconds, self._over = sorted(engine), list[float](), threading.Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """A loop on each core, every `EVERY_S`."""
        while self._cores and not self._over.wait(EVERY_S):
            for core in self._cores:
                os.sched_setaffinity(0, {core})  # of this thread
                self._seconds.append(_loop())

    @property
    def mean(self) -> float:
        """Seconds of a loop; 0 without cores."""
        return statistics.fmean(self._seconds) if self._seconds else 0.0


def _loop() -> float:
    table, start = dict.fromkeys(range(100), 0), time.thread_time()
    for i in range(STEPS):
        table[i % 100] = i
    return time.thread_time() - start
