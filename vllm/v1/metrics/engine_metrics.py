# SPDX-License-Identifier: Apache-2.0
"""The engine's Prometheus metrics: names, types and buckets as tables."""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from vllm.v1.engine import FAILURE_STAGES, FinishReason, SchedulerStats
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

_LABELS = ("model_name", "engine")
_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to run.",
    "kv_cache_usage_perc": "Part of state memory in use, 0 to 1.",
}
#: `SchedulerStats` field -> (metric, help)
_SCHEDULER_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Preemptions of running requests."),
    "prefix_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "external_queries": (
        "external_prefix_cache_queries",
        "Tokens looked up at the KV connector.",
    ),
    "external_hits": ("external_prefix_cache_hits", "Tokens found at the KV connector."),
}
_SPEC_COUNTERS = {
    "num_drafts": ("spec_decode_num_drafts", "Drafts made."),
    "num_draft_tokens": ("spec_decode_num_draft_tokens", "Tokens drafted."),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Drafted tokens accepted."),
}
#: by sleep level
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TIMES = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "inter_token_latency_seconds": "Between two messages with tokens of one request.",
    "e2e_request_latency_seconds": "Arrival to end.",
    "request_time_per_output_token_seconds": "Mean time per token after the first.",
    "request_queue_time_seconds": "In the waiting queue.",
    "request_inference_time_seconds": "From first scheduling to last token.",
    "request_prefill_time_seconds": "From first scheduling to first token.",
    "request_decode_time_seconds": "From first to last token.",
}
_SIZES = {
    "request_prompt_tokens": "Prompt tokens of finished requests.",
    "request_generation_tokens": "Generated tokens of finished requests.",
    "request_max_num_generation_tokens": "Tokens of the longest of a request's completions.",
    "request_prefill_kv_computed_tokens": "Prompt tokens computed, not found in a cache.",
    "request_params_n": "Completions asked for.",
    "request_params_max_tokens": "Limit on generated tokens.",
    "iteration_tokens_total": "Prompt and generated tokens of one step.",
}

M = TypeVar("M", bound=MetricWrapperBase)


