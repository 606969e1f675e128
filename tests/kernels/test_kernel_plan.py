# SPDX-License-Identifier: Apache-2.0
"""What one start finds the next one knows, unless anything that matters has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_compile_ahead import run_compiled
from tiny_models import tiny_model

from tests.extraction_options import extraction
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.kernels.triton import kernel_plan
from vllm.kernels.triton.compile_ahead import Variant
from vllm.kernels.triton.kernel_plan import KernelPlan
from vllm.v1.engine.replicas import replica_configs

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path


def configure(**changes: Any) -> VllmConfig:
    settings = {"model": str(tiny_model("llama")), "dtype": "float32", "max_model_len": 64}
    return EngineArgs(**{**settings, **changes}).create_engine_config()


def plan_of(config: VllmConfig) -> KernelPlan:
    plan = KernelPlan.of(config, CPU)
    assert plan is not None
    return plan


def test_the_second_start_compiles_what_the_first_one_found(tmp_path: Path) -> None:
    first = run_compiled("kernel_plan_script.py", str(tmp_path / "plan.json"), cache=tmp_path)
    assert not first["loaded"] and len(first["compiled"]) == 2
    second = run_compiled("kernel_plan_script.py", str(tmp_path / "plan.json"), cache=tmp_path)
    assert second["loaded"] and second["compiled"] == first["compiled"]
    in_memory = "launched without asking the disk"
    assert len(first[in_memory]) == 2 and second[in_memory] == first[in_memory]


def test_equal_settings_share_a_plan() -> None:
    assert plan_of(configure()).path == plan_of(configure(ready_in=3.0)).path
    assert plan_of(configure()).path.is_relative_to(Path(kernel_plan.envs.VLLM_CACHE_ROOT))


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
        {"kv_offloading_size": 1.0},
        extraction(Path("/nowhere"), [0, 2]),
    ],
    ids=["connector", "offloading", "extraction"],
)
def test_starts_that_name_their_engine_anew_share_a_plan(settings: dict[str, Any]) -> None:
    first, second = (configure(**settings) for _ in range(2))
    assert first.kv_transfer_config and second.kv_transfer_config
    assert first.kv_transfer_config.engine_id != second.kv_transfer_config.engine_id
    assert plan_of(first).path == plan_of(second).path != plan_of(configure()).path


def test_replicas_share_a_plan_unless_each_has_experts_of_its_own() -> None:
    """Those meet in a new directory at every start."""
    plain = replica_configs(configure(data_parallel_size=2))
    alone = configure(data_parallel_size=2, data_parallel_rank=1)
    assert len({plan_of(config).path for config in (*plain, *replica_configs(alone))}) == 1

    def start(directory: str) -> list[Path]:
        replicas = replica_configs(
            configure(
                model=str(tiny_model("mixtral")), data_parallel_size=2, enable_expert_parallel=True
            )
        )
        for config in replicas:
            config.parallel_config.meeting_directory = directory
        return [plan_of(config).path for config in replicas]

    assert len(set(start("/one"))) == 2
    assert start("/one") == start("/two")


def test_stages_and_ranks_have_plans_of_their_own() -> None:
    """A stage has layers of its own, and numbers of a rank may be constants of its kernels."""
    first, second = configure(), configure()
    second.parallel_config.rank = 1
    assert plan_of(first).path != plan_of(second).path


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 32},
        {"max_num_seqs": 3},
        {"dtype": "float16"},
        {"block_size": 32},
        {"model": "qwen3"},
        {"hf_overrides": {"rms_norm_eps": 0.5}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_have_another(change: dict[str, Any]) -> None:
    if "model" in change:
        change = {"model": str(tiny_model(change["model"]))}
    assert plan_of(configure(**change)).path != plan_of(configure()).path


def test_settings_that_cannot_be_compared_have_none() -> None:
    assert KernelPlan.of(configure(additional_config={"an": object()}), CPU) is None


def test_a_plan_of_other_code_is_not_used(tmp_path: Path) -> None:
    KernelPlan(tmp_path / "plan", "this code").store([])
    assert KernelPlan(tmp_path / "plan", "this code").load() == []
    assert KernelPlan(tmp_path / "plan", "that code").load() is None


@pytest.mark.parametrize("name", ["kernel.py", "_C.so", "deep/GPU.json"])
def test_every_file_of_the_package_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(kernel_plan, "_PACKAGE", tmp_path)
    (tmp_path / "deep").mkdir()
    version = kernel_plan._code_version.__wrapped__
    before = version()
    (tmp_path / name).write_text("a")
    created = version()
    (tmp_path / name).write_text("ab")
    assert len({before, created, version()}) == 3
    (tmp_path / "notes.txt").write_text("a")
    assert version() == version()


def test_a_broken_or_discarded_file_is_no_plan(tmp_path: Path) -> None:
    plan = KernelPlan(tmp_path / "plan", "code")
    assert plan.load() is None
    plan.path.write_text("{")
    assert plan.load() is None
    plan.store([])
    plan.discard()
    assert plan.load() is None
    plan.discard()


def test_kernels_from_elsewhere_are_not_kept(tmp_path: Path) -> None:
    class Function:
        def preload(self, specialization: str) -> None: ...

    plan = KernelPlan(tmp_path / "plan", "code")
    plan.store([Variant("plugin.kernel", "{}", Function().preload)])
    assert plan.load() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_plan, "_function", lambda name: Function())
        plan.store([Variant("vllm.kernel", "{}", Function().preload)])
    assert plan.load() is None, "that one has another name"


def test_a_disk_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(kernel_plan.logger.parent, "propagate", True)
    KernelPlan(tmp_path / "file" / "plan", "code").store([])
    assert "not remembered" in caplog.text
