# SPDX-License-Identifier: Apache-2.0
"""Float8 checkpoints against transformers on the dequantised weights.

Tightly with activations rounded as the engine rounds them, loosely without: the tiny models amplify
every rounding of an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_models import FORMATS, STATIC_SCALE, Format, Quantised, quantise_checkpoint
from tiny_models import hf_model, tiny_model
from torch import Tensor, nn

from tests.model_executor.harness import Chunk, Harness, make_config
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.engine.resolve import resolve
from vllm.kernels import fp8

pytestmark = pytest.mark.parity
GATES = ("in_proj_a", "in_proj_b")
IDS = list(range(5, 60))
#: what rounding the activations may change
ACTIVATIONS = 0.3
#: the part of it that emulating the rounding must explain; what is near a rounding boundary may
#: still fall to either side
EXPLAINED = 0.75

Rounding = Callable[[Tensor], Tensor]


def _rows(x: Tensor) -> Tensor:
    values, scale = fp8.quantize_rows(x)
    return values.float() * scale


def _groups(x: Tensor) -> Tensor:
    values, scale = fp8.quantize_groups(x)
    return values.float() * scale.repeat_interleave(fp8.GROUP, 1)[:, : x.shape[1]]


def _static(x: Tensor) -> Tensor:
    return fp8.to_fp8(x / STATIC_SCALE).float() * STATIC_SCALE


ROUNDINGS: dict[Format, Rounding] = {
    "tensor": _rows,
    "static": _static,
    "block": _groups,
    "compressed": _rows,
    "modelopt": _static,
    "compressed block": _groups,
}


@torch.no_grad()
def reference(
    path: Path,
    rounding: Rounding | None,
    keep: tuple[str, ...] = GATES,
    prepare: Callable[[nn.Module, Rounding], None] | None = None,
    prompts: int = 1,
) -> Tensor:
    """transformers' logits for `IDS` as so many prompts of equal length, the inputs of quantised
    projections rounded first; `prepare` does so where the model has no module per projection."""
    model = hf_model(path)
    if rounding is not None and prepare is not None:
        prepare(model, rounding)

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        assert rounding is not None
        return rounding(inputs[0].flatten(0, -2)).view_as(inputs[0])

    quantised = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and ("_proj" in name or "_linear" in name)
        and not name.endswith(keep or ("\0",))
    ]
    handles = [m.register_forward_pre_hook(hook) for m in quantised] if rounding else []
    try:
        logits: Tensor = model(torch.tensor(IDS).view(prompts, -1)).logits.flatten(0, 1)
    finally:
        for handle in handles:
            handle.remove()
    return logits


def _distance(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def _checkpoint(family: str, form: Format, keep: tuple[str, ...], path: Path) -> Quantised:
    return quantise_checkpoint(tiny_model(family), path, form, keep)


EVERY_FORM: tuple[tuple[str, tuple[str, ...]], ...] = (
    *(("llama3_rope", ()), ("qwen3_sliding", ()), ("qwen3_5", ())),
    ("qwen3_5_wrapper", GATES),
)
#: of other families one, with modules that stay
ONE_FORM: tuple[tuple[str, tuple[str, ...], Format], ...] = (
    ("nemotron_h", ("layers.0.mixer.in_proj", *(f"mixer.{i}_proj" for i in "qkvo")), "modelopt"),
    ("granite_h_dense", ("layers.1.shared_mlp.input_linear",), "compressed"),
    ("falcon_h1", ("mamba.out_proj",), "tensor"),
    ("olmo_hybrid", (), "block"),
    ("gemma3", (), "static"),
)


@pytest.mark.parametrize(
    ("family", "keep", "form"),
    [
        *((family, keep, form) for family, keep in EVERY_FORM for form in FORMATS),
        *ONE_FORM,
    ],
)
def test_logits(family: str, keep: tuple[str, ...], form: Format, tmp_path: Path) -> None:
    checkpoint = _checkpoint(family, form, keep, tmp_path)
    out = Harness(checkpoint.path).logits([Chunk(0, 0, IDS)])
    emulated = reference(checkpoint.dequantised, ROUNDINGS[form], keep)
    exact = reference(checkpoint.dequantised, None)
    assert _distance(out, exact) < ACTIVATIONS
    assert _distance(out, emulated) < (1 - EXPLAINED) * _distance(out, exact)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_tied"])
def test_chunks_and_decodes_compute_the_same(family: str, tmp_path: Path) -> None:
    checkpoint = _checkpoint(family, "block", GATES, tmp_path)
    whole = Harness(checkpoint.path).generate(IDS, 6)
    assert Harness(checkpoint.path).generate(IDS, 6, chunk_size=7) == whole
    assert len(set(whole)) > 1


def quantised_at_load(path: Path) -> VllmConfig:
    plain = make_config(path)
    model = ModelConfig(
        model=str(path),
        dtype=torch.float32,
        max_model_len=plain.model_config.max_model_len,
        enforce_eager=True,
        quantization="fp8",
    )
    return resolve(
        VllmConfig(model_config=model, cache_config=plain.cache_config, load_config=LoadConfig())
    )


@pytest.mark.parametrize("family", ["llama3_rope", "qwen3_5"])
def test_quantising_at_load_is_the_channel_format(family: str, tmp_path: Path) -> None:
    """The same bits as a checkpoint quantised per channel, but for the small gates."""
    checkpoint = _checkpoint(family, "compressed", GATES, tmp_path)
    expected = Harness(checkpoint.path)
    source = tiny_model(family)
    found = Harness(source, config=quantised_at_load(source))
    logits = [model.logits([Chunk(0, 0, IDS)]) for model in (found, expected)]
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], Harness(source).logits([Chunk(0, 0, IDS)]))
