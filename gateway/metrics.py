"""What the gateway counts, and the page at /metrics.  No value of a caller is ever a label.

One registry a gateway, fed by the event loop and by the engine's Stats snapshots.  Observing
costs a bisect and two additions, no locks; prometheus-client only writes the page.  With several
workers the page is the whole server's, whichever of them is asked: see sheet.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from operator import lt

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from engine.messages import DRAFT_PLACES, DRAFT_SOURCES, Stats
from gateway.counts import FINISHES, PHASES, REJECTIONS, Counts
from gateway.link import Link
from gateway.sessions import Session
from gateway.sheet import TOTALS, EngineView, Share, totals_of

SAMPLE_S = 1.0

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
    "slipstream:closing_refusals": (
        "closing_refusals", "Requests whose shortest answer is longer than their max_tokens.",
    ),
    "slipstream:closing_substitutions": ("closing_tokens", "Tokens put in place of drawn ones."),
    "slipstream:closed_early": ("closed_early", "Calls and answers completed by such tokens."),
    "slipstream:calls_unopened": ("unopened", "Texts ended where a call had no room."),
    "slipstream:redrawn_tokens": ("redrawn", "Tokens drawn again, with the mask they lacked."),
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


class EngineTotals:
    """An engine's counters, summed so that they never fall when a new engine starts at zero."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(TOTALS, 0)
        self._last = totals_of(Stats())
        self._step = 0

    def feed(self, stats: Stats) -> None:
        """Take a snapshot in; one that counts less than the last is a new engine's."""
        # The link's restart count cannot tell: it moves before the last snapshot does.
        now, last = totals_of(stats), self._last
        if stats.step < self._step or any(map(lt, now, last)):
            last = [0] * len(now)
        for field, count, before in zip(TOTALS, now, last, strict=True):
            self.totals[field] += count - before
        self._last, self._step = now, stats.step


