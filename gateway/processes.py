"""CPU time and memory of processes, as /proc tells them (Linux).  Starts and ends none."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_PARENT, _USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM, _RESIDENT = 1, 11, 12, 13, 14, 21


@dataclass(frozen=True, slots=True)
class Use:
    """What a process and all of its descendants have used."""

    cpu_s: float  # user and system; of ended children too, once their parent has waited for them
    own_cpu_s: float  # of the process alone
    resident: int  # bytes; memory that processes share counts once for each


def _fields(pid: int | str) -> list[str]:
    """What /proc/PID/stat says after the name, which may hold spaces; raise OSError if gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_s(pid: int) -> tuple[float, float]:
    """User and system CPU seconds of one process, without its children; the clock has 10 ms."""
    fields = _fields(pid)
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[_USER]) / tick, int(fields[_SYSTEM]) / tick


def resident(pid: int) -> int:
    """Resident bytes of one process."""
    return int(_fields(pid)[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that still run."""
    found: list[int] = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(_fields(entry)[_PARENT]) == pid:
                found.append(int(entry))
    return found


def command_line(pid: int) -> list[str]:
    """The arguments that a process was started with."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def tree(pid: int) -> Use:
    """The use of `pid` and its descendants; raise ProcessLookupError when there is no `pid`."""
    stats: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            stats[int(entry)] = fields = _fields(entry)
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[_PARENT]), []).append(int(entry))
    if pid not in stats:
        raise ProcessLookupError(f"There is no process {pid}; give the server's.")
    ticks = pages = 0
    found = [pid]
    for one in found:
        fields = stats[one]
        times = (_USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM)
        ticks += sum(int(fields[place]) for place in times)
        pages += int(fields[_RESIDENT])
        found += children.get(one, ())
    tick = os.sysconf("SC_CLK_TCK")
    own = int(stats[pid][_USER]) + int(stats[pid][_SYSTEM])
    return Use(ticks / tick, own / tick, pages * os.sysconf("SC_PAGE_SIZE"))
