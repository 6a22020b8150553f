"""What /metrics says: names, labels, sums, and that callers cannot grow it.  Scrapes no engine."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Stats
from gateway.counts import Histogram
from gateway.metrics import EngineTotals, Metrics
from gateway.sessions import Session
from tests.live import gateway, running
from tests.scripted import Script, ScriptedLink

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(metrics: Metrics) -> Samples:
    """Every sample of the page, by name and extra labels; the two fixed labels must be there."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.page().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny" and labels.pop("engine") == "0"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


class Snapshots(ScriptedLink):
    """A link whose snapshot is set by the test."""

    now = Stats()

    @property
    def stats(self) -> Stats:
        return self.now


@pytest.fixture
def link() -> Snapshots:
    return Snapshots(lambda _: Script.say("x"))


@pytest.fixture
def metrics(link: Snapshots) -> Metrics:
    return gateway(link).metrics


NAMES = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:cache_config_info
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:num_preemptions_total
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:request_success_total
vllm:admission_rejections_total vllm:spec_decode_num_drafts_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:request_time_per_output_token_seconds_bucket vllm:e2e_request_latency_seconds_bucket
vllm:request_queue_time_seconds_bucket vllm:request_prompt_tokens_bucket
vllm:request_generation_tokens_bucket
slipstream:tool_calls_total slipstream:client_disconnects_total
slipstream:engine_restarts_total slipstream:engine_heartbeat_age_seconds
slipstream:event_loop_lag_seconds slipstream:session_header_invalid_total
slipstream:closing_refusals_total slipstream:closing_substitutions_total
slipstream:closed_early_total slipstream:calls_unopened_total slipstream:redrawn_tokens_total
slipstream:relaxed_schemas_total slipstream:relaxed_answers_total
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboards_name_is_on_the_page_before_anything_happened(
    metrics: Metrics, name: str
) -> None:
    assert name in {found for found, _ in samples(metrics)}


def test_each_event_moves_its_own_counter(metrics: Metrics) -> None:
    metrics.request_started()
    metrics.queued(0.2)
    metrics.first_token(0.3)
    metrics.gap(0.02)
    metrics.gap(0.03)
    metrics.finished(
        "tool_calls", seconds=1.3, prompt_tokens=100, generation_tokens=11, first_token_s=0.3
    )
    metrics.tool_call()
    metrics.tool_call(valid=False)
    metrics.disconnect("decode")
    metrics.rejected("queue_full")
    metrics.session(Session(None, "none", False, invalid=True))
    metrics.session(Session(b"k" * 16, "x-session-id", False))
    found = samples(metrics)
    for name, labels, value in [
        ("slipstream:requests_total", {}, 1),
        ("vllm:request_success_total", {"finished_reason": "tool_calls"}, 1),
        ("vllm:request_success_total", {"finished_reason": "stop"}, 0),
        ("vllm:request_queue_time_seconds_count", {}, 1),
        ("vllm:time_to_first_token_seconds_sum", {}, 0.3),
        ("vllm:time_to_first_token_seconds_bucket", {"le": "0.25"}, 0),
        ("vllm:time_to_first_token_seconds_bucket", {"le": "0.5"}, 1),
        ("vllm:inter_token_latency_seconds_count", {}, 2),
        ("vllm:inter_token_latency_seconds_bucket", {"le": "0.025"}, 1),
        ("vllm:inter_token_latency_seconds_bucket", {"le": "+Inf"}, 2),
        ("vllm:e2e_request_latency_seconds_sum", {}, 1.3),
        ("vllm:request_time_per_output_token_seconds_sum", {}, 0.1),
        ("vllm:request_prompt_tokens_sum", {}, 100),
        ("vllm:request_generation_tokens_sum", {}, 11),
        ("slipstream:tool_calls_total", {"valid": "true"}, 1),
        ("slipstream:tool_calls_total", {"valid": "false"}, 1),
        ("slipstream:client_disconnects_total", {"phase": "decode"}, 1),
        ("vllm:admission_rejections_total", {"reason": "queue_full"}, 1),
        ("slipstream:session_header_invalid_total", {}, 1),
    ]:
        assert found[name, tuple(labels.items())] == pytest.approx(value), (name, labels)


