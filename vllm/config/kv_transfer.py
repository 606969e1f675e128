# SPDX-License-Identifier: Apache-2.0
"""KV connectors."""

import uuid
from typing import Any, Literal

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import json_config, option

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]


def _new_engine_id() -> str:
    return str(uuid.uuid4())


@json_config
class KVTransferConfig:
    """Which connector moves state in or out, and its settings."""

    kv_connector: str | None = option(default=None, help="Name of the connector class.")
    engine_id: str = option(
        default_factory=_new_engine_id, help="Name of this engine towards other engines."
    )
    kv_role: KVRole | None = option(
        default=None, help="`kv_producer`, `kv_consumer` or `kv_both`; needed with a connector."
    )
    kv_connector_module_path: str | None = option(
        default=None, help="Module to import the connector from; wins over the registry."
    )
    kv_connector_extra_config: dict[str, Any] = option(
        default_factory=dict, help="Settings of the connector; values may be any object."
    )
    kv_load_failure_policy: Literal["fail", "recompute"] = option(
        default="fail", help="What happens to a request whose state could not be loaded."
    )
    kv_buffer_device: str | None = option(
        default=None, help="Device of transfer buffers; the platform's when absent."
    )
    kv_buffer_size: float = option(default=1e9, help="Bytes of a transfer buffer.")
    kv_rank: int | None = option(default=None, help="This instance's rank in a transfer group.")
    kv_parallel_size: int = option(default=1, help="Instances in a transfer group.")
    kv_ip: str = option(default="127.0.0.1", help="Address for transfers.")
    kv_port: int = option(default=14579, help="Port for transfers.")
    enable_permute_local_kv: bool = option(
        default=False, help="Permute blocks between HND and NHD while transferring."
    )

    def __post_init__(self) -> None:
        if self.kv_connector_module_path == "":
            raise VLLMValidationError(
                "kv_connector_module_path must not be empty; leave it out to use a registered "
                "connector",
                parameter="kv_connector_module_path",
            )
        if self.kv_connector is not None and self.kv_role is None:
            raise VLLMValidationError(
                f"kv_connector {self.kv_connector!r} needs kv_role: kv_producer, kv_consumer or "
                "kv_both",
                parameter="kv_role",
            )
        if not self.engine_id:
            self.engine_id = _new_engine_id()
        if self.kv_buffer_device is None:
            from vllm.platforms import current_platform

            self.kv_buffer_device = current_platform.device_type

    @property
    def is_kv_transfer_instance(self) -> bool:
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_connector is not None and self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_connector is not None and self.kv_role in ("kv_consumer", "kv_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """The connector's setting `key`."""
        return self.kv_connector_extra_config.get(key, default)
