# SPDX-License-Identifier: Apache-2.0
"""Metric names, labels, types and values; the log line; the offline reader."""

from __future__ import annotations

import logging
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.v1.engine.fakes import make_vllm_config
from vllm.config.draft_methods.replay import ReplaySettings
from vllm.v1.engine import FinishReason, SchedulerStats
from vllm.v1.metrics import loggers
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.prometheus import metrics_text
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector, get_metrics_snapshot
from vllm.v1.metrics.stats import IterationStats, RequestStateStats

#: name -> type, as clients expect them
EXPECTED = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "engine_sleep_state": "gauge",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "external_prefix_cache_queries": "counter",
    "external_prefix_cache_hits": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
    "spec_decode_num_draft_tokens_per_pos": "counter",
    "spec_decode_num_drafts_allowed": "gauge",
    "spec_decode_num_steps": "counter",
}


class Speculative:
    num_drafts = 1
    draft_settings = ReplaySettings(num_speculative_tokens=1)


@pytest.fixture
def config():
    config = make_vllm_config(model="some/model")
    config.cache_config.num_gpu_blocks = 77
    object.__setattr__(config, "speculative_config", Speculative())
    return config


@pytest.fixture
def registry():
    return CollectorRegistry()


def iteration_with_one_request():
    iteration = IterationStats()
    stats = RequestStateStats(arrival_ts=1.0, num_prompt_tokens=9, num_cached_tokens=4)
    iteration.add_tokens(stats, 1, 3.0, (1.5, 2.0))
    iteration.add_tokens(stats, 1, 3.5, None)
    iteration.add_finished(stats, FinishReason.LENGTH, 3.5, 2, 1, 2)
    return iteration


def test_names_and_types(config, registry):
    EngineMetrics(config, registry, 0)
    text = generate_latest(registry).decode()
    types = dict(re.findall(r"^# TYPE vllm:(\S+) (\w+)$", text, re.M))
    for name, kind in EXPECTED.items():
        assert types[f"{name}_total" if kind == "counter" else name] == kind
    info = re.search(r"^vllm:cache_config_info\{(.*)\} 1.0$", text, re.M).group(1)
    assert 'block_size="16"' in info and 'num_gpu_blocks="77"' in info


def test_text_form_that_clients_parse(config, registry):
    logger = PrometheusStatLogger(config, 0, registry)
    stats = SchedulerStats(
        num_running=2,
        kv_cache_usage=0.25,
        num_drafts=5,
        num_draft_tokens=5,
        num_accepted_tokens=2,
        accepted_per_position=[2],
        drafted_per_position=[5],
        steps_by_drafts={0: 3, 1: 7},
        prefix_queries=9,
    )
    logger.record(stats, iteration_with_one_request())
    logger.record(None, IterationStats())
    text = generate_latest(registry).decode()
    labels = r'\{engine="0",model_name="some/model"'
    for pattern in (
        r"^vllm:spec_decode_num_drafts_total" + labels + r"\} 5.0$",
        r"^vllm:spec_decode_num_accepted_tokens_per_pos_total" + labels + r',position="0"\} 2.0$',
        r"^vllm:spec_decode_num_draft_tokens_per_pos_total" + labels + r',position="0"\} 5.0$',
        r'^vllm:spec_decode_num_steps_total\{drafts="0",' + labels[2:] + r"\} 3.0$",
        r'^vllm:spec_decode_num_steps_total\{drafts="1",' + labels[2:] + r"\} 7.0$",
        r"^vllm:num_requests_running" + labels + r"\} 2.0$",
        r"^vllm:kv_cache_usage_perc" + labels + r"\} 0.25$",
        r"^vllm:prompt_tokens_total" + labels + r"\} 9.0$",
        r"^vllm:prompt_tokens_cached_total" + labels + r"\} 4.0$",
        r"^vllm:request_prefill_kv_computed_tokens_sum" + labels + r"\} 5.0$",
        r"^vllm:request_max_num_generation_tokens_sum" + labels + r"\} 2.0$",
        r"^vllm:generation_tokens_total" + labels + r"\} 2.0$",
        r'^vllm:request_success_total\{engine="0",finished_reason="length",model_name=\S+ 1.0$',
        r'^vllm:time_to_first_token_seconds_bucket\{engine="0",le="2.5",model_name=\S+ 1.0$',
        r"^vllm:time_to_first_token_seconds_sum" + labels + r"\} 2.0$",
        r"^vllm:inter_token_latency_seconds_sum" + labels + r"\} 0.5$",
        r"^vllm:e2e_request_latency_seconds_sum" + labels + r"\} 2.5$",
        r"^vllm:request_queue_time_seconds_sum" + labels + r"\} 0.5$",
        r"^vllm:request_prefill_time_seconds_sum" + labels + r"\} 1.0$",
        r"^vllm:request_inference_time_seconds_sum" + labels + r"\} 1.5$",
    ):
        assert re.search(pattern, text, re.M), pattern


