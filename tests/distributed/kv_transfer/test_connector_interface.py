# SPDX-License-Identifier: Apache-2.0
"""The connector base class, the registry, and the process-wide connector."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.extraction_harness import (
    cache_config,
    extraction_config,
    transfer_config,
)
from tests.distributed.kv_transfer.toy_connectors import (
    HybridConnector,
    PlainConnector,
    plain,
)
from vllm.config import KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import (
    connector_acts_on_every_layer,
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
    is_v1_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.exceptions import VLLMValidationError

MODULE = "tests.distributed.kv_transfer.toy_connectors"


@pytest.fixture
def connector() -> KVConnectorBase_V1:
    return PlainConnector(VllmConfig(kv_transfer_config=plain()), KVConnectorRole.WORKER, None)


@pytest.fixture
def no_group() -> Iterator[None]:
    ensure_kv_transfer_shutdown()
    yield
    ensure_kv_transfer_shutdown()


def test_names() -> None:
    assert KVConnectorBase is KVConnectorBase_V1
    assert (KVConnectorRole.SCHEDULER.value, KVConnectorRole.WORKER.value) == (0, 1)


def test_abstract_methods_are_exactly_the_documented_ones() -> None:
    assert KVConnectorBase_V1.__abstractmethods__ == {
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
    }
    assert SupportsHMA.__abstractmethods__ == {"request_finished_all_groups"}
    parameters = list(inspect.signature(KVConnectorBase_V1.__init__).parameters)
    assert parameters == ["self", "vllm_config", "role", "kv_cache_config"]


def test_defaults(connector: KVConnectorBase_V1) -> None:
    assert connector.get_finished({"a"}) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.take_failed_requests() == {}
    assert connector.get_kv_connector_stats() is None
    assert connector.get_kv_connector_kv_cache_events() is None
    assert connector.build_connector_worker_meta() is None
    assert connector.get_handshake_metadata() is None
    assert connector.request_finished(None, []) == (False, None)  # type: ignore[arg-type]
    assert list(connector.take_events()) == []
    assert connector.get_finished_count() is None
    assert connector.has_pending_push_work() is False
    assert connector.reset_cache() is None
    assert connector.prefer_cross_layer_blocks is False
    assert PlainConnector.requires_piecewise_for_cudagraph({}) is False
    assert PlainConnector.reads_recurrent_state({}) is True
    assert PlainConnector.acts_on_every_layer({}) is True
    assert connector.will_read_recurrent_state(KVConnectorMetadata()) is True
    assert PlainConnector.get_required_kvcache_layout(VllmConfig()) is None
    with pytest.raises(TypeError):
        KVConnectorBase_V1.get_required_kvcache_layout(VllmConfig())


def test_metadata_binding(connector: KVConnectorBase_V1) -> None:
    assert not connector.has_connector_metadata()
    with pytest.raises(AssertionError):
        connector._get_connector_metadata()
    meta = KVConnectorMetadata()
    connector.bind_connector_metadata(meta)
    assert connector._get_connector_metadata() is meta is connector._connector_metadata
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()


def test_attributes_subclasses_use() -> None:
    vllm_config, kv_config = VllmConfig(kv_transfer_config=plain()), cache_config()
    connector = PlainConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_config)
    assert connector._vllm_config is vllm_config
    assert connector._kv_transfer_config is vllm_config.kv_transfer_config
    assert connector._kv_cache_config is kv_config
    assert connector.role is connector._role is KVConnectorRole.SCHEDULER
    with pytest.raises(ValueError, match="kv_transfer_config"):
        PlainConnector(VllmConfig(), KVConnectorRole.WORKER, None)


def test_handshake_by_pipeline_rank_is_flattened(connector: KVConnectorBase_V1) -> None:
    seen: dict[int, Any] = {}
    connector.set_xfer_handshake_metadata = seen.update  # type: ignore[method-assign]
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): "a", (0, 1): "b"})  # type: ignore[dict-item]
    assert seen == {0: "a", 1: "b"}


def test_supports_hma() -> None:
    assert not supports_hma(PlainConnector) and supports_hma(HybridConnector)
    hybrid = HybridConnector(VllmConfig(kv_transfer_config=plain("HybridConnector")), None)  # type: ignore[arg-type]
    assert supports_hma(hybrid) and not supports_hma(object())
    assert KVConnectorFactory.supports_hma_config(plain("HybridConnector"))
    assert not KVConnectorFactory.supports_hma_config(plain())


def test_module_path_wins_over_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plain("HybridConnector")
    assert KVConnectorFactory.get_connector_class(config).__name__ == "HybridConnector"
    config = transfer_config("ExampleConnector")
    assert KVConnectorFactory.get_connector_class(config).__module__.startswith("vllm.")
    config.kv_connector_module_path = MODULE
    with pytest.raises(ValueError, match="no class 'ExampleConnector'"):
        KVConnectorFactory.get_connector_class(config)
    config.kv_connector_module_path = ""
    with pytest.raises(ValueError, match="kv_connector_module_path"):
        KVConnectorFactory.get_connector_class(config)
    config.kv_connector_module_path = "tests.no.such.module"
    with pytest.raises(VLLMValidationError, match="such.module' cannot be imported: .*'tests.no'"):
        KVConnectorFactory.get_connector_class(config)
    (tmp_path / "lacks_another.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    config.kv_connector_module_path = "lacks_another"
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        KVConnectorFactory.get_connector_class(config)


def test_registry() -> None:
    with pytest.raises(ValueError, match="NoSuchConnector"):
        KVConnectorFactory.get_connector_class_by_name("NoSuchConnector")
    with pytest.raises(ValueError, match="already registered"):
        KVConnectorFactory.register_connector("ExampleConnector", "a", "b")
    for name in (
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlHiddenStatesConnector",
        "OffloadingConnector",
        "P2pConnector",
        "RingHiddenStatesConnector",
        "StreamHiddenStatesConnector",
    ):
        assert KVConnectorFactory.get_connector_class_by_name(name).__name__ == name


@pytest.mark.parametrize(
    "name",
    [
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "SimpleCPUOffloadConnector",
        "DecodeBenchConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MoRIIOConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
    ],
)
def test_known_names_that_do_not_ship(name: str) -> None:
    with pytest.raises(
        ImportError, match=f"{name}.*(kv_connector_module_path|use (Offloading|Nixl)Connector)"
    ):
        KVConnectorFactory.get_connector_class_by_name(name)


def test_registration_does_not_import() -> None:
    code = (
        "import sys, vllm.distributed.kv_transfer.kv_connector.factory\n"
        "assert not [m for m in sys.modules if m.endswith('multi_connector')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def one_geometry(name: str = "PlainConnector") -> VllmConfig:
    """As resolved for a connector that handles one state group."""
    return VllmConfig(
        kv_transfer_config=plain(name),
        scheduler_config=SchedulerConfig(disable_hybrid_kv_cache_manager=True),
    )


@pytest.mark.parametrize(
    "name", ["PlainConnector", "ConfigNamedConnector", "AnyArgumentsConnector"]
)
def test_constructors_are_called_by_position(name: str) -> None:
    vllm_config, caches = one_geometry(name), cache_config(16, None)
    made = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.SCHEDULER, caches)
    assert made._vllm_config is vllm_config and made._kv_cache_config is caches
    assert made.role is KVConnectorRole.SCHEDULER


def test_constructor_of_the_old_shape() -> None:
    vllm_config = VllmConfig(kv_transfer_config=plain("OldConnector"))
    with pytest.raises(ValueError, match="OldConnector.*kv_cache_config"):
        KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, cache_config())


def test_one_group_connector_and_several_groups() -> None:
    vllm_config, one_group = one_geometry(), cache_config(16, None)
    with pytest.raises(ValueError, match="one state group.*keeps 2"):
        KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, cache_config())
    hybrid = VllmConfig(kv_transfer_config=plain())
    for role in KVConnectorRole:
        for caches in (one_group, cache_config(), None):
            with pytest.raises(ValueError, match="set --disable-hybrid-kv-cache-manager"):
                KVConnectorFactory.create_connector(hybrid, role, caches)
    made = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, one_group)
    assert isinstance(made, PlainConnector)
    with pytest.raises(ValueError, match="kv_transfer_config"):
        KVConnectorFactory.create_connector(VllmConfig(), KVConnectorRole.WORKER, one_group)


def test_connector_outside_of_workers(no_group: None) -> None:
    assert not has_kv_transfer_group() and not is_v1_kv_transfer_group()
    with pytest.raises(RuntimeError, match="no KV connector"):
        get_kv_transfer_group()
    ensure_kv_transfer_initialized(VllmConfig(), None)
    assert not has_kv_transfer_group()
    ensure_kv_transfer_initialized(one_geometry(), cache_config(16, None))
    made = get_kv_transfer_group()
    assert made.role is KVConnectorRole.WORKER and is_v1_kv_transfer_group()
    assert connector_acts_on_every_layer()
    ensure_kv_transfer_initialized(one_geometry(), cache_config(16, None))
    assert get_kv_transfer_group() is made
    ensure_kv_transfer_shutdown()
    assert not has_kv_transfer_group() and not connector_acts_on_every_layer()


def test_real_out_of_tree_connectors_import() -> None:
    """speculators' own connectors subclass ours; only the accelerator-bound one needs a GPU."""
    pytest.importorskip("hs_connectors")
    for name, module in (
        ("FP8HiddenStatesConnector", "hs_connectors.fp8_hidden_states_connector"),
        ("MooncakeHiddenStatesConnector", "hs_connectors.mooncake_hidden_states_connector"),
    ):
        config = transfer_config(name)
        config.kv_connector_module_path = module
        found = KVConnectorFactory.get_connector_class(config)
        assert supports_hma(found) and not found.__abstractmethods__
        assert found.get_required_kvcache_layout(extraction_config(config)) == "NHD"


