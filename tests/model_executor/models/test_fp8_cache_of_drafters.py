# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers of their own whose checkpoints have scales of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dflash_models import Block, write_dflash
from tests.draft_models import TINY, mtp_tensors, with_mtp, write_eagle3, write_speculators_mtp
from tests.model_executor.harness import get_model
from tests.model_executor.models.test_fp8_cache import config_of
from tests.tiny_models import tiny_model
from vllm import decisions
from vllm.config.draft_methods.dflash import DFlashSettings
from vllm.config.draft_methods.eagle3 import Eagle3Settings
from vllm.config.draft_methods.mtp import MtpSettings
from vllm.kernels.step import Progress
from vllm.model_executor.layers.cache_scales import CacheScales
from vllm.platforms import current_platform
from vllm.v1.spec_decode.dflash_drafter import DFlashDrafter
from vllm.v1.spec_decode.head_drafter import Eagle3Drafter, MtpDrafter

#: makes the target and the drafter's checkpoint (they may be one) and says which drafter reads it
Make = Callable[[Path], tuple[Path, Path, Any, Any]]


def mtp(root: Path) -> tuple[Path, Path, Any, Any]:
    target = with_mtp(tiny_model("qwen3_5"), root / "mtp", mtp_tensors(TINY))
    return target, target, MtpDrafter, MtpSettings()


def speculators_mtp(root: Path) -> tuple[Path, Path, Any, Any]:
    target = tiny_model("qwen3_5")
    draft = write_speculators_mtp(root / "mtp", target, mtp_tensors(TINY))
    return target, draft, MtpDrafter, MtpSettings(model=str(draft))


def eagle3(root: Path) -> tuple[Path, Path, Any, Any]:
    target = tiny_model("qwen3_5")
    draft = write_eagle3(root / "eagle3", target, TINY)
    return target, draft, Eagle3Drafter, Eagle3Settings(model=str(draft))


def dflash(root: Path) -> tuple[Path, Path, Any, Any]:
    target = tiny_model("qwen3_5")
    draft = write_dflash(root / "dflash", target, TINY, Block(size=4))
    return target, draft, DFlashDrafter, DFlashSettings(model=str(draft))


def add_scales(path: Path, k: float, v: float) -> None:
    """To every layer with keys and values, beside their projections."""
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".k_proj.weight")]:
        layer = name.removesuffix(".k_proj.weight")
        tensors[f"{layer}.k_proj.k_scale"] = torch.tensor(k)
        tensors[f"{layer}.v_proj.v_scale"] = torch.tensor(v)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("make", [mtp, speculators_mtp, eagle3, dflash])
@pytest.mark.parametrize("dtype", ["fp8", "auto"])
def test_scales_are_those_of_the_drafters_checkpoint(
    make: Make, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a cache that is not float8 have no use, which is no mistake of the checkpoint."""
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", True)
    target, draft, drafter_type, settings = make(tmp_path)
    add_scales(draft, 0.5, 4.0)
    config = config_of(target, dtype)
    resolved = settings.resolved(config.model_config, None)
    progress = Progress.create(2, 8, torch.device("cpu"))
    drafter = drafter_type(config, resolved, progress)
    head = drafter.build_model(get_model(config))
    decisions.clear()
    drafter.load_weights()
    scales = [module for module in head.modules() if isinstance(module, CacheScales)]
    records = [d for d in decisions.decisions() if "k_scale" in d.what]
    if dtype == "fp8":
        assert scales and {(one.k, one.v) for one in scales} == {(0.5, 4.0)}
        assert not records
    else:
        assert not scales and [record.chosen for record in records] == ["not loaded"]