class Metrics:
    """All counters of one gateway; every method is cheap and runs on the event loop."""

    def __init__(self, model: str, engine: str = "0", share: Share | None = None) -> None:
        """`share` is a worker's: it has the numbers of the others, and of the engine."""
        self._labels = {"model_name": model, "engine": engine}
        self.engine = EngineTotals()
        self.link: Link | None = None
        self.loop_lag_s = 0.0
        self._share = share
        self._counts = counts = Counts()
        if share is not None:
            share.counted_before(counts)
        self._plain, self._finished, self._left = counts.plain, counts.finished, counts.left
        self._rejected = counts.rejected
        self._first, self._gap = counts.first, counts.gap
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def request_started(self) -> None:
        """A generation request was understood."""
        self._plain["requests"] += 1

    def queued(self, seconds: float) -> None:
        """From arrival to the engine's Admitted."""
        self._counts.queue.observe(seconds)

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
        self._counts.total.observe(seconds)
        self._counts.prompt.observe(prompt_tokens)
        self._counts.generated.observe(generation_tokens)
        if first_token_s is not None and generation_tokens > 1:
            self._counts.per_token.observe((seconds - first_token_s) / (generation_tokens - 1))

    def tool_call(self, valid: bool = True) -> None:
        """A tool call was delivered whole; `valid` = its arguments satisfy their schema."""
        self._counts.calls["true" if valid else "false"] += 1

    def relaxed(self, field: str) -> None:
        """A response began that says that a schema of this field is enforced in part only."""
        self._counts.relaxed[field] += 1

    def relaxed_answer(self, valid: bool) -> None:
        """A text by such a `response_format` was delivered; `valid` = it satisfies all of it."""
        self._counts.answers["true" if valid else "false"] += 1

    def disconnect(self, phase: str) -> None:
        """A client left in one of PHASES."""
        self._left[phase if phase in PHASES else "end"] += 1

    def rejected(self, reason: str) -> None:
        """A request was turned away before its 200, for one of REJECTIONS."""
        self._rejected[reason if reason in REJECTIONS else "other"] += 1

    def session(self, session: Session) -> None:
        """A request named a session, or a value that had to be ignored."""
        self._plain["invalid_sessions"] += session.invalid

    def refused_at_socket(self) -> None:
        """A request was turned away before there was one."""
        self._plain["socket_refusals"] += 1

    def response(self, status: int) -> None:
        """A response began."""
        self._counts.responses[f"{status // 100}xx"] += 1

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
        if self._share is not None:  # the page of another worker needs ours, and adds them up
            self._share.tell_counts(self._counts, self.loop_lag_s)
        elif self.link is not None:
            self.engine.feed(self.link.stats)

    def _engine_view(self) -> EngineView:
        link = self.link
        if self._share is not None:
            return self._share.engine()
        if link is None:
            return EngineView(time.monotonic(), 0, self.engine.totals, Stats())
        heard = time.monotonic() - link.stats_age_s
        return EngineView(heard, link.restarts, self.engine.totals, link.stats)

    def collect(self) -> Iterator[Metric]:
        """Every metric family; called by the registry."""
        yield from self._engine_families(self._engine_view())
        counts, lag_s = self._counts, self.loop_lag_s
        if self._share is not None:
            counts, lag_s = self._share.server_counts()
        yield self._gauge("slipstream:event_loop_lag_seconds", "Late by.", lag_s)
        yield from self._counter_families(counts)
        for name, what, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", counts.first),
            ("vllm:inter_token_latency_seconds", "Between frames of a choice.", counts.gap),
            ("vllm:request_time_per_output_token_seconds", "Mean per token.", counts.per_token),
            ("vllm:e2e_request_latency_seconds", "Arrival to the end.", counts.total),
            ("vllm:request_queue_time_seconds", "Arrival to admission.", counts.queue),
            ("vllm:request_prompt_tokens", "Prompt tokens a request.", counts.prompt),
            ("vllm:request_generation_tokens", "Generated tokens a request.", counts.generated),
        ):
            family = HistogramMetricFamily(name, what, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family

    def _engine_families(self, view: EngineView) -> Iterator[Metric]:
        for name, (field, what) in _ENGINE_COUNTERS.items():
            yield self._counter(name, what, view.totals[field])
        yield from self._draft_families(view)
        stats = view.stats
        for name, (field, what) in _ENGINE_GAUGES.items():
            yield self._gauge(name, what, getattr(stats, field))
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", used)
        hello = None if self.link is None else self.link.hello
        if hello is not None:
            sizes = {"block_size": str(hello.block_size), "num_gpu_blocks": str(hello.blocks)}
            yield self._gauge("vllm:cache_config_info", "The KV cache's shape.", 1, sizes)
        age = max(0.0, time.monotonic() - view.heard)
        yield self._counter("slipstream:engine_restarts", "Engine restarts.", view.restarts)
        yield self._gauge("slipstream:engine_heartbeat_age_seconds", "Silence of the engine.", age)

    def _draft_families(self, view: EngineView) -> Iterator[Metric]:
        """Draft tokens by who guessed them, and by their place in the chain."""
        labels, own = [*self._labels, "source"], list(self._labels.values())
        for offset, (name, what) in enumerate((
            ("slipstream:draft_tokens", "Draft tokens verified."),
            ("slipstream:draft_tokens_accepted", "Draft tokens that were right."),
        )):  # fmt: skip
            family = CounterMetricFamily(name, what, labels=labels)
            for place, source in enumerate(DRAFT_SOURCES):
                total = view.totals[f"draft_sources.{2 * place + offset}"]
                family.add_metric([*own, source], total)
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were right.",
            labels=[*self._labels, "position"],
        )  # fmt: skip
        for place in range(DRAFT_PLACES):
            family.add_metric([*own, str(place)], view.totals[f"draft_places.{place}"])
        yield family

    def _counter_families(self, counts: Counts) -> Iterator[Metric]:
        for name, what, kind in (
            ("requests", "Generation requests.", "requests"),
            ("session_header_invalid", "Session values ignored.", "invalid_sessions"),
            ("socket_refusals", "Requests refused at the socket.", "socket_refusals"),
        ):
            yield self._counter(f"slipstream:{name}", what, counts.plain[kind])
        responses = {kind: count for kind, count in counts.responses.items() if count}
        for name, what, label, by_kind in (
            ("vllm:request_success", "Requests ended.", "finished_reason", counts.finished),
            ("vllm:admission_rejections", "Turned away.", "reason", counts.rejected),
            ("slipstream:client_disconnects", "Clients that left.", "phase", counts.left),
            ("slipstream:tool_calls", "Tool calls delivered.", "valid", counts.calls),
            ("slipstream:relaxed_schemas", "Responses, partly enforced.", "field", counts.relaxed),
            ("slipstream:relaxed_answers", "Texts by such a schema.", "valid", counts.answers),
            ("slipstream:http_responses", "Responses.", "status", responses),
        ):
            family = CounterMetricFamily(name, what, labels=[*self._labels, label])
            for kind, count in by_kind.items():
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