def test_engine_gauges_follow_the_newest_snapshot(link: Snapshots, metrics: Metrics) -> None:
    link.now = Stats(running=3, waiting=2, blocks_used=25, blocks_total=100, sessions=7)
    link.restarts = 4
    found = samples(metrics)
    assert found["vllm:num_requests_running", ()] == 3
    assert found["vllm:num_requests_waiting", ()] == 2
    assert found["vllm:kv_cache_usage_perc", ()] == 0.25
    assert found["slipstream:sessions", ()] == 7
    assert found["slipstream:engine_restarts_total", ()] == 4
    info = (("block_size", "64"), ("num_gpu_blocks", "1024"))
    assert found["vllm:cache_config_info", info] == 1


def test_engine_counters_never_fall_when_a_new_engine_counts_from_zero(
    link: Snapshots, metrics: Metrics
) -> None:
    def tokens(step: int, generated: int, restarts: int = 0) -> float:
        link.now = Stats(step=step, generated_tokens=generated, prompt_tokens=7)
        link.restarts = restarts
        return samples(metrics)["vllm:generation_tokens_total", ()]

    assert [tokens(10, 100), tokens(20, 150), tokens(20, 150)] == [100, 150, 150]
    assert tokens(20, 160, restarts=1) == 160  # the dead engine's last words
    assert [tokens(1, 5, 1), tokens(400, 500, 1)] == [165, 660]
    assert samples(metrics)["vllm:prompt_tokens_total", ()] == 14


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), max_size=6))
def test_totals_are_the_sum_over_engines_that_were_seen_to_start(lives: list[list[int]]) -> None:
    totals, expected, last = EngineTotals(), 0, 0
    for steps in lives:
        count = 0
        totals.feed(Stats(step=0))
        for number, more in enumerate(steps, 1):
            count += more
            totals.feed(Stats(step=number, generated_tokens=count))
            assert totals.totals["generated_tokens"] >= last
            last = totals.totals["generated_tokens"]
        expected += count
        assert last == expected


def test_unknown_words_never_become_labels(metrics: Metrics) -> None:
    before = set(samples(metrics))
    for number in range(1000):
        word = f"user-{number}"
        metrics.finished(word, seconds=1.0)
        metrics.disconnect(word)
        metrics.rejected(word)
        metrics.session(Session(b"k" * 16, word, False, invalid=True))
    assert set(samples(metrics)) == before
    assert samples(metrics)["vllm:request_success_total", (("finished_reason", "error"),)] == 1000


@given(st.lists(st.floats(0, 1e4), max_size=50))
def test_a_histogram_counts_each_value_in_every_bucket_that_holds_it(values: list[float]) -> None:
    histogram = Histogram((0.5, 1, 10))
    for value in values:
        histogram.observe(value)
    expected = [sum(value <= bound for value in values) for bound in (0.5, 1, 10, 1e9)]
    assert [count for _, count in histogram.buckets()] == expected
    assert histogram.sum == pytest.approx(sum(values))


def test_observing_a_token_costs_less_than_two_microseconds(metrics: Metrics) -> None:
    best = min(timeit.repeat(lambda: metrics.gap(0.02), number=2000, repeat=7)) / 2000
    assert best < 2e-6  # measured 0.15 us


def test_the_page_is_served_with_its_content_type_and_counts_responses() -> None:
    with running(gateway()) as live:
        assert live.ask("GET", "/nope").status == 404
        answer = live.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert b'slipstream:http_responses_total{engine="0",model_name="tiny",status="4xx"} 1.0' in (
        answer.body
    )
