"""Threads: as many as there are cores that nobody else uses.  Measures no time."""

from __future__ import annotations

from engine.threads import Threads, Usage, read_usage, unseen


class Machine:
    """A machine whose load the test sets; `now` moves by hand."""

    def __init__(self, cores: int) -> None:
        self.cores, self.now, self.machine, self.own = cores, 0.0, 0.0, 0.0

    def run(self, seconds: float, own: float, foreign: float) -> float:
        """Cores used by us and by others, for a while; returns the new time."""
        self.now += seconds
        self.own += own * seconds
        self.machine += (own + foreign) * seconds
        return self.now

    def read(self) -> Usage:
        return Usage(self.now, self.machine, self.own, self.cores)


def follow(cores: int, limit: int, *loads: tuple[float, float]) -> list[int]:
    machine, applied = Machine(cores), []
    threads = Threads(limit, applied.append, machine.read)
    for own, foreign in loads:
        threads.update(machine.run(0.2, own, foreign))
    return applied


def test_a_quiet_machine_keeps_every_thread():
    assert follow(2, 2, (2.0, 0.0), (1.8, 0.2), (1.7, 0.3)) == [2]


def test_a_busy_neighbour_takes_a_thread_and_gives_it_back():
    assert follow(2, 2, (1.0, 1.0), (1.0, 0.9), (1.0, 0.05)) == [2, 1, 2]


def test_one_thread_is_left_on_a_machine_that_others_fill():
    assert follow(2, 2, (0.2, 1.8), (0.1, 3.0)) == [2, 1]


def test_a_large_machine_does_not_care_for_some_load():
    assert follow(64, 4, (4.0, 50.0), (4.0, 61.5), (3.0, 62.0)) == [4, 2]


def test_a_window_that_is_too_short_is_not_looked_at():
    machine, applied = Machine(2), []
    threads = Threads(2, applied.append, machine.read)
    threads.update(machine.run(0.05, 0.0, 2.0))
    assert applied == [2]


def test_a_single_thread_never_reads_anything():
    def read() -> Usage:
        raise AssertionError("read")

    Threads(1, lambda count: None, read).update(1e9)


def test_a_system_that_does_not_tell_keeps_the_limit():
    applied: list[int] = []
    Threads(2, applied.append, lambda: None).update(1e9)
    assert applied == [2]


def test_this_machine_tells():
    usage = read_usage()
    assert usage is None or (usage.machine >= usage.own * 0.5 and usage.cores >= 1)


def test_where_nobody_is_watched_the_number_stays():
    applied: list[int] = []
    threads = Threads(4, applied.append, unseen)
    threads.update(1e9)
    assert applied == [4] and threads.count == 4
