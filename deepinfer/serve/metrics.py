"""Prometheus metrics under the names that vLLM's dashboards know, with the prefix `deepinfer:`.

`PrometheusObserver` is told by the engine what happens, by the front what was answered, and is
itself the collector that a scrape asks. It keeps plain numbers and builds metric families only
when asked: the engine reports after every step, and that must cost microseconds.
All calls happen on the event loop, so nothing is locked. The registry is the observer's own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from deepinfer.client import EngineClient, EngineState
from deepinfer.observe import EngineStats, RequestReport, StepReport

PREFIX = "deepinfer:"
CONTENT_TYPE = CONTENT_TYPE_LATEST

_WITH_STATS = (EngineState.READY, EngineState.DRAINING)

# Upper bounds of histogram buckets.
_SUB_SECOND = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
) + (1.0, 2.5, 5.0, 10.0)
_REQUEST_SECONDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
) + (120.0, 240.0, 480.0, 960.0)
_STEP_SECONDS = (
    0.00005,
    0.0001,
    0.0002,
    0.0004,
    0.0008,
    0.0016,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
) + (0.125, 0.25, 0.5, 1.0, 2.5)
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_STEP_TOKENS = tuple(float(2**power) for power in range(15))


class Histogram:
    """Counts by bucket and a sum. A step's values come as one array: one search finds all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._bounds_array = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """values: [any number]"""
        buckets = np.searchsorted(self._bounds_array, values)
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self._sum += float(values.sum())

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, as Prometheus wants them, and the sum."""
        labels = [*map(repr, self._bounds), "+Inf"]
        cumulative = self._counts.cumsum().astype(float).tolist()
        return list(zip(labels, cumulative, strict=True)), self._sum


class PrometheusObserver:
    """An `observe.Observer`; `bind` it to the engine whose gauges a scrape reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine: EngineClient | None = None
        self._histograms: dict[str, tuple[Histogram, str]] = {}
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            _SUB_SECOND + (20.0, 40.0, 80.0),
            "Arrival to first token.",
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", _SUB_SECOND, "Time between tokens of one sequence."
        )
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            _SUB_SECOND,
            "Per request, mean time per token after the first.",
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", _REQUEST_SECONDS, "Arrival to last token."
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", _REQUEST_SECONDS, "Arrival to first admission."
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", _REQUEST_SECONDS, "First admission to first token."
        )
        self._decode_time = self._histogram(
            "request_decode_time_seconds", _REQUEST_SECONDS, "First token to last."
        )
        self._prompt_lengths = self._histogram(
            "request_prompt_tokens", _TOKENS, "Prompt tokens per request."
        )
        self._generation_lengths = self._histogram(
            "request_generation_tokens", _TOKENS, "Generated tokens per request."
        )
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", _STEP_TOKENS, "Tokens computed per step."
        )
        self._loop_lag = self._histogram(
            "loop_lag_seconds", _STEP_SECONDS, "How late the event loop runs what is due."
        )
        self._step_time = {"device": Histogram(_STEP_SECONDS), "host": Histogram(_STEP_SECONDS)}
        self._prompt_tokens = 0
        self._prefill_tokens = 0
        self._generation_tokens = 0
        self._finished: Counter[str] = Counter()
        self._cancelled: Counter[str] = Counter()
        self._http: Counter[tuple[str, str, str]] = Counter()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def bind(self, engine: EngineClient) -> None:
        self._engine = engine

    def exposition(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)

    # --- what the engine reports ---

    def on_step(self, report: StepReport) -> None:
        self._step_time["device"].observe(report.device_s)
        self._step_time["host"].observe(report.host_s)
        self._iteration_tokens.observe(report.num_prefill_tokens + report.num_decode_tokens)
        self._prefill_tokens += report.num_prefill_tokens
        self._generation_tokens += report.num_sampled_tokens

    def on_token_intervals(self, seconds: NDArray[np.float64]) -> None:
        self._inter_token.observe_all(seconds)

    def on_finish(self, report: RequestReport) -> None:
        timeline, usage = report.timeline, report.usage
        self._finished[str(report.finish_reason)] += 1
        self._prompt_tokens += usage.prompt_tokens
        self._prompt_lengths.observe(usage.prompt_tokens)
        self._generation_lengths.observe(usage.completion_tokens)
        self._end_to_end.observe(timeline.total_s)
        self._queue_time.observe(timeline.queued_s)
        if report.time_to_first_token_s is not None:
            self._time_to_first_token.observe(report.time_to_first_token_s)
            self._prefill_time.observe(timeline.prefill_s)
            self._decode_time.observe(timeline.decode_s)
        if usage.completion_tokens > 1:
            self._time_per_output_token.observe(timeline.decode_s / (usage.completion_tokens - 1))

    def on_cancel(self, cause: str) -> None:
        self._cancelled[cause] += 1

    def on_loop_lag(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    # --- what the front reports ---

    def on_http(self, method: str, path: str, status: int) -> None:
        """An answered HTTP request; `path` is the route's pattern, never what a client made up."""
        self._http[method, path, str(status)] += 1

    # --- what a scrape asks ---

    def collect(self) -> Iterable[Metric]:
        model = ""
        if self._engine is not None and self._engine.state in _WITH_STATS:
            model = self._engine.model_name
            yield from _engine_families(self._engine.stats(), model)
        for name, (histogram, text) in self._histograms.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([model], *histogram.buckets())
            yield family
        steps = HistogramMetricFamily(
            PREFIX + "step_time_seconds",
            "Time of a step: on the device, and planning and committing on the host.",
            labels=["model_name", "part"],
        )
        for part, histogram in self._step_time.items():
            steps.add_metric([model, part], *histogram.buckets())
        yield steps
        yield _counter(
            "prompt_tokens", "Prompt tokens of finished requests.", self._prompt_tokens, model
        )
        yield _counter(
            "prefill_tokens", "Prompt tokens computed, not cached.", self._prefill_tokens, model
        )
        yield _counter("generation_tokens", "Tokens generated.", self._generation_tokens, model)
        yield from self._labelled_families(model)

    def _labelled_families(self, model: str) -> Iterable[Metric]:
        finished = CounterMetricFamily(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self._finished.items():
            finished.add_metric([model, reason], count)
        yield finished
        cancelled = CounterMetricFamily(
            PREFIX + "cancellations",
            "Requests cancelled, by cause.",
            labels=["model_name", "cause"],
        )
        for cause, count in self._cancelled.items():
            cancelled.add_metric([model, cause], count)
        yield cancelled
        answered = CounterMetricFamily(
            PREFIX + "http_requests",
            "HTTP requests answered; status 499 is a client that left.",
            labels=["method", "path", "status"],
        )
        for labels, count in self._http.items():
            answered.add_metric(list(labels), count)
        yield answered

    def _histogram(self, name: str, bounds: Sequence[float], text: str) -> Histogram:
        histogram = Histogram(bounds)
        self._histograms[name] = (histogram, text)
        return histogram


def _engine_families(stats: EngineStats, model: str) -> Iterable[Metric]:
    gauges = (
        ("num_requests_running", "Requests in the batch.", stats.num_running),
        ("num_requests_waiting", "Requests in the waiting room.", stats.num_waiting),
        ("num_tokens_waiting", "Prompt tokens in the waiting room.", stats.num_waiting_tokens),
        ("kv_cache_usage_perc", "Share of KV blocks held; 1 is all.", stats.kv_usage),
        ("kv_cache_blocks", "KV blocks there are.", stats.num_blocks),
        ("kv_cache_blocks_held", "KV blocks held by running requests.", stats.num_blocks_held),
        ("kv_cache_blocks_cached", "KV blocks kept for prefix hits.", stats.num_blocks_cached),
        ("loop_lag_recent_max_seconds", "Worst recent lag of the event loop.", stats.loop_lag_s),
    )
    for name, text, value in gauges:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([model], value)
        yield family
    yield _counter(
        "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_tokens, model
    )
    yield _counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_tokens, model)
    yield _counter(
        "num_preemptions", "Times a request lost its place.", stats.num_preemptions, model
    )
    yield _counter("steps", "Steps of the engine.", stats.num_steps, model)


def _counter(name: str, text: str, value: float, model: str) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
    family.add_metric([model], value)
    return family
