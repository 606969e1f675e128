# SPDX-License-Identifier: Apache-2.0
"""Connector names, and how a configuration becomes a connector."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.interface_check import check_interface
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

ConnectorLoader = Callable[[], type[KVConnectorBase_V1]]


class KVConnectorFactory:
    """Registry of connector classes; a class is imported when it is first asked for."""

    _registry: dict[str, ConnectorLoader] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Make `class_name` of `module_path` known as `name`; ValueError for a name in use."""

        def load() -> type[KVConnectorBase_V1]:
            return _load_class(module_path, class_name)

        cls._register(name, load)

    @classmethod
    def register_unavailable(cls, name: str, instead: str) -> None:
        """Reserve `name`; using it raises an ImportError that says what to use `instead`."""

        def load() -> type[KVConnectorBase_V1]:
            raise ImportError(f"KV connector {name!r} does not ship with this engine: {instead}")

        cls._register(name, load)

    @classmethod
    def _register(cls, name: str, loader: ConnectorLoader) -> None:
        if name in cls._registry:
            raise VLLMValidationError(f"KV connector {name!r} is already registered")
        cls._registry[name] = loader

    @classmethod
    def get_connector_class_by_name(cls, name: str) -> type[KVConnectorBase_V1]:
        """The registered class; ValueError for an unknown name, ImportError where it is absent."""
        if name not in cls._registry:
            known = ", ".join(sorted(cls._registry))
            raise VLLMValidationError(
                f"unknown KV connector {name!r}; registered: {known}. A class of your own needs "
                "kv_connector_module_path",
                "kv_connector",
                name,
            )
        return cls._registry[name]()

    @classmethod
    def get_connector_class(cls, kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """The configured class; `kv_connector_module_path` wins over the registry."""
        name = kv_transfer_config.kv_connector
        if name is None:
            raise VLLMValidationError("kv_transfer_config.kv_connector is not set")
        module_path = kv_transfer_config.kv_connector_module_path
        if module_path is None:
            connector_cls = cls.get_connector_class_by_name(name)
        elif module_path == "":
            raise VLLMValidationError(
                "kv_connector_module_path is empty; leave it out or name a module"
            )
        else:
            connector_cls = _load_class(module_path, name)
        check_interface(connector_cls)
        return connector_cls

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether the connector, configured like this, can work with several state groups."""
        return cls.get_connector_class(kv_transfer_config).supports_hma_config(kv_transfer_config)

    @classmethod
    def create_connector(
        cls,
        config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None,
    ) -> KVConnectorBase_V1:
        """The connector of one side.

        ValueError without `kv_transfer_config`, and where the connector can handle only one state
        group but the hybrid allocator is on, or the model keeps several all the same.
        """
        transfer = config.kv_transfer_config
        if transfer is None:
            raise VLLMValidationError("kv_transfer_config must be set to create a connector")
        connector_cls = cls.get_connector_class(transfer)
        if not connector_cls.supports_hma_config(transfer):
            _check_one_group(connector_cls, config, kv_cache_config)
        logger.info("KV connector %s (%s side)", connector_cls.__name__, role.name.lower())
        made = connector_cls(config, role, kv_cache_config)
        if "_kv_transfer_config" not in vars(made):
            raise VLLMValidationError(
                f"{connector_cls.__name__}.__init__ does not call "
                "super().__init__(vllm_config, role, kv_cache_config), which every other call needs"
            )
        return made


def _check_one_group(
    connector_cls: type[KVConnectorBase_V1],
    config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
) -> None:
    """Of a connector that handles no more; see `KVConnectorFactory.create_connector`."""
    instead = "or use a connector that implements SupportsHMA"
    if not config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise VLLMValidationError(
            f"KV connector {connector_cls.__name__} handles one state group, but the hybrid "
            "allocator is on, which may keep several: set --disable-hybrid-kv-cache-manager, "
            f"{instead}"
        )
    num_groups = 1 if kv_cache_config is None else len(kv_cache_config.kv_cache_groups)
    if num_groups > 1:
        raise VLLMValidationError(
            f"KV connector {connector_cls.__name__} handles one state group, but the model keeps "
            f"{num_groups} without the hybrid allocator too: leave out what it keeps besides, "
            f"{instead}"
        )


def _load_class(module_path: str, class_name: str) -> type[KVConnectorBase_V1]:
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_path}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise VLLMValidationError(
            f"kv_connector_module_path {module_path!r} cannot be imported: {error}; install its "
            "package, or name the folder that it lies in in PYTHONPATH",
            parameter="kv_connector_module_path",
            value=module_path,
        ) from error
    found = vars(module).get(class_name)
    if not isinstance(found, type) or not issubclass(found, KVConnectorBase_V1):
        raise VLLMValidationError(
            f"module {module_path!r} has no class {class_name!r} derived from KVConnectorBase_V1",
            parameter="kv_connector",
            value=class_name,
        )
    return found


_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
for _name, _module in (
    ("ExampleConnector", "example_connector"),
    ("ExampleHiddenStatesConnector", "example_hidden_states_connector"),
    ("LiveCaptureConnector", "live_capture_connector"),
    ("MultiConnector", "multi_connector"),
    ("NixlConnector", "nixl_connector"),
    ("NixlHiddenStatesConnector", "nixl_hidden_states_connector"),
    ("OffloadingConnector", "offloading_connector"),
    ("P2pConnector", "p2p_connector"),
    ("RingHiddenStatesConnector", "ring_hidden_states_connector"),
    ("StreamHiddenStatesConnector", "stream_hidden_states_connector"),
):
    KVConnectorFactory.register_connector(_name, f"{_V1}.{_module}", _name)

_OWN_MODULE = (
    "install the package that provides it and name its class and module with kv_connector and "
    "kv_connector_module_path"
)
for _name, _instead in (
    ("LMCacheConnectorV1", f"{_OWN_MODULE} (package `lmcache`)"),
    ("LMCacheMPConnector", f"{_OWN_MODULE} (package `lmcache`)"),
    ("NixlPullConnector", "use NixlConnector"),
    ("NixlPushConnector", "use NixlConnector, which pulls"),
    ("SimpleCPUOffloadConnector", "use OffloadingConnector"),
    ("DecodeBenchConnector", _OWN_MODULE),
    ("MooncakeConnector", _OWN_MODULE),
    ("MooncakeStoreConnector", _OWN_MODULE),
    ("MoRIIOConnector", _OWN_MODULE),
    ("FlexKVConnectorV1", _OWN_MODULE),
    ("HF3FSKVConnector", _OWN_MODULE),
):
    KVConnectorFactory.register_unavailable(_name, _instead)
