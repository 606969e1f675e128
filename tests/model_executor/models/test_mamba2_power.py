# SPDX-License-Identifier: Apache-2.0
"""Comparisons of the Mamba2 families with transformers can fail: each number of a config, each kind
of state and each part of a mixer, damaged, changes what the tiny models compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model_executor.harness import Chunk, Harness, make_config
from tests.tiny_models import hf_reference_logits, make_tiny, tiny_model
from vllm.kernels.moe import ExpertsProblem
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models import nemotron_h
from vllm.platforms import current_platform

pytestmark = pytest.mark.parity

FAMILIES = ("nemotron_h", "granite_h_dense", "falcon_h1", "bamba")
#: in units of the logits' standard deviation; `NOTICED` is what a damage has to exceed
TOLERANCE, NOTICED = 5e-5, 5e-3
IDS = torch.randint(0, 256, (33,), generator=torch.Generator().manual_seed(4)).tolist()


def error(path: Any, harness: Harness) -> float:
    found, expected = harness.logits([Chunk(0, 0, IDS)]), hf_reference_logits(path, IDS)
    return float((found - expected).abs().max() / expected.std())


class DamagedState(Harness):
    """Zeroes one of the recurrent states (0 convolution, 1 matrix) before every decode."""

    damaged: int | None = None

    def before_decode(self, seq: int) -> None:
        for layer in self.layers.values():
            if isinstance(layer.kv_cache, tuple) and self.damaged is not None:
                layer.kv_cache[self.damaged][1 + seq].zero_()


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron_h_moe", "granite_h"])
def test_a_lost_state_changes_tokens(family: str) -> None:
    harness = DamagedState(tiny_model(family))
    tokens = harness.generate(IDS, 14)
    logits = hf_reference_logits(tiny_model(family), IDS + tokens[:-1])[len(IDS) - 1 :]
    assert logits.argmax(-1).tolist() == tokens
    for harness.damaged in (0, 1):
        assert harness.generate(IDS, 14) != tokens


def _changed(values: list[float], place: int) -> list[float]:
    return [value * 1.1 if i == place else value for i, value in enumerate(values)]


#: family, field of the config, what becomes of it
FIELDS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("nemotron_h", "layer_norm_epsilon", lambda eps: 0.1),
    ("nemotron_h", "time_step_limit", lambda limit: (0.1, 0.5)),
    ("nemotron_h_moe", "routed_scaling_factor", lambda scale: scale * 1.1),
    ("nemotron_h_moe", "norm_topk_prob", lambda renormalize: not renormalize),
    ("nemotron_h_moe", "num_experts_per_tok", lambda top_k: top_k + 1),
    ("nemotron_h_moe", "topk_group", lambda groups: groups + 2),
    *(
        ("granite_h", field, lambda value: value * 1.1)
        for field in (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        )
    ),
    ("granite_h", "num_experts_per_tok", lambda top_k: top_k + 1),
    ("granite_h", "time_step_limit", lambda limit: (0.1, 0.5)),
    ("bamba", "rope_parameters", lambda rope: {**rope, "partial_rotary_factor": 1.0}),
    ("granite_h_dense", "position_embedding_type", lambda kind: "nope"),
    *(
        ("falcon_h1", field, lambda value: value * 1.1)
        for field in (
            "embedding_multiplier",
            "lm_head_multiplier",
            "key_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        )
    ),
    *(("falcon_h1", "ssm_multipliers", lambda v, i=i: _changed(v, i)) for i in range(5)),
    *(("falcon_h1", "mlp_multipliers", lambda v, i=i: _changed(v, i)) for i in range(2)),
    ("falcon_h1", "time_step_limit", lambda limit: (0.1, 0.5)),
]


@pytest.mark.parametrize(("family", "field", "change"), FIELDS)
def test_every_number_of_a_config_matters(
    family: str, field: str, change: Callable[[Any], Any]
) -> None:
    config = make_config(tiny_model(family))
    numbers = config.model_config.hf_text_config
    setattr(numbers, field, change(getattr(numbers, field)))
    assert error(tiny_model(family), Harness(tiny_model(family), config=config)) > NOTICED


def _relu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(current_platform.kernels, "relu_squared", torch.relu)


def _one_norm(patch: pytest.MonkeyPatch) -> None:
    """Of all heads' channels together."""
    shape = nemotron_h.mamba2_shape
    patch.setattr(nemotron_h, "mamba2_shape", lambda c: replace(shape(c), norm_groups=1))


def _rotated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nemotron_h, "no_rope", get_rope)


@pytest.mark.parametrize("damage", [_relu, _one_norm, _rotated])
def test_every_part_of_nemotron_h_matters(
    damage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("nemotron_h")
    assert error(path, Harness(path)) < TOLERANCE
    damage(monkeypatch)
    assert error(path, Harness(path)) > NOTICED


def _no_bias(patch: pytest.MonkeyPatch) -> None:
    """Of the choice of experts."""
    kernels = current_platform.kernels
    route = kernels.route_experts
    patch.setattr(kernels, "route_experts", lambda p: route(replace(p, bias=None)))


def _no_shared(patch: pytest.MonkeyPatch) -> None:
    kernels = current_platform.kernels
    run = kernels.run_experts

    def without(problem: ExpertsProblem) -> Tensor:
        assert problem.shared is not None
        return run(replace(problem, shared=torch.zeros_like(problem.shared)))

    patch.setattr(kernels, "run_experts", without)


@pytest.mark.parametrize(
    ("family", "damage"),
    [("nemotron_h_moe", _no_bias), ("nemotron_h_moe", _no_shared), ("granite_h", _no_shared)],
)
def test_every_part_of_a_mixture_matters(
    family: str,
    damage: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_model(family)
    damage(monkeypatch)
    assert error(path, Harness(path)) > NOTICED


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        # The shared expert is one more of the stack, and its gate and up come as one tensor.
        ("granite_h", {"shared_intermediate_size": 32}),
        ("granite_h_dense", {"mamba_n_groups": 2}),
        ("bamba", {"mamba_n_groups": 2}),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 2, "projectors_bias": True}),
        (
            "falcon_h1",
            {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True},
        ),
        ("nemotron_h_moe", {"moe_latent_size": 24}),
        # Its shared expert is one more of the stack.
        ("nemotron_h_moe", {"moe_shared_expert_intermediate_size": 32}),
        ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    ],
)
def test_variants_are_those_of_transformers(
    family: str, fields: dict[str, Any], tmp_path: Any
) -> None:
    path = make_tiny(family, tmp_path, **fields)
    assert error(path, Harness(path)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "field", "value", "message"),
    [
        ("nemotron_h", "mlp_hidden_act", "silu", "'silu' is not supported without gate"),
        ("nemotron_h_moe", "mlp_bias", True, "experts with biases are not supported"),
        ("nemotron_h", "mamba_hidden_act", "relu", "recurrent layer with 'relu' is not supported"),
        *(
            (family, "hidden_act", "gelu", "recurrent layer with 'gelu' is not supported")
            for family in ("granite_h", "qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear")
        ),
        ("granite_h", "position_embedding_type", "alibi", "'alibi' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(
    family: str, field: str, value: Any, message: str
) -> None:
    config = make_config(tiny_model(family))
    setattr(config.model_config.hf_text_config, field, value)
    with pytest.raises(ValueError, match=message):
        Harness(tiny_model(family), config=config)
