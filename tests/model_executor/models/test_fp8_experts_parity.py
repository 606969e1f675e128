# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with float8 experts: what is loaded, exactly, and what it computes, against
transformers on the dequantised weights. The arithmetic is that of tests/kernels/test_fp8_experts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from quantized_models import Format, Quantised, quantise_checkpoint
from tiny_models import make_tiny, tiny_model
from torch import Tensor, nn

from tests.model_executor.harness import Chunk, Harness
from tests.model_executor.layers.test_mixture_layer import dequantised
from tests.model_executor.models.test_fp8_parity import (
    EXPLAINED,
    ROUNDINGS,
    Rounding,
    quantised_at_load,
    reference,
)
from tests.nightly import nightly
from vllm.model_executor.layers.moe import mixtures_of

pytestmark = pytest.mark.parity
#: what these checkpoints keep in 16 bits
KEPT = (
    *("in_proj_a", "in_proj_b", "in_proj_ba", "kv_a_proj_with_mqa"),
    *("layers.1.shared_mlp.input_linear", "layers.1.shared_mlp.output_linear"),
)
IDS = list(range(5, 60))
#: prompts that these are; where a processor adds in another order, a value that lies between two of
#: float8's is rounded to the other one, and the rest of its prompt differs
PROMPTS = 5
#: fields of checkpoints by blocks: rows of its linear layers are grouped by head
WHOLE_BLOCKS = {"qwen3_next": {"linear_key_head_dim": 128, "linear_value_head_dim": 128}}


def round_activations(model: nn.Module, rounding: Rounding) -> None:
    """Let the experts of a model of transformers see what the engine's see: they have no fixed
    scales."""
    if rounding is ROUNDINGS["static"]:
        rounding = ROUNDINGS["tensor"]

    def forward(experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        params = dict(experts.named_parameters())
        out, x = torch.zeros_like(x), rounding(x)
        for expert in chosen.unique().tolist():
            token, slot = torch.where(chosen == expert)
            if "gate_up_proj" in params:
                gate, up = (x[token] @ params["gate_up_proj"][expert].t()).chunk(2, -1)
                active = nn.functional.silu(gate) * up
            else:
                active = (x[token] @ params["up_proj"][expert].t()).relu().square()
            down = rounding(active) @ params["down_proj"][expert].t()
            out.index_add_(0, token, down * weights[token, slot, None])
        return out

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.forward = partial(forward, module)  # type: ignore[method-assign]


def checkpoint(family: str, form: Format, path: Path) -> Quantised:
    source = tiny_model(family)
    if form == "block" and family in WHOLE_BLOCKS:
        source = make_tiny(family, path / "16-bit", **WHOLE_BLOCKS[family])
    return quantise_checkpoint(source, path, form, KEPT)


def stacks(harness: Harness) -> list[Tensor]:
    """All experts' matrices, dequantised."""
    found: list[Tensor] = []
    for mixture in mixtures_of(harness.model):
        experts = mixture.experts
        both = [experts.gate_up_proj.data, experts.down_proj.data]
        scales = experts.method.scales(experts)
        if scales is not None:
            pairs = zip(both, (scales.gate_up, scales.down), strict=True)
            both = [dequantised(*pair) for pair in pairs]
        found += both
    return found


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_5_moe", "block"),
        ("qwen3_5_moe", "tensor"),
        ("qwen3_next", "block"),
        ("qwen3_next", "compressed"),
        ("mixtral", "compressed"),
        ("mixtral", "static"),
        ("nemotron_h_moe", "modelopt"),
        ("granite_h", "compressed"),
        ("qwen3_moe", "compressed block"),
        ("deepseek_v3", "block"),
        ("deepseek_v3", "compressed"),
        ("kimi_linear", "tensor"),
        *nightly(("qwen3_next", "tensor")),
    ],
)
def test_experts_are_those_of_the_checkpoint(family: str, form: Format, tmp_path: Path) -> None:
    made = checkpoint(family, form, tmp_path)
    engine, plain = Harness(made.path), Harness(made.dequantised)
    found, expected = stacks(engine), stacks(plain)
    assert len(found) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    starts = range(0, len(IDS), len(IDS) // PROMPTS)
    parts = [IDS[start : start + len(IDS) // PROMPTS] for start in starts]
    logits = torch.stack([engine.logits([Chunk(0, 0, part)]) for part in parts])
    kept = (*KEPT, "kv_b_proj")  # float8 in the checkpoint, but multiplied in the model's dtype
    emulated, exact = (
        reference(made.dequantised, rounding, kept, round_activations, PROMPTS).view_as(logits)
        for rounding in (ROUNDINGS[form], None)
    )
    left, whole = (logits - emulated).norm(dim=(1, 2)), (logits - exact).norm(dim=(1, 2))
    explained = left < (1 - EXPLAINED) * whole
    assert explained.sum() >= PROMPTS - 1, left / whole


def test_chunks_and_decodes_compute_the_same(tmp_path: Path) -> None:
    made = checkpoint("qwen3_5_moe", "block", tmp_path)
    whole = Harness(made.path).generate(IDS, 6)
    assert Harness(made.path).generate(IDS, 6, chunk_size=7) == whole
    assert len(set(whole)) > 1


def test_quantising_at_load_is_the_channel_format(tmp_path: Path) -> None:
    """The same bits as a checkpoint quantised per channel, but for the small gates."""
    source = tiny_model("qwen3_5_moe")
    expected = Harness(checkpoint("qwen3_5_moe", "compressed", tmp_path).path)
    found = Harness(source, config=quantised_at_load(source))
    assert torch.equal(*(model.logits([Chunk(0, 0, IDS)]) for model in (found, expected)))
