"""The metrics page: vLLM's names under our prefix, and numbers that add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer.observe import Observer, RequestReport, StepReport
from deepinfer.serve.metrics import Histogram, PrometheusObserver
from deepinfer.types import FinishReason, Timeline, Usage

NAMES = """
    num_requests_running num_requests_waiting kv_cache_usage_perc
    prefix_cache_queries prefix_cache_hits num_preemptions
    time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds
    request_decode_time_seconds prompt_tokens generation_tokens request_success cancellations
    step_time_seconds loop_lag_seconds iteration_tokens_total http_requests
"""


def _samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name.removeprefix("deepinfer:"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _value(observer: PrometheusObserver, name: str, **labels: str) -> float:
    samples = _samples(observer.exposition().decode())
    return samples[name, frozenset({"model_name": "", **labels}.items())]


async def test_names(front: Any) -> None:
    reply = await front.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=")
    families = {
        family.name.removeprefix("deepinfer:")
        for family in text_string_to_metric_families(reply.text)
    }
    assert set(NAMES.split()) - families == set()
    assert "process_resident_memory_bytes" in families


async def test_engine_gauges_carry_the_model(front: Any) -> None:
    samples = _samples((await front.get("/metrics")).text)
    model = frozenset({("model_name", "scripted")})
    assert samples["num_requests_waiting", model] == 3
    assert samples["kv_cache_usage_perc", model] == 0.25
    assert samples["prefix_cache_queries_total", model] == 100
    assert samples["prefix_cache_hits_total", model] == 40
    assert samples["num_preemptions_total", model] == 5


async def test_http_counts_by_route_and_status(front: Any) -> None:
    await front.chat()
    await front.chat(n=0)
    for path in ("/nowhere", "/elsewhere"):
        await front.get(path)
    await front.get("/v1/models/scripted")
    samples = _samples((await front.get("/metrics")).text)

    def count(method: str, path: str, status: str) -> float:
        labels = {"method": method, "path": path, "status": status}
        return samples["http_requests_total", frozenset(labels.items())]

    assert count("POST", "/v1/chat/completions", "200") == 1
    assert count("POST", "/v1/chat/completions", "400") == 1
    assert count("other", "other", "404") == 2  # invented paths do not make new series
    assert count("GET", "/v1/models/{model}", "200") == 1


def test_what_the_engine_reports() -> None:
    observer = PrometheusObserver()
    as_protocol: Observer = observer
    as_protocol.on_step(
        StepReport(
            number=0,
            num_rows=3,
            num_prefill_tokens=10,
            num_decode_tokens=2,
            num_sampled_tokens=3,
            device_s=0.02,
            host_s=0.0003,
        )
    )
    as_protocol.on_token_intervals(np.array([0.02, 0.02, 0.02]))
    as_protocol.on_token_intervals(np.array([]))
    as_protocol.on_cancel("abandoned")
    as_protocol.on_loop_lag(0.003)
    as_protocol.on_finish(
        RequestReport(
            request_id="x",
            finish_reason=FinishReason.STOP,
            usage=Usage(7, 5, 2),
            timeline=Timeline(queued_s=0.1, prefill_s=0.2, decode_s=0.4, total_s=0.7),
            time_to_first_token_s=0.3,
        )
    )
    assert _value(observer, "generation_tokens_total") == 3
    assert _value(observer, "prefill_tokens_total") == 10
    assert _value(observer, "prompt_tokens_total") == 7
    assert _value(observer, "inter_token_latency_seconds_count") == 3
    assert _value(observer, "inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert _value(observer, "inter_token_latency_seconds_bucket", le="0.02") == 3
    assert _value(observer, "inter_token_latency_seconds_bucket", le="0.01") == 0
    assert _value(observer, "iteration_tokens_total_bucket", le="16.0") == 1
    assert _value(observer, "step_time_seconds_sum", part="device") == 0.02
    assert _value(observer, "step_time_seconds_sum", part="host") == 0.0003
    assert _value(observer, "loop_lag_seconds_count") == 1
    assert _value(observer, "cancellations_total", cause="abandoned") == 1
    assert _value(observer, "request_success_total", finished_reason="stop") == 1
    assert _value(observer, "time_to_first_token_seconds_sum") == pytest.approx(0.3)
    assert _value(observer, "request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert _value(observer, "e2e_request_latency_seconds_bucket", le="+Inf") == 1


def test_a_request_without_a_token_has_no_token_times() -> None:
    observer = PrometheusObserver()
    observer.on_finish(
        RequestReport(
            request_id="x",
            finish_reason=FinishReason.CANCELLED,
            usage=Usage(7, 0),
            timeline=Timeline(queued_s=0.1, total_s=0.1),
            time_to_first_token_s=None,
        )
    )
    assert _value(observer, "time_to_first_token_seconds_count") == 0
    assert _value(observer, "request_time_per_output_token_seconds_count") == 0
    assert _value(observer, "e2e_request_latency_seconds_count") == 1


def test_a_value_on_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.buckets() == ([("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)], 8.0)
    histogram.observe_all(np.array([0.5, 1.0, 1.5, 2.0, 3.0]))
    assert histogram.buckets() == ([("1.0", 4.0), ("2.0", 8.0), ("+Inf", 10.0)], 16.0)


def test_it_observes_all_that_an_engine_reports() -> None:
    reports = {name for name in vars(Observer) if name.startswith("on_")}
    assert len(reports) >= 5
    assert reports <= set(vars(PrometheusObserver))


def test_two_observers_share_nothing() -> None:
    one, other = PrometheusObserver(), PrometheusObserver()
    one.on_cancel("closed")
    assert b'cause="closed"' not in other.exposition()