def _sizes_up_to(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    steps = (m * 10**e for e in range(8) for m in (1, 2, 5))
    return [float(step) for step in steps if step <= limit]


class TallyHistogram(Histogram):
    """`prometheus_client`'s histogram, which takes a value several times at the cost of one."""

    def observe_often(self, amount: float, count: int) -> None:
        """The same as `count` calls of `observe(amount)`."""
        self._raise_if_not_observable()
        self._sum.inc(amount * count)
        bucket = min(bisect_left(self._upper_bounds, amount), len(self._upper_bounds) - 1)
        self._buckets[bucket].inc(count)


class EngineMetrics:
    """The metrics of one engine."""

    def __init__(self, vllm_config: VllmConfig, registry: CollectorRegistry, engine: int) -> None:
        assert vllm_config.model_config is not None
        self._registry = registry
        self._values = {
            "model_name": vllm_config.model_config.served_names[0],
            "engine": str(engine),
        }
        sizes = _sizes_up_to(vllm_config.model_config.max_model_len)
        self.gauges = {n: self._bound(self._gauge(n, h)) for n, h in _GAUGES.items()}
        waiting = self._gauge(
            "num_requests_waiting_by_reason",
            "Requests waiting for room (capacity), or for a grammar, a transfer (deferred).",
            ("reason",),
        )
        self._waiting = {
            reason: waiting.labels(**self._values, reason=reason)
            for reason in ("capacity", "deferred")
        }
        sleeping = self._gauge(
            "engine_sleep_state", "1 for the state the engine is in.", ("sleep_state",)
        )
        self._sleep_states = [
            sleeping.labels(**self._values, sleep_state=state) for state in _SLEEP_STATES
        ]
        self.record_sleep(0)
        self.times = {n: self._bound(self._histogram(n, h, _SECONDS)) for n, h in _TIMES.items()}
        self.sizes = {n: self._bound(self._histogram(n, h, sizes)) for n, h in _SIZES.items()}
        self.scheduler_counters = self._counters(_SCHEDULER_COUNTERS)
        self._group_hits = self._counter(
            "prefix_cache_group_hits", "Tokens each state group could have continued.", ("group",)
        )
        self._lost_tokens = self._counter(
            "prefix_cache_lost_tokens",
            "Tokens once in the prefix cache that were computed again.",
            ("reason",),
        )
        self.prompt_tokens = self._bound(self._counter("prompt_tokens", "Prompt tokens done."))
        self.cached_tokens = self._bound(
            self._counter("prompt_tokens_cached", "Prompt tokens found in a cache.")
        )
        self.generation_tokens = self._bound(
            self._counter("generation_tokens", "Tokens generated.")
        )
        success = self._counter("request_success", "Finished requests.", ("finished_reason",))
        self.success = {
            reason: success.labels(**self._values, finished_reason=str(reason))
            for reason in FinishReason
        }
        failures = self._counter(
            "request_failures",
            "Requests that failed, by what was done for them then.",
            ("stage",),
        )
        self._failures = {s: failures.labels(**self._values, stage=s) for s in FAILURE_STAGES}
        self.spec_counters: dict[str, Counter] = {}
        self.drafts_allowed: Gauge | None = None
        self.steps_by_drafts: dict[int, Counter] = {}
        self._add_speculation(vllm_config)
        self._cache_info = Gauge(
            "vllm:cache_config_info",
            "Configuration of state memory, as labels.",
            ("engine", "model_name", *vllm_config.cache_config.metrics_info()),
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )
        self.show_cache(vllm_config.cache_config)
        self._engine = engine
        self._connector = self._connector_metrics(vllm_config)

    # ---- registration --------------------------------------------------------------------------

    def _gauge(self, name: str, text: str, extra: tuple[str, ...] = ()) -> Gauge:
        return Gauge(
            f"vllm:{name}",
            text,
            (*_LABELS, *extra),
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )

    def _counter(self, name: str, text: str, extra: tuple[str, ...] = ()) -> Counter:
        return Counter(f"vllm:{name}", text, (*_LABELS, *extra), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> TallyHistogram:
        return TallyHistogram(
            f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=buckets
        )

    def _bound(self, metric: M) -> M:
        return metric.labels(**self._values)

    def _counters(self, table: dict[str, tuple[str, str]]) -> dict[str, Counter]:
        return {
            field: self._bound(self._counter(name, text)) for field, (name, text) in table.items()
        }

    def _add_speculation(self, vllm_config: VllmConfig) -> None:
        speculative = vllm_config.speculative_config
        if speculative is None:
            return
        self.spec_counters = self._counters(_SPEC_COUNTERS)
        if vllm_config.drafter is not None:
            self.drafts_allowed = self._bound(
                self._gauge(
                    "spec_decode_num_drafts_allowed",
                    "Draft tokens that the next step may verify per request; 0: none would pay.",
                )
            )
            steps = self._counter(
                "spec_decode_num_steps",
                "Steps by the draft tokens that they might verify per request.",
                ("drafts",),
            )
            self.steps_by_drafts = {
                width - 1: steps.labels(**self._values, drafts=str(width - 1))
                for width in vllm_config.step_widths
            }
        num_drafts = speculative.num_drafts
        self.drafted = self._per_position(
            num_drafts, "draft_tokens", "Tokens drafted, by position in the draft."
        )
        self.accepted = self._per_position(
            num_drafts, "accepted_tokens", "Drafted tokens accepted, by position in the draft."
        )

    def _per_position(self, num_drafts: int, name: str, text: str) -> list[Counter]:
        counter = self._counter(f"spec_decode_num_{name}_per_pos", text, ("position",))
        return [
            counter.labels(**self._values, position=str(position)) for position in range(num_drafts)
        ]

    def _connector_metrics(self, vllm_config: VllmConfig) -> KVConnectorPromMetrics | None:
        transfer = vllm_config.kv_transfer_config
        if transfer is None or not transfer.is_kv_transfer_instance:
            return None
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        def make(kind: type[MetricWrapperBase], *args: Any, **kwargs: Any) -> MetricWrapperBase:
            return kind(*args, **{**kwargs, "registry": self._registry})

        types: dict[type, Callable[..., Any]] = {
            kind: partial(make, kind) for kind in (Gauge, Counter, Histogram)
        }
        values: dict[int, list[object]] = {self._engine: list(self._values.values())}
        connector_class = KVConnectorFactory.get_connector_class(transfer)
        return connector_class.build_prom_metrics(vllm_config, types, list(_LABELS), values)

    # ---- recording -----------------------------------------------------------------------------

    def show_cache(self, cache: CacheConfig) -> None:
        """What state memory is like from now on."""
        self._cache_info.clear()
        self._cache_info.labels(**self._values, **cache.metrics_info()).set(1)

    def record_scheduler(self, stats: SchedulerStats) -> None:
        self.gauges["num_requests_running"].set(stats.num_running)
        self.gauges["num_requests_waiting"].set(stats.num_waiting)
        self._waiting["capacity"].set(stats.num_waiting - stats.num_deferred)
        self._waiting["deferred"].set(stats.num_deferred)
        self.gauges["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        increments = msgspec.structs.asdict(stats)
        for field, counter in (*self.scheduler_counters.items(), *self.spec_counters.items()):
            if increments[field]:
                counter.inc(increments[field])
        for group, tokens in enumerate(stats.group_hits):
            self._group_hits.labels(**self._values, group=str(group)).inc(tokens)
        for reason, tokens in stats.lost_tokens.items():
            self._lost_tokens.labels(**self._values, reason=reason).inc(tokens)
        if self._connector is not None and stats.connector is not None:
            self._connector.observe(stats.connector, self._engine)
        if self.drafts_allowed is not None:
            self.drafts_allowed.set(stats.num_drafts_allowed)
            for drafts, count in stats.steps_by_drafts.items():
                self.steps_by_drafts[drafts].inc(count)
        if self.spec_counters:
            drafted = zip(self.drafted, stats.drafted_per_position, strict=False)
            accepted = zip(self.accepted, stats.accepted_per_position, strict=False)
            for counter, count in (*drafted, *accepted):
                counter.inc(count)

    def record_sleep(self, level: int) -> None:
        """The engine sleeps at `level`, 0 when it is awake."""
        for index, state in enumerate(self._sleep_states):
            state.set(index == level)

    def record_iteration(self, stats: IterationStats) -> None:
        self.prompt_tokens.inc(stats.num_prompt_tokens)
        self.cached_tokens.inc(stats.num_cached_tokens)
        self.generation_tokens.inc(stats.num_generation_tokens)
        if total := stats.num_prompt_tokens + stats.num_generation_tokens:
            self.sizes["iteration_tokens_total"].observe(total)
        for seconds in stats.times_to_first_token:
            self.times["time_to_first_token_seconds"].observe(seconds)
        # Requests of one step mostly waited for the same step before.
        for seconds, count in collections.Counter(stats.inter_token_latencies).items():
            self.times["inter_token_latency_seconds"].observe_often(seconds, count)
        for request in stats.finished:
            self._record_finished(request)
        for stage in stats.failures:
            self._failures[stage].inc()

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self.success[request.finish_reason].inc()
        self.sizes["request_prompt_tokens"].observe(request.num_prompt_tokens)
        self.sizes["request_generation_tokens"].observe(request.num_generation_tokens)
        if request.longest_completion is not None:
            longest = self.sizes["request_max_num_generation_tokens"]
            longest.observe(request.longest_completion)
        computed = request.num_prompt_tokens - request.num_cached_tokens
        self.sizes["request_prefill_kv_computed_tokens"].observe(computed)
        self.sizes["request_params_n"].observe(request.n)
        if request.max_tokens is not None:
            self.sizes["request_params_max_tokens"].observe(request.max_tokens)
        for name, seconds in (
            ("e2e_request_latency_seconds", request.e2e_latency),
            ("request_time_per_output_token_seconds", request.time_per_output_token),
            ("request_queue_time_seconds", request.queued_time),
            ("request_inference_time_seconds", request.inference_time),
            ("request_prefill_time_seconds", request.prefill_time),
            ("request_decode_time_seconds", request.decode_time),
        ):
            if seconds is not None:
                self.times[name].observe(seconds)
