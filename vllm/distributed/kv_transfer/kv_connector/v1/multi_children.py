# SPDX-License-Identifier: Apache-2.0
"""The children of a `MultiConnector`, and what their classes say together before any is made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.capabilities import StateTier
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_messages import (
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
    child_key,
    part_data,
)
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_cache_interface import ArenaPlan

ChildClass = type[KVConnectorBase_V1]


def child_classes(
    extra_config: dict[str, Any], **common: str
) -> Iterator[tuple[ChildClass, KVTransferConfig]]:
    """Each child's class and configuration; `common`: settings of those without their own.
    ValueError when the list is missing or empty."""
    given = extra_config.get("connectors")
    if not isinstance(given, list | tuple) or not given:
        raise VLLMValidationError(
            "MultiConnector needs kv_connector_extra_config.connectors, a non-empty list of "
            "kv_transfer_config objects"
        )
    for item in given:
        own = item if isinstance(item, KVTransferConfig) else KVTransferConfig(**{**common, **item})
        yield KVConnectorFactory.get_connector_class(own), own


def children_of(vllm_config: VllmConfig) -> Iterator[tuple[ChildClass, VllmConfig]]:
    """Each child's class and the engine's configuration as that child sees it. Raises
    `VLLMValidationError` for a policy of its own: the scheduler has one for all loads."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    extra, policy = transfer.kv_connector_extra_config, transfer.kv_load_failure_policy
    common = {"engine_id": transfer.engine_id, "kv_load_failure_policy": policy}
    for child_cls, config in child_classes(extra, **common):
        if (own := config.kv_load_failure_policy) != policy:
            raise VLLMValidationError(
                f"{config.kv_connector} in a MultiConnector: kv_load_failure_policy {own!r} is set "
                f"beside connectors, for all of them, where it is {policy!r}",
                parameter="kv_load_failure_policy",
                value=own,
            )
        child_config = copy.copy(vllm_config)
        child_config.kv_transfer_config = config
        yield child_cls, child_config


def _extra_configs(extra_config: dict[str, Any]) -> Iterator[tuple[ChildClass, dict[str, Any]]]:
    for child_cls, config in child_classes(extra_config):
        yield child_cls, config.kv_connector_extra_config


def _made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, but for a name that has been made already what was made then."""
    made: dict[str, Any] = {}

    def make_or_find(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in made:
            made[name] = make(name, *args, **kwargs)
        return made[name]

    return make_or_find


class MultiConnectorClass(KVConnectorBase_V1):
    """The class methods of `MultiConnector`."""

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        children = child_classes(kv_transfer_config.kv_connector_extra_config)
        return all(child.supports_hma_config(config) for child, config in children)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The children's common demand; ValueError when they disagree."""
        demands: dict[str, str] = {}
        for child_cls, child_config in children_of(vllm_config):
            layout = child_cls.get_required_kvcache_layout(child_config)
            if layout is not None:
                demands[layout] = child_cls.__name__
        if len(demands) > 1:
            raise VLLMValidationError(f"connectors need different cache layouts: {demands}")
        return next(iter(demands), None)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        children = _extra_configs(extra_config)
        return any(child.requires_piecewise_for_cudagraph(own) for child, own in children)

    @classmethod
    def acts_on_every_layer(cls, extra_config: dict[str, Any]) -> bool:
        children = _extra_configs(extra_config)
        return any(child.acts_on_every_layer(own) for child, own in children)

    @classmethod
    def reads_recurrent_state(cls, extra_config: dict[str, Any]) -> bool:
        children = _extra_configs(extra_config)
        return any(child.reads_recurrent_state(own) for child, own in children)

    @classmethod
    def loads_drafter_rows(cls, kv_transfer_config: KVTransferConfig, num_ahead: int) -> bool:
        children = child_classes(kv_transfer_config.kv_connector_extra_config)
        return all(
            child.loads_drafter_rows(config, num_ahead)
            for child, config in children
            if config.is_kv_consumer
        )

    @classmethod
    def supports_pipeline_stages(cls, kv_transfer_config: KVTransferConfig) -> bool:
        children = child_classes(kv_transfer_config.kv_connector_extra_config)
        return all(child.supports_pipeline_stages(config) for child, config in children)

    @classmethod
    def supports_several_hosts(cls, kv_transfer_config: KVTransferConfig) -> bool:
        children = child_classes(kv_transfer_config.kv_connector_extra_config)
        return all(child.supports_several_hosts(config) for child, config in children)

    @classmethod
    def state_tiers(
        cls, kv_transfer_config: KVTransferConfig, plan: ArenaPlan, num_ranks: int
    ) -> list[StateTier]:
        return [
            tier
            for child_cls, child in child_classes(kv_transfer_config.kv_connector_extra_config)
            for tier in child_cls.state_tiers(child, plan, num_ranks)
        ]

    @classmethod
    def device_bytes(cls, kv_transfer_config: KVTransferConfig, device_type: str) -> int:
        return sum(
            child_cls.device_bytes(child, device_type)
            for child_cls, child in child_classes(kv_transfer_config.kv_connector_extra_config)
        )

    # ---- front end -----------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> MultiKVConnectorStats | None:
        """Children are found by the class names in the keys, so those must be registered names."""
        built: dict[str, KVConnectorStats] = {}
        for key, part in (data or {}).items():
            child_cls = KVConnectorFactory.get_connector_class_by_name(key.partition(":")[2])
            stats = child_cls.build_kv_connector_stats(part_data(part))
            if stats is not None:
                built[key] = stats
        return MultiKVConnectorStats(built)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiKVConnectorPromMetrics | None:
        """Children whose metrics have one name share it: what they count adds up."""
        children: dict[str, KVConnectorPromMetrics] = {}
        shared = {kind: _made_once(make) for kind, make in metric_types.items()}
        for index, (child_cls, child_config) in enumerate(children_of(vllm_config)):
            made = child_cls.build_prom_metrics(
                child_config, shared, labelnames, per_engine_labelvalues
            )
            if made is not None:
                children[child_key(index, child_cls)] = made
        return MultiKVConnectorPromMetrics(children) if children else None

    @classmethod
    def check_request(
        cls, kv_transfer_config: KVTransferConfig, params: dict[str, Any], num_completions: int
    ) -> None:
        for child_cls, child in child_classes(kv_transfer_config.kv_connector_extra_config):
            child_cls.check_request(child, params, num_completions)
