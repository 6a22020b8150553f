"""What workers share in memory: pages that agree, counters that never fall, one queue's limits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Stats
from gateway.counts import Counts
from gateway.errors import QueueFull
from gateway.limits import Admission
from gateway.metrics import Metrics
from gateway.sheet import TOTALS, EngineView, Share, Sheet


@pytest.fixture
def sheet() -> Iterator[Sheet]:
    made = Sheet.make(3)
    yield made
    os.close(made.fd)


def page(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.page().decode())
        for sample in family.samples
        if sample.name != "slipstream:engine_heartbeat_age_seconds"
    }


def value(metrics: Metrics, name: str) -> float:
    return sum(found for (one, _), found in page(metrics).items() if one == name)


def busy(metrics: Metrics, count: int) -> None:
    """Something of every kind, `count` times."""
    for number in range(count):
        metrics.request_started()
        metrics.queued(0.1)
        metrics.first_token(0.2 + number)
        metrics.gap(0.01)
        metrics.finished("length", seconds=1.0, prompt_tokens=9, generation_tokens=3)
        metrics.tool_call(number % 2 == 0)
        metrics.disconnect("decode")
        metrics.rejected("queue_full")
        metrics.response(200)
        metrics.refused_at_socket()


def test_counts_survive_being_numbers(sheet: Sheet) -> None:
    metrics = Metrics("m")
    busy(metrics, 5)
    again = Counts()
    again.add(metrics._counts.flat())
    assert again.flat() == metrics._counts.flat() and sum(again.flat()) > 50


def test_any_workers_page_is_the_whole_servers(sheet: Sheet) -> None:
    workers = [Metrics("m", share=Share(sheet, number)) for number in range(3)]
    alone = Metrics("m")
    for number, metrics in enumerate(workers):
        busy(metrics, number + 1)
        busy(alone, number + 1)
        metrics._sample()
    pages = [page(metrics) for metrics in workers]
    assert pages[0] == pages[1] == pages[2]
    for key, expected in page(alone).items():
        assert pages[0][key] == pytest.approx(expected), key


def test_the_engines_values_are_equal_at_all_workers_to_the_last_digit(sheet: Sheet) -> None:
    totals = {field: 10**12 + place for place, field in enumerate(TOTALS)}
    numbers = Stats.__struct_fields__[:-2]  # the lists are in `totals` alone
    stats = Stats(*range(7, 7 + len(numbers)))
    view = EngineView(time.monotonic(), 4, totals, stats)
    sheet.tell_engine(view)
    assert sheet.engine() == view
    pages = [page(Metrics("m", share=Share(sheet, number))) for number in range(3)]
    assert pages[0] == pages[1] == pages[2]
    labels = (("engine", "0"), ("model_name", "m"))
    assert pages[0]["vllm:generation_tokens_total", labels] == 10**12 + 1
    assert pages[0]["vllm:num_requests_running", labels] == stats.running
    assert pages[0]["slipstream:engine_restarts_total", labels] == 4


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["work", "scrape", "die"])),
                max_size=30))
def test_no_scrape_sees_a_counter_fall_whoever_answers_and_whoever_died(
    happenings: list[tuple[int, str]]
) -> None:
    sheet = Sheet.make(3)
    workers = [Metrics("m", share=Share(sheet, number)) for number in range(3)]
    done, last = 0, 0.0
    for number, what in happenings:
        if what == "work":
            busy(workers[number], 1)
            done += 1
        elif what == "die":  # what it had not told yet is lost with it, never what was seen
            sheet.bury(number)
            workers[number] = Metrics("m", share=Share(sheet, number))
        else:
            seen = value(workers[number], "slipstream:requests_total")
            assert last <= seen <= done
            last = seen
    os.close(sheet.fd)


def admissions(sheet: Sheet, requests: int = 100, tokens: int = 10**6, opened: int = 100
               ) -> list[Admission]:
    return [Admission(requests, tokens, opened, share=Share(sheet, n)) for n in range(3)]


def test_the_queues_limits_are_the_servers_and_not_each_workers(sheet: Sheet) -> None:
    first, second, third = admissions(sheet, requests=2)
    held = [first.enter(5), second.enter(5)]
    for one in (first, second, third):
        with pytest.raises(QueueFull, match="2 requests wait already"):
            one.enter(5)
    held[0].started()
    third.enter(5).release()
    for ticket in held:
        ticket.release()
    assert sheet.open == 0


def test_waiting_tokens_and_open_requests_count_over_all_workers(sheet: Sheet) -> None:
    first, second, third = admissions(sheet, tokens=100, opened=2)
    waits = first.enter(90)
    with pytest.raises(QueueFull, match="would exceed 100 tokens"):
        second.enter(20)
    waits.started()
    runs = second.enter(20)
    assert sheet.open == 2
    with pytest.raises(QueueFull, match="2 requests are open"):
        third.enter(1)
    runs.release()
    third.enter(1)
    assert sheet.open == 2


def test_a_dead_worker_holds_no_places(sheet: Sheet) -> None:
    first, second, _ = admissions(sheet, opened=1)
    first.enter(5)
    with pytest.raises(QueueFull):
        second.enter(5)
    sheet.bury(0)
    second.enter(5)
    assert sheet.open == 1


def test_workers_map_the_same_memory(sheet: Sheet) -> None:
    busy(metrics := Metrics("m", share=Share(Sheet(os.dup(sheet.fd), 3), 1)), 3)
    assert value(metrics, "slipstream:requests_total") == 3
    assert value(Metrics("m", share=Share(sheet, 0)), "slipstream:requests_total") == 3
