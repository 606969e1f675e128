# SPDX-License-Identifier: Apache-2.0
"""Choice of the platform, and facts about devices without touching them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from vllm import decisions, platforms
from vllm.exceptions import VLLMValidationError
from vllm.platforms import DeviceCapability, Platform, cpu, cuda, current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import (
    CudaPlatform,
    GpuFacts,
    parse_gpu_facts,
    prepare_nccl,
    select_visible,
)

GIB = 2**30
GPUS = (
    GpuFacts("GPU-aa11", "H200", 140 * GIB, (9, 0)),
    GpuFacts("GPU-ab22", "H200", 140 * GIB, (9, 0)),
    GpuFacts("GPU-bb33", "T4", 15 * GIB, (7, 5)),
)


def test_one_instance() -> None:
    assert platforms.current_platform is current_platform
    with pytest.raises(AttributeError):
        platforms.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("wanted", "gpus", "result"),
    [(None, 0, "cpu"), (None, 1, "cuda"), ("cpu", 1, "cpu"), ("cuda", 1, "cuda")],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, gpus: int, result: str
) -> None:
    monkeypatch.setattr(cuda, "count_devices", lambda: gpus)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    if wanted is not None:
        monkeypatch.setenv("VLLM_TARGET_DEVICE", wanted)
    assert platforms._choose().device_type == result


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "count_devices", lambda: 0)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    with pytest.raises(VLLMValidationError, match="no CUDA device"):
        platforms._choose()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    with pytest.raises(ValueError, match="VLLM_TARGET_DEVICE='tpu'.*cpu, cuda"):
        platforms._choose()


@pytest.mark.parametrize("platform", [CpuPlatform(), CudaPlatform()])
def test_what_third_parties_ask(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "gpu_facts", lambda device_id=0: GPUS[device_id])
    on_cuda = platform.device_type == "cuda"
    assert platform.is_cuda() is platform.is_cuda_alike() is on_cuda
    assert platform.is_cpu() is not on_cuda
    for other in ("rocm", "tpu", "xpu", "out_of_tree", "unspecified"):
        assert getattr(platform, f"is_{other}")() is False
    assert platform.is_pin_memory_available() is on_cuda
    assert platform.device_name == platform.device_type
    assert platform.get_device_total_memory() == platform.total_memory_bytes() > 0
    answers = [
        platform.has_device_capability((8, 9)),
        platform.has_device_capability(90),
        platform.has_device_capability(100),
        platform.has_device_capability(80, device_id=2),
        platform.is_device_capability((9, 0)),
        platform.is_device_capability(75, device_id=2),
    ]
    assert answers == ([True, True, False, False, True, True] if on_cuda else [False] * 6)


def test_device_capability() -> None:
    assert CpuPlatform().get_device_capability() is None
    capability = DeviceCapability(9, 0)
    assert capability == (9, 0) and capability.to_int() == 90
    assert capability.as_version_str() == "9.0" and capability.major == 9


def test_seeding_everything() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    current_platform.seed_everything(7)
    first = draw()
    current_platform.seed_everything(7)
    assert draw() == first
    current_platform.seed_everything(None)
    assert draw() != first


def test_choosing_does_not_initialise_cuda() -> None:
    code = (
        "import torch, vllm\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.supported_dtypes, current_platform.total_memory_bytes()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def write_cgroup(tmp_path: Path, limit: str) -> tuple[str, ...]:
    (tmp_path / "max").write_text(limit)
    return (str(tmp_path / "absent"), str(tmp_path / "max"))


def test_cpu_memory_respects_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CGROUP_FILES", write_cgroup(tmp_path, "1000000\n"))
    assert CpuPlatform().total_memory_bytes() == 1_000_000


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096), "x"])
def test_cpu_memory_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(cpu, "_CGROUP_FILES", write_cgroup(tmp_path, limit))
    assert cpu.cgroup_memory() is None
    assert CpuPlatform().total_memory_bytes() == psutil.virtual_memory().total


def test_cpu_facts() -> None:
    platform = CpuPlatform()
    assert platform.is_cpu() and not platform.is_cuda() and not platform.is_cuda_alike()
    assert platform.device_type == "cpu" and not platform.supports_graphs
    assert platform.supported_dtypes[0] is torch.bfloat16
    assert platform.get_device_name()


def test_cuda_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CudaPlatform()
    assert platform.is_cuda() and platform.supports_graphs and platform.device_type == "cuda"
    monkeypatch.setattr(cuda, "_smi_facts", lambda: GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert platform.get_device_name() == "T4" and platform.get_device_name(1) == "H200"
    assert platform.total_memory_bytes() == 15 * GIB
    assert torch.bfloat16 not in platform.supported_dtypes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert torch.bfloat16 in platform.supported_dtypes


def test_nccl_defaults() -> None:
    log = decisions.DecisionLog()
    with log.current():
        ours: dict[str, str] = {}
        prepare_nccl(ours)
        assert ours == {"NCCL_NVLS_ENABLE": "0"}
        (record,) = [d for d in log.decisions() if d.what == "NVLink multicast"]
        assert record.chosen == "off" and "NCCL_NVLS_ENABLE=1" in record.why
        log.clear()
        theirs = {"NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}
        prepare_nccl(theirs)
        assert theirs["NCCL_NVLS_ENABLE"] == "1"
        assert "NVLink multicast" not in [d.what for d in log.decisions()]


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_collectives_that_block_the_host_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=1 makes the host wait"):
        prepare_nccl({name: "1"})


def test_parse_nvidia_smi() -> None:
    text = "GPU-1a, NVIDIA H200, 143771, 9.0\nGPU-2b, NVIDIA T4, 15360, 7.5\n"
    assert parse_gpu_facts(text) == (
        GpuFacts("GPU-1a", "NVIDIA H200", 143771 * 2**20, (9, 0)),
        GpuFacts("GPU-2b", "NVIDIA T4", 15360 * 2**20, (7, 5)),
    )
    assert parse_gpu_facts("") == ()


@pytest.mark.parametrize(
    ("visible", "result"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-bb", [2]),
        ("GPU-a", []),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
    ],
)
def test_visible_devices(visible: str | None, result: list[int]) -> None:
    assert select_visible(GPUS, visible) == tuple(GPUS[i] for i in result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_facts_agree_with_torch() -> None:
    properties = torch.cuda.get_device_properties(0)
    platform = CudaPlatform()
    assert platform.get_device_capability() == (properties.major, properties.minor)
    assert platform.get_device_name() == properties.name
    assert abs(platform.total_memory_bytes() / properties.total_memory - 1) < 0.03
    assert platform.total_memory_bytes() > 0
    assert "CUDA_VISIBLE_DEVICES" not in os.environ or platform.total_memory_bytes() > 0


@pytest.mark.parametrize(
    ("platform", "variable", "value"),
    [
        (CpuPlatform(), "GLOO_SOCKET_IFNAME", "eth1"),
        (CudaPlatform(), "NCCL_SOCKET_IFNAME", "=eth1"),
    ],
)
def test_collectives_go_where_the_other_hosts_are(
    platform: Platform, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "chosen")
    log = decisions.DecisionLog()
    with log.current():
        platform.communicate_over("eth1")
        assert os.environ[variable] == "chosen", "by the user"
    monkeypatch.delenv(variable)
    with log.current():
        platform.communicate_over("eth1")
    assert os.environ[variable] == value
    found = [d for d in log.decisions() if d.what == "network interface of collectives"]
    assert found[-1].chosen in ("chosen", value)
