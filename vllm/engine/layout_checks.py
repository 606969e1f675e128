# SPDX-License-Identifier: Apache-2.0
"""What a model cannot do on the workers that it is to have: stages, hosts, replicas that share
experts, and a supernet's placements."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.pipeline_partition import check_enough_layers
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.placements import why_one_at_a_time
from vllm.transformers_utils.model_arch_config_convertor import EXPERTS_KEYS
from vllm.utils.options import flag_name


def check_layout(config: VllmConfig) -> None:
    """Raise `VLLMValidationError` naming the flag to change."""
    _check_placement(config)
    _check_pipeline(config)
    _check_hosts(config)
    _check_shared_experts(config)
    _check_experts(config)


def _check_placement(config: VllmConfig) -> None:
    """`VLLMValidationError` for a placement of what is no supernet or is divided into stages, and
    for requests' placements where all run with one."""
    model = config.model_config
    given = {
        "placement": model.placement,
        "placement_alias": model.placement_alias or None,
        "max_request_placements": model.max_request_placements,
    }
    flag = next((name for name, value in given.items() if value is not None), None)
    if flag is None:
        return
    if not ModelRegistry.has_placements(model.architectures):
        raise VLLMValidationError(
            f"{flag_name(flag)} is about the mixers of a supernet, but {model.architecture} has "
            "one per layer; leave it out",
            parameter=flag,
            value=given[flag],
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise VLLMValidationError(
            f"{flag_name(flag)} beside --pipeline-parallel-size: a supernet cannot be divided into "
            "stages; use --tensor-parallel-size instead, or a checkpoint with one mixer per layer",
            parameter="pipeline_parallel_size",
            value=config.parallel_config.pipeline_parallel_size,
        )
    reason = why_one_at_a_time(config)
    for choice in ("placement_alias", "max_request_placements"):
        if given[choice] is not None and reason is not None:
            raise VLLMValidationError(
                f"{flag_name(choice)} lets requests choose, but {reason}; leave one of them out, "
                "or choose with --placement",
                parameter=choice,
                value=given[choice],
            )


def _check_pipeline(config: VllmConfig) -> None:
    """`VLLMValidationError` for what pipeline stages cannot do."""
    stages, transfer = config.parallel_config.pipeline_parallel_size, config.kv_transfer_config
    if stages == 1:
        return
    check_enough_layers(config.model_config.get_num_layers(), stages)
    flag = f"--pipeline-parallel-size {stages}"
    if config.drafter is not None:
        raise VLLMValidationError(
            f"{flag} beside speculative_config method {config.drafter.method}: drafts are proposed "
            "where all layers are; use --tensor-parallel-size instead, or leave the drafter out",
            parameter="pipeline_parallel_size",
            value=stages,
        )
    if transfer is None or not transfer.is_kv_transfer_instance:
        return
    connector = KVConnectorFactory.get_connector_class(transfer)
    if not connector.supports_pipeline_stages(transfer):
        raise VLLMValidationError(
            f"{flag} beside kv_connector {transfer.kv_connector}, which needs all layers on every "
            "worker; use --tensor-parallel-size instead. Connectors of hidden states work with "
            "stages",
            parameter="pipeline_parallel_size",
            value=stages,
        )


def _check_hosts(config: VllmConfig) -> None:
    """`VLLMValidationError` for what workers on several hosts cannot do."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    nodes = parallel.nnodes
    flag = f"--nnodes {nodes}" if nodes > 1 else "--distributed-executor-backend ray"
    if nodes == 1 and parallel.executor_backend != "ray":
        return
    if config.compilation_config.ready_in is not None:
        raise VLLMValidationError(
            f"--ready-in with {flag}: the hosts' clocks differ, so they would not stop "
            "capturing together; leave it out",
            parameter="ready_in",
        )
    if transfer is None or not transfer.is_kv_transfer_instance:
        return
    connector = KVConnectorFactory.get_connector_class(transfer)
    if not connector.supports_several_hosts(transfer):
        raise VLLMValidationError(
            f"{flag} beside kv_connector {transfer.kv_connector}, which needs all workers on one "
            "host; leave one of them out",
            parameter="kv_transfer_config.kv_connector",
            value=transfer.kv_connector,
        )


def _check_shared_experts(config: VllmConfig) -> None:
    """`VLLMValidationError` for what replicas that share experts cannot do."""
    if not config.parallel_config.replicas_share_experts:
        return
    flags = "--enable-expert-parallel with --data-parallel-size"
    if config.compilation_config.ready_in is not None:
        raise VLLMValidationError(
            f"--ready-in with {flags}: replicas replay graphs of the same sizes, so all are "
            "captured before the start; leave it out",
            parameter="ready_in",
        )


def _check_experts(config: VllmConfig) -> None:
    """`VLLMValidationError` where experts are to be spread and the model's config has none. Where
    it has, only the layers, which workers build, know whether there are some."""
    if config.parallel_config.enable_expert_parallel and not config.model_config.has_experts:
        raise VLLMValidationError(
            "--enable-expert-parallel: the model has no experts (its config.json states none of "
            f"{', '.join(EXPERTS_KEYS)}, or lists layers without any); leave it out",
            "enable_expert_parallel",
        )
