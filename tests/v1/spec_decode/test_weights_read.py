# SPDX-License-Identifier: Apache-2.0
"""What a step reads of the weights, against the tensors of the checkpoints; vocabularies are padded
to a multiple of 64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.apriel2_models import make_tensors, save, stochastic
from tests.draft_models import TINY, eagle3_tensors, mtp_tensors, with_mtp, write_eagle3
from tests.tiny_models import tiny_model
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_outline import models_on_meta
from vllm.v1.spec_decode.weights_read import WeightsRead


def about(path: Path, *left_out: str, only: str = "", times: int = 1, more: int = 0) -> Any:
    """Bytes of a checkpoint's tensors and `more`; any output head is a tenth of them or more."""
    tensors = load_file(path / "model.safetensors").items()
    kept = [t for name, t in tensors if only in name and not any(part in name for part in left_out)]
    return pytest.approx(times * (sum(tensor.nbytes for tensor in kept) + more), rel=0.06)


def read(target: Path, own_head: bool = False, **speculation: object) -> WeightsRead:
    """With none, one and three passes over the drafter's weights."""
    speculative = {"num_speculative_tokens": 3, **speculation}
    args = EngineArgs(str(target), dtype="float32", speculative_config=speculative)
    _, (model, drafter) = models_on_meta(args.create_engine_config())
    return WeightsRead.of(model, drafter, (0, 1, 3), own_head)


def test_a_head_of_the_target_reads_its_output_head(tmp_path: Path) -> None:
    target = with_mtp(tiny_model("qwen3_5"), tmp_path / "mtp", mtp_tensors(TINY))
    head = load_file(target / "model.safetensors")["lm_head.weight"].nbytes
    found = read(target, method="mtp")
    assert found.target == about(target, "mtp.", "embed_tokens")
    assert found.drafter[1] == about(target, only="mtp.", more=head)
    assert found.drafter == (0, found.drafter[1], 3 * found.drafter[1])


def test_a_head_of_its_own_vocabulary_reads_that_alone(tmp_path: Path) -> None:
    target = tiny_model("qwen3_5")
    draft = write_eagle3(tmp_path / "e3", target, TINY, tensors=eagle3_tensors(TINY, {}))
    found = read(target, method="eagle3", model=str(draft))
    assert found.drafter[2] == about(draft, "embed_tokens", "d2t", "t2d", times=3)


def test_a_draft_model_reads_its_own_output_head() -> None:
    target = tiny_model("llama")
    found = read(target, own_head=True, method="draft_model", model=str(tiny_model("qwen3_5")))
    assert found.drafter[1] == about(tiny_model("qwen3_5"), "embed_tokens", "mtp.")
    assert found.target == about(target, "embed_tokens")


def test_a_supernet_reads_the_mixers_in_use(tmp_path: Path) -> None:
    target = save(tmp_path, stochastic(2), make_tensors(stochastic(2)))
    draft = str(tiny_model("llama"))
    args = EngineArgs(
        str(target),
        dtype="float32",
        placement="all-kda",
        speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": 1},
    )
    _, (model, drafter) = models_on_meta(args.create_engine_config())
    unused = [f"mixers.{name}." for name in ("attention", "sliding_window", "gdn")]
    found = WeightsRead.of(model, drafter, (0, 1), own_head=True)
    assert found.target == about(target, *unused, "embed_tokens")
