# SPDX-License-Identifier: Apache-2.0
"""Steps of models as they are served replay as they run: quantised, as a placement of a supernet,
with drafts and extraction together.

Float8 caches need a GPU (`tests/gpu/test_fp8_gpu.py`); what is stored in mxfp4 is made 16-bit while
it loads, so that its steps are those of its family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from apriel2_models import MIXERS, make_tensors, save, stochastic
from draft_models import TINY, mtp_tensors, with_mtp
from quantized_models import Format, quantise_checkpoint
from tiny_models import tiny_model

from tests.compilation.graph_safety.test_model_steps import assert_replays, settings
from tests.nightly import nightly
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="runs the CPU's kernels"),
]

#: what stays 16-bit: too narrow for blocks of 128
KEPT = ("in_proj_a", "in_proj_b", "kv_a_proj_with_mqa")
#: of each way to keep weights a model; mixtures keep them by expert
STORED: list[tuple[str, Format]] = [("llama", "tensor"), ("mixtral", "block")]
MORE: list[tuple[str, Format]] = [
    *[("qwen3_5", form) for form in ("static", "block", "compressed")],
    *[("mixtral", form) for form in ("tensor", "compressed", "modelopt")],
    ("llama", "compressed block"),
]
AT_LOAD = ("fp8",)
#: kept in no form of its own while steps run
MADE_16_BIT = ("mxfp4",)
LAYERS = 4
#: mixers by layer; the others run one kind in all layers
MIXED = ",".join(list(MIXERS)[:LAYERS])


@pytest.mark.parametrize(("family", "form"), [*STORED, *nightly(*MORE)])
def test_quantised_checkpoints(family: str, form: Format, tmp_path: Path) -> None:
    path = quantise_checkpoint(tiny_model(family), tmp_path, form, KEPT).path
    assert_replays(settings(path, load_format="auto"))


@pytest.mark.parametrize("method", AT_LOAD)
def test_quantised_at_load(method: str) -> None:
    assert_replays(settings(tiny_model("qwen3_5"), quantization=method, load_format="auto"))


@pytest.mark.parametrize("placement", [MIXED, *nightly(*(f"all-{name}" for name in MIXERS))])
def test_placements(placement: str, tmp_path: Path) -> None:
    decoder = stochastic(LAYERS)
    config = settings(save(tmp_path, decoder, make_tensors(decoder)), placement=placement)
    assert_replays(config)


def test_drafts_beside_extraction(tmp_path: Path) -> None:
    """A head drafts, and hidden states are kept besides."""
    method: dict[str, Any] = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 4]}},
        "drafter": {"method": "mtp", "num_speculative_tokens": 2},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "rows")},
    }
    target = with_mtp(tiny_model("qwen3_5"), tmp_path / "draft", mtp_tensors(TINY))
    report = assert_replays(settings(target, method, kv_transfer_config=transfer))
    assert any(name.startswith("drafts") for name in report.replays)
    assert any(name.startswith("decodes of 3 tokens") for name in report.replays)
