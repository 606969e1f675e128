# SPDX-License-Identifier: Apache-2.0
"""What live capture took and what it dropped, as metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    CounterStats,
    KVConnectorPromMetrics,
)

_SAMPLES, _BYTES, _DROPPED = "samples", "bytes", "dropped_"
#: why a request that was sampled is not in the dataset: its bytes are used up, all writers are
#: busy, or the disk failed
BUDGET, BUSY, FAILED = "budget", "busy", "failed"
REASONS = (BUDGET, BUSY, FAILED)


class LiveCaptureStats(CounterStats):
    """Counts since the last report."""

    def take(self, num_bytes: int) -> None:
        """A sample goes to a writer."""
        self.add(**{_SAMPLES: 1, _BYTES: num_bytes})

    def drop(self, reason: str) -> None:
        """A sample does not become one, for one of `REASONS`."""
        self.add(**{_DROPPED + reason: 1})


class LiveCapturePromMetrics(KVConnectorPromMetrics):
    """`vllm:live_capture_samples`, `_bytes` and `_dropped{reason}`."""

    def make_metrics(self, labelnames: list[str]) -> None:
        name = "vllm:live_capture"
        self._plain = {
            _SAMPLES: self._counter_cls(
                f"{name}_samples", "Live requests given to the writers.", labelnames
            ),
            _BYTES: self._counter_cls(f"{name}_bytes", "Bytes of these.", labelnames),
        }
        self._dropped = self._counter_cls(
            f"{name}_dropped",
            "Live requests that were sampled and are not in the dataset.",
            [*labelnames, "reason"],
        )
        for values in self.per_engine_labelvalues.values():
            for metric in self._plain.values():
                metric.labels(*values)
            for reason in REASONS:
                self._dropped.labels(*values, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            if key in self._plain:
                self._plain[key].labels(*values).inc(count)
            else:
                self._dropped.labels(*values, key.removeprefix(_DROPPED)).inc(count)
