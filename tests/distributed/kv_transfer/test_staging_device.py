# SPDX-License-Identifier: Apache-2.0
"""Where state passes through: chosen, recorded, paid for, and the same on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed.kv_transfer.loopback_connector import LoopbackConnector
from tests.distributed.kv_transfer.test_p2p_faults import left_behind
from vllm import decisions
from vllm._extension import CUDA_LIBRARY
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.settings import P2pSettings
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import staging_device_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging_device import Choice, choose
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.tcp_transport import TcpTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import CannotRegister, Transport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p_connector import STAGED
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_outline import outline_model
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.testing.connectors import ConnectorCase
from vllm.testing.connectors.checks import running
from vllm.testing.connectors.engine import SimulatedEngine
from vllm.testing.connectors.layouts import make_config
from vllm.v1.core.layout_plan import Budget, memory_of

STAGING_BYTES = 2**20


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA_LIBRARY.exists():
        pytest.skip("the CUDA ops are not built")
    of_hopper = lambda self, device_id=0: DeviceCapability(9, 0)  # noqa: E731
    monkeypatch.setattr(type(current_platform), "get_device_capability", of_hopper)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def config(**settings: Any) -> KVTransferConfig:
    extra = {"staging_bytes": STAGING_BYTES, "staging_device": "auto", **settings}
    return KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )


# ---- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "on_device"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_a_device_is_used_unless_told_otherwise(
    on_hopper: None, wanted: str, on_device: bool
) -> None:
    assert choose(wanted, "cuda").on_device is on_device
    assert choose(wanted, "cuda").required is (wanted == "cuda")


def test_elsewhere_the_host_is_used_and_the_reason_is_said(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose("auto", "cpu") == Choice(False, "the engine's state is in memory of cpu")
    with pytest.raises(VLLMValidationError, match="staging_device 'cuda': the engine's state is"):
        choose("cuda", "cpu")
    with pytest.raises(VLLMValidationError, match="staging_device 'gpu': give one of auto, cuda"):
        choose("gpu", "cuda")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "has expandable_segments" in choose("auto", "cuda").why
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    older = lambda self, device_id=0: DeviceCapability(8, 0)  # noqa: E731
    monkeypatch.setattr(type(current_platform), "get_device_capability", older)
    assert choose("auto", "cuda") == Choice(False, "the CUDA ops that make digests do not run here")


# ---- memory -------------------------------------------------------------------------------------


def test_device_memory_is_declared(on_hopper: None) -> None:
    one = staging_device_bytes(STAGING_BYTES)
    assert STAGING_BYTES < one < 1.2 * STAGING_BYTES
    both, producer = config(), config()
    producer.kv_role = "kv_producer"
    assert NixlConnector.device_bytes(both, "cuda") == 2 * one
    assert NixlConnector.device_bytes(producer, "cuda") == one
    assert NixlConnector.device_bytes(config(staging_device="cpu"), "cuda") == 0
    assert NixlConnector.device_bytes(both, "cpu") == 0
    del both.kv_connector_extra_config["staging_device"]
    assert NixlConnector.device_bytes(both, "cuda") == 2 * one, "auto is the default"
    child = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": both.kv_connector_extra_config,
    }
    several = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [child, child]},
    )
    assert MultiConnector.device_bytes(several, "cuda") == 4 * one


@pytest.mark.parametrize(("where", "sides"), [("cuda", 2), ("cpu", 0)])
def test_the_arena_gets_what_the_connector_leaves(
    on_hopper: None, where: str, sides: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"staging_bytes": STAGING_BYTES, "staging_device": where}
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    left = []
    for given in (None, {**transfer, "kv_connector_extra_config": settings}):
        engine_config = make_config("attention", tmp_path, kv_transfer_config=given)
        outline, budget = outline_model(engine_config, 1), Budget(device_bytes=2**30)
        with monkeypatch.context() as patch:
            patch.setattr(engine_config.device_config, "device", "cuda")
            left.append(memory_of(engine_config, budget, outline, 1).arena_bytes)
    assert left[0] - left[1] == sides * staging_device_bytes(STAGING_BYTES)


# ---- the two homes ------------------------------------------------------------------------------


class Picky(TcpTransport):
    """Cannot use the first memory that it is offered."""

    def register(self, readable: Tensor | None, target: Tensor | None) -> None:
        if vars(self).setdefault("offers", 0) == 0:
            vars(self)["offers"] = 1
            raise CannotRegister("this is device memory")
        super().register(readable, target)


class PickyConnector(LoopbackConnector):
    """Would stage on the device, with a transport that cannot."""

    transport_keys = ("required",)

    def make_transport(self, rank: int) -> Transport:
        return Picky()

    @classmethod
    def staging_choice(cls, settings: P2pSettings, device_type: str) -> Choice:
        return Choice(True, "the test says so", settings.extra.get("required", False))


def picky(**extra: Any) -> ConnectorCase:
    settings = {"host": "127.0.0.1", "port": 0, "staging_bytes": STAGING_BYTES, **extra}
    return ConnectorCase(
        {
            "kv_connector": "PickyConnector",
            "kv_connector_module_path": __name__,
            "kv_connector_extra_config": settings,
        }
    )


def test_memory_that_peers_cannot_read_is_not_used(tmp_path: Path) -> None:
    """Where nobody asked for it, with a record; where somebody did, it is an error."""
    with running(picky(), "attention", tmp_path / "a") as engine:
        name = engine.add(left_behind(engine))
        engine.settle()
        assert engine.requests[name].num_external_computed_tokens
    [record] = [d for d in decisions.PROCESS.decisions() if d.what == STAGED]
    assert (record.chosen, record.why) == ("host memory", "this is device memory")
    with pytest.raises(CannotRegister, match="this is device memory"):
        SimulatedEngine(picky(required=True), "attention", tmp_path / "b")
