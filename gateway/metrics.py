"""What the gateway counts, and the page at /metrics.  No value of a caller is ever a label.

One registry a gateway, fed by the event loop and by the engine's Stats snapshots.  Observing
costs a bisect and two additions, no locks; prometheus-client only writes the page.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from engine.messages import Stats
from gateway.link import Link
from gateway.sessions import Session

SAMPLE_S = 1.0
PHASES = ("upload", "queued", "prefill", "decode", "end")  # where a client can leave
FINISHES = ("stop", "length", "tool_calls", "abort", "error")
REJECTIONS = (
    "queue_full", "draining", "loading", "engine_unavailable", "engine_restarted",
    "deadline_exceeded", "connections", "other",
)  # fmt: skip

_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_GAP = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip
_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip

# Counter name -> (field of Stats, help).
_ENGINE_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens processed."),
    "vllm:generation_tokens": ("generated_tokens", "Tokens generated."),
    "vllm:num_preemptions": ("preemptions", "Preemptions."),
    "vllm:prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the cache."),
    "vllm:prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the cache."),
    "vllm:spec_decode_num_drafts": ("drafts", "Drafts verified."),
    "vllm:spec_decode_num_draft_tokens": ("drafted_tokens", "Draft tokens verified."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens accepted."),
}
_ENGINE_GAUGES = {
    "vllm:num_requests_running": ("running", "Requests in the running batch."),
    "vllm:num_requests_waiting": ("waiting", "Requests waiting in the engine."),
    "slipstream:requests_compiling": ("compiling", "Requests whose grammar is being compiled."),
    "slipstream:cache_blocks_used": ("blocks_used", "KV blocks held by running requests."),
    "slipstream:cache_blocks_cached": ("blocks_cached", "KV blocks kept for reuse."),
    "slipstream:sessions": ("sessions", "Sessions that the engine knows."),
    "slipstream:sessions_pinned": ("sessions_pinned", "Sessions pinned over a tool gap."),
}


class Histogram:
    """Counts by upper bound, and a sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last: beyond all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it) as the page wants them."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else str(bound), total))
        return found


class EngineTotals:
    """An engine's counters, summed so that they never fall when a new engine starts at zero."""

    def __init__(self) -> None:
        self.totals = {field: 0 for field, _ in _ENGINE_COUNTERS.values()}
        self._last = Stats()

    def feed(self, stats: Stats) -> None:
        """Take a snapshot in; one that counts less than the last is a new engine's."""
        # The link's restart count cannot tell: it moves before the last snapshot does.
        last = self._last
        fresh = stats.step < last.step or any(
            getattr(stats, field) < getattr(last, field) for field in self.totals
        )
        for field in self.totals:
            self.totals[field] += getattr(stats, field) - (0 if fresh else getattr(last, field))
        self._last = stats