def test_blocks_times_block_size_is_the_capacity(config, registry):
    config.cache_config.capacity_tokens = 1600
    EngineMetrics(config, registry, 0)
    info = re.search(r"^vllm:cache_config_info\{(.*)\}", generate_latest(registry).decode(), re.M)
    for label in ('block_size="16"', 'num_gpu_blocks="100"', 'num_pages="77"'):
        assert label in info.group(1)


def by_label(registry, metric, label):
    found = [m for m in get_metrics_snapshot(registry) if m.name == f"vllm:{metric}"]
    return {m.labels[label]: m.value for m in found}


def test_who_waits_for_what(config, registry):
    logger = PrometheusStatLogger(config, 0, registry)
    logger.record(SchedulerStats(num_waiting=5, num_deferred=2), IterationStats())
    waiting = by_label(registry, "num_requests_waiting_by_reason", "reason")
    assert waiting == {"capacity": 3, "deferred": 2}


def test_sleep_state(config, registry):
    logger = PrometheusStatLogger(config, 0, registry)
    for level, state in ((0, "awake"), (1, "weights_offloaded"), (2, "discard_all"), (0, "awake")):
        logger.record_sleep(level)
        states = by_label(registry, "engine_sleep_state", "sleep_state")
        assert [name for name, value in states.items() if value] == [state]


def test_reader(config, registry):
    logger = PrometheusStatLogger(config, 0, registry)
    logger.record(
        SchedulerStats(num_drafts=4, num_accepted_tokens=1, accepted_per_position=[1]),
        iteration_with_one_request(),
    )
    found = {}
    for metric in get_metrics_snapshot(registry):
        found.setdefault(metric.name, []).append(metric)
    labels = {"engine": "0", "model_name": "some/model"}
    assert found["vllm:spec_decode_num_drafts"] == [
        Counter("vllm:spec_decode_num_drafts", labels, 4)
    ]
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos"] == [
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, [1])
    ]
    assert isinstance(found["vllm:num_requests_running"][0], Gauge)
    (ttft,) = found["vllm:time_to_first_token_seconds"]
    assert isinstance(ttft, Histogram)
    assert (ttft.count, ttft.sum, ttft.buckets["1.0"], ttft.buckets["+Inf"]) == (1, 2.0, 0, 1)
    success = {m.labels["finished_reason"]: m.value for m in found["vllm:request_success"]}
    assert success == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_text_of_an_engine_and_its_process(config, registry):
    """As one registry with all of them would write it."""
    EngineMetrics(config, registry, 0)
    text = metrics_text(registry)
    for name in (b"python_gc_objects_collected_total", b"vllm:num_requests_running"):
        assert text.count(b"# TYPE " + name.removesuffix(b"_total")) == 1
    families = re.findall(rb"^# TYPE (\S+)", text, re.M)
    assert len(families) == len(set(families))


def test_without_speculation_there_are_no_such_metrics(registry):
    EngineMetrics(make_vllm_config(), registry, 0)
    assert b"spec_decode" not in generate_latest(registry)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def test_log_line(monkeypatch):
    handler = Lines()
    log = logging.getLogger("vllm.v1.metrics.loggers")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "10")
    now = [0.0]
    logger = LoggingStatLogger(clock=lambda: now[0])
    now[0] = 5.0
    logger.record(SchedulerStats(num_running=2), iteration_with_one_request())
    assert not handler.texts
    now[0] = 10.0
    stats = SchedulerStats(num_waiting=3, prefix_queries=8, prefix_hits=2)
    logger.record(stats, IterationStats())
    (text,) = handler.texts
    assert "0.9 tokens/s" in text and "0.2 tokens/s" in text
    assert "running: 0 reqs, waiting: 3 reqs" in text and "25.0%" in text
    now[0] = 19.0
    logger.record(None, IterationStats())
    assert len(handler.texts) == 1


def test_the_line_of_speculation(monkeypatch):
    lines = []
    monkeypatch.setattr(loggers.logger, "info", lambda text, *args: lines.append(text % args))
    now = [0.0]
    logger = LoggingStatLogger(clock=lambda: now[0])
    stats = SchedulerStats()
    for drafted, accepted in ((2, 2), (1, 0), (5, 2), (2, 1)):
        stats.add_drafts(drafted, accepted)
    logger.record(stats, IterationStats())
    now[0] = 10.0
    logger.record(stats, IterationStats())
    assert lines[1] == (
        "SpecDecoding metrics: Mean acceptance length: 2.25, Accepted throughput: 1.00 tokens/s, "
        "Drafted throughput: 2.00 tokens/s, Accepted: 10 tokens, Drafted: 20 tokens, "
        "Per-position acceptance rate: 0.750, 0.667, 0.000, 0.000, 0.000, "
        "Avg Draft acceptance rate: 50.0%"
    )
    now[0] = 20.0
    logger.record(SchedulerStats(), IterationStats())
    assert len(lines) == 3, "nothing was drafted"


def test_requests_that_never_ran_have_no_intervals():
    iteration = IterationStats()
    iteration.add_finished(RequestStateStats(arrival_ts=1.0), FinishReason.ABORT, 2.0, None, 1)
    (finished,) = iteration.finished
    assert finished.queued_time is finished.prefill_time is finished.time_per_output_token is None
    assert finished.e2e_latency == 1.0
