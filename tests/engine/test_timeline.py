"""The boot time line: owners, overlaps, gaps, threads.  Waits for nothing but its own clock."""

from __future__ import annotations

import sys
import threading

import pytest

from engine.timeline import Span, Timeline


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def rows(timeline: Timeline) -> dict[str, list[str]]:
    """name -> start, end, seconds, meanwhile... of the table's lines."""
    lines = timeline.table().splitlines()
    width = lines[0].index("   start")
    return {line[:width].strip(): line[width:].split() for line in lines[1:]}


def test_spans_are_told_from_the_start_with_what_ran_beside_them(clock):
    timeline = Timeline(clock)
    with timeline.span("all"):
        clock.now += 1
        with timeline.span("weights"):
            clock.now += 2.5
        with timeline.span("graphs"):
            clock.now += 0.25
    assert timeline.spans() == [
        Span("all", 0, 3.75), Span("weights", 1, 3.5), Span("graphs", 3.5, 3.75)]
    assert rows(timeline) == {
        "all": ["0.00", "3.75", "3.75", "weights,", "graphs"],
        "weights": ["1.00", "3.50", "2.50", "all"],
        "graphs": ["3.50", "3.75", "0.25", "all"],
        "total": ["0.00", "3.75", "3.75"],
    }


def test_time_that_nobody_owns_has_a_line_of_its_own(clock):
    timeline = Timeline(clock)
    clock.now += 1
    with timeline.span("a"):
        clock.now += 1
    clock.now += 0.5
    with timeline.span("b"):
        clock.now += 1
    assert timeline.gaps() == [Span("(nobody)", 0, 1), Span("(nobody)", 2, 2.5)]
    assert timeline.table().count("(nobody)") == 2
    assert timeline.total() == 3.5
    with timeline.span("c"):
        clock.now += 1
    assert len(timeline.gaps()) == 2


def test_a_span_that_raises_ends_and_one_that_runs_says_so(clock):
    timeline = Timeline(clock)
    with pytest.raises(ZeroDivisionError), timeline.span("bad"):
        clock.now += 1
        print(1 / 0)
    assert timeline.spans() == [Span("bad", 0, 1)]
    with timeline.span("long"):
        clock.now += 2
        assert rows(timeline)["long"] == ["1.00", "3.00", "2.00", "(runs)"]
        assert timeline.total() == 3
    assert "(runs)" not in timeline.table()


def test_spans_of_several_threads_overlap_and_none_is_lost(clock):
    timeline, gate = Timeline(clock), threading.Barrier(9)

    def work(number: int) -> None:
        for turn in range(50):
            with timeline.span(f"{number}.{turn}"):
                pass
        with timeline.span(f"long {number}"):
            gate.wait(10)
            gate.wait(10)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    gate.wait(10)
    clock.now += 1
    gate.wait(10)
    for thread in threads:
        thread.join()
    spans = timeline.spans()
    assert len(spans) == 8 * 51
    assert all(span.end is not None for span in spans)
    assert rows(timeline)["long 3"][:3] == ["0.00", "1.00", "1.00"]
    assert sum(name.startswith("long") for name in rows(timeline)) == 8


def test_an_empty_time_line_is_a_table_too(clock):
    assert rows(Timeline(clock)) == {"total": ["0.00", "0.00", "0.00"]}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_time_line_of_a_process_begins_with_its_start():
    timeline = Timeline.of_process()
    (span,) = timeline.spans()
    assert span.name == "python, imports"
    assert span.start == 0
    assert 0.01 < timeline.total() < 24 * 3600
    with timeline.span("next"):
        pass
    assert not timeline.gaps() or timeline.gaps()[0].end - timeline.gaps()[0].start < 1