class Metrics:
    """All counters of one gateway; every method is cheap and runs on the event loop."""

    def __init__(self, model: str, engine: str = "0") -> None:
        self._labels = {"model_name": model, "engine": engine}
        self.engine = EngineTotals()
        self.link: Link | None = None
        self.loop_lag_s = 0.0
        self.requests = 0
        self.invalid_sessions = 0
        self.socket_refusals = 0
        self._finished = Counter(dict.fromkeys(FINISHES, 0))
        self._rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self._left = Counter(dict.fromkeys(PHASES, 0))
        self._calls = Counter({"true": 0, "false": 0})
        self._responses: Counter[str] = Counter()
        self._first = Histogram(_FIRST)
        self._gap = Histogram(_GAP)
        self._queue = Histogram(_REQUEST)
        self._total = Histogram(_REQUEST)
        self._per_token = Histogram(_GAP)
        self._prompt = Histogram(_TOKENS)
        self._generated = Histogram(_TOKENS)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def request_started(self) -> None:
        """A generation request was understood."""
        self.requests += 1

    def queued(self, seconds: float) -> None:
        """From arrival to the engine's Admitted."""
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """From arrival to the first token."""
        self._first.observe(seconds)

    def gap(self, seconds: float) -> None:
        """Between two frames with tokens of one choice."""
        self._gap.observe(seconds)

    def finished(
        self,
        reason: str,
        *,
        seconds: float,
        prompt_tokens: int = 0,
        generation_tokens: int = 0,
        first_token_s: float | None = None,
    ) -> None:
        """A request ended; `reason` is one of FINISHES, `seconds` its whole time."""
        self._finished[reason if reason in FINISHES else "error"] += 1
        self._total.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._generated.observe(generation_tokens)
        if first_token_s is not None and generation_tokens > 1:
            self._per_token.observe((seconds - first_token_s) / (generation_tokens - 1))

    def tool_call(self, valid: bool = True) -> None:
        """A tool call was delivered whole; `valid` = its arguments satisfy their schema."""
        self._calls["true" if valid else "false"] += 1

    def disconnect(self, phase: str) -> None:
        """A client left in one of PHASES."""
        self._left[phase if phase in PHASES else "end"] += 1

    def rejected(self, reason: str) -> None:
        """A request was turned away before its 200, for one of REJECTIONS."""
        self._rejected[reason if reason in REJECTIONS else "other"] += 1

    def session(self, session: Session) -> None:
        """A request named a session, or a value that had to be ignored."""
        self.invalid_sessions += session.invalid

    def response(self, status: int) -> None:
        """A response began."""
        self._responses[f"{status // 100}xx"] += 1

    def page(self) -> bytes:
        """The text exposition of everything."""
        self._sample()
        return generate_latest(self.registry)

    async def watch(self, link: Link) -> None:
        """Sample the engine and the loop's own lag, for ever; cancel to end."""
        self.link = link
        while True:
            before = time.monotonic()
            await asyncio.sleep(SAMPLE_S)
            self.loop_lag_s = max(0.0, time.monotonic() - before - SAMPLE_S)
            self._sample()

    def _sample(self) -> None:
        if self.link is not None:
            self.engine.feed(self.link.stats)

    def collect(self) -> Iterator[Metric]:
        """Every metric family; called by the registry."""
        yield from self._engine_families()
        yield from self._counter_families()
        for name, what, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", self._first),
            ("vllm:inter_token_latency_seconds", "Between frames of a choice.", self._gap),
            ("vllm:request_time_per_output_token_seconds", "Mean per token.", self._per_token),
            ("vllm:e2e_request_latency_seconds", "Arrival to the end.", self._total),
            ("vllm:request_queue_time_seconds", "Arrival to admission.", self._queue),
            ("vllm:request_prompt_tokens", "Prompt tokens a request.", self._prompt),
            ("vllm:request_generation_tokens", "Generated tokens a request.", self._generated),
        ):
            family = HistogramMetricFamily(name, what, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family

    def _engine_families(self) -> Iterator[Metric]:
        for name, (field, what) in _ENGINE_COUNTERS.items():
            yield self._counter(name, what, self.engine.totals[field])
        link = self.link
        stats = Stats() if link is None else link.stats
        for name, (field, what) in _ENGINE_GAUGES.items():
            yield self._gauge(name, what, getattr(stats, field))
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", used)
        hello = None if link is None else link.hello
        if hello is not None:
            sizes = {"block_size": str(hello.block_size), "num_gpu_blocks": str(hello.blocks)}
            yield self._gauge("vllm:cache_config_info", "The KV cache's shape.", 1, sizes)
        restarts, age = (0, 0.0) if link is None else (link.restarts, link.stats_age_s)
        yield self._counter("slipstream:engine_restarts", "Engine restarts.", restarts)
        yield self._gauge("slipstream:engine_heartbeat_age_seconds", "Silence of the engine.", age)

    def _counter_families(self) -> Iterator[Metric]:
        yield self._counter("slipstream:requests", "Generation requests.", self.requests)
        yield self._gauge("slipstream:event_loop_lag_seconds", "Late by.", self.loop_lag_s)
        for name, what, value in (
            ("session_header_invalid", "Session values ignored.", self.invalid_sessions),
            ("socket_refusals", "Requests refused at the socket.", self.socket_refusals),
        ):
            yield self._counter(f"slipstream:{name}", what, value)
        for name, what, label, counts in (
            ("vllm:request_success", "Requests ended.", "finished_reason", self._finished),
            ("vllm:admission_rejections", "Turned away.", "reason", self._rejected),
            ("slipstream:client_disconnects", "Clients that left.", "phase", self._left),
            ("slipstream:tool_calls", "Tool calls delivered.", "valid", self._calls),
            ("slipstream:http_responses", "Responses.", "status", self._responses),
        ):
            family = CounterMetricFamily(name, what, labels=[*self._labels, label])
            for kind, count in counts.items():
                family.add_metric([*self._labels.values(), kind], count)
            yield family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _gauge(
        self, name: str, what: str, value: float, more: dict[str, str] | None = None
    ) -> Metric:
        labels = self._labels | (more or {})
        family = GaugeMetricFamily(name, what, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