def test_cache_layout_and_block_copies() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector import utils

    with set_current_vllm_config(VllmConfig(kv_transfer_config=plain())):
        assert utils.get_kv_connector_cache_layout() == "NHD"
    src, dst = {"a": torch.arange(12.0).reshape(4, 3)}, {"a": torch.zeros(5, 3)}
    utils.copy_kv_blocks(src, dst, [1, 3], [4, 0], "d2h")
    assert dst["a"][[4, 0]].tolist() == src["a"][[1, 3]].tolist()
    assert not dst["a"][[1, 2, 3]].any()
    with pytest.raises(ValueError, match="1 source blocks"):
        utils.copy_kv_blocks(src, dst, [1], [], "d2h")


@pytest.mark.parametrize("name", ["OffloadingConnector", "NixlConnector"])
def test_what_moves_whole_blocks_leaves_the_layers_alone(name: str) -> None:
    """Else each layer would break the graphs for calls that do nothing."""
    transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both")
    connector_class = KVConnectorFactory.get_connector_class(transfer)
    assert not connector_class.acts_on_every_layer({})
    assert not connector_class.reads_recurrent_state({})
    both = [{"kv_connector": name, "kv_role": "kv_both"}]
    assert not MultiConnector.acts_on_every_layer({"connectors": both})


@pytest.mark.parametrize(
    ("name", "role", "loads"),
    [
        ("OffloadingConnector", "kv_both", (True, True, True)),
        ("P2pConnector", "kv_consumer", (True, True, False)),
        ("NixlConnector", "kv_both", (True, True, False)),
        ("ExampleConnector", "kv_both", (False, False, False)),
        ("ExampleConnector", "kv_producer", (True, True, True)),
    ],
)
def test_what_comes_back_for_a_drafter(name: str, role: str, loads: tuple[bool, ...]) -> None:
    """Rows that depend on no later token, on the next one, and on two; a child that loads nothing
    brings nothing that could be wrong."""
    child = {"kv_connector": name, "kv_role": role}
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    several = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [offloading, child]},
    )
    found = tuple(MultiConnector.loads_drafter_rows(several, ahead) for ahead in range(3))
    assert found == loads
    own = KVTransferConfig(**child)
    if own.is_kv_consumer:
        alone = KVConnectorFactory.get_connector_class(own)
        assert tuple(alone.loads_drafter_rows(own, ahead) for ahead in range(3)) == loads
