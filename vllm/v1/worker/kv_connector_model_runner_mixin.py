# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a connector step, around the forward pass.

    runner.before_blocks_change(scheduler_output)  # before anything is written
    with runner.maybe_get_kv_connector_output(scheduler_output, context) as report:
        ...  # target forward, sampling, drafter: the connector's metadata is bound throughout
    report  # filled when the block ends

A step without tokens calls `kv_connector_no_forward(scheduler_output)` instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import answers
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.forward_context import ForwardContext
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import RequestError
from vllm.v1.outputs import KVConnectorOutput


class KVConnectorModelRunnerMixin:
    """Order of the calls: `vllm.distributed.kv_transfer.kv_connector.v1.base`."""

    @staticmethod
    @contextmanager
    def maybe_get_kv_connector_output(
        scheduler_output: SchedulerOutput,
        forward_context: ForwardContext,
        wait_for_save: bool = True,
    ) -> Iterator[KVConnectorOutput | None]:
        """One connector step; yields a report that is filled at the end, None without a connector.

        `wait_for_save` is False when no layer runs in the block, so there is nothing to wait for.
        """
        if not has_kv_transfer_group():
            yield None
            return
        connector = get_kv_transfer_group()
        _begin(connector, scheduler_output, forward_context)
        report = KVConnectorOutput()
        try:
            yield report
            if wait_for_save:
                connector.wait_for_save()
            _collect(connector, scheduler_output.finished_req_ids, report)
        finally:
            connector.clear_connector_metadata()

    @classmethod
    def kv_connector_no_forward(cls, scheduler_output: SchedulerOutput) -> KVConnectorOutput | None:
        """A step without tokens: transfers still start and finish."""
        context = ForwardContext(no_compile_layers={}, attn_metadata={})
        with cls.maybe_get_kv_connector_output(
            scheduler_output, context, wait_for_save=False
        ) as report:
            if scheduler_output.pause_s and has_kv_transfer_group():
                get_kv_transfer_group().wait_for_transfers(scheduler_output.pause_s)
        return report

    @staticmethod
    def before_blocks_change(scheduler_output: SchedulerOutput) -> None:
        """Let the connector take what it needs of blocks that this step overwrites, copies between
        blocks included."""
        metadata = scheduler_output.kv_connector_metadata
        if metadata is not None and has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(metadata)

    @staticmethod
    def connector_reads_states(scheduler_output: SchedulerOutput) -> bool:
        """Whether a connector looks at recurrent states of running requests in this step."""
        metadata = scheduler_output.kv_connector_metadata
        if metadata is None or not has_kv_transfer_group():
            return False
        return get_kv_transfer_group().will_read_recurrent_state(metadata)

    @staticmethod
    def take_failed_requests() -> dict[str, RequestError]:
        """Request id -> reason, of requests that the connector cannot serve; call after a step."""
        if not has_kv_transfer_group():
            return {}
        connector = get_kv_transfer_group()
        return answers.failed_requests(connector, connector.take_failed_requests())


def _begin(
    connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput, context: ForwardContext
) -> None:
    metadata = scheduler_output.kv_connector_metadata
    if metadata is None:
        raise RuntimeError("a connector is active, but the step carries no connector metadata")
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(context)


def _collect(
    connector: KVConnectorBase_V1, finished_req_ids: set[str], report: KVConnectorOutput
) -> None:
    connector.begin_reports()
    reported = connector.get_finished(finished_req_ids)
    report.finished_sending, report.finished_recving = answers.finished_transfers(
        connector, reported
    )
    report.invalid_blocks = answers.blocks(connector, connector.get_blocks_with_load_errors())
    report.invalid_block_ids = answers.block_ids(
        connector, connector.get_block_ids_with_load_errors()
    )
    report.kv_connector_stats = answers.stats(connector, connector.get_kv_connector_stats())
    report.kv_cache_events = connector.get_kv_connector_kv_cache_events()
    report.kv_connector_worker_meta = answers.worker_meta(
        connector, connector.build_connector_worker_meta()
    )
