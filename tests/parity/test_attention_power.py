# SPDX-License-Identifier: Apache-2.0
"""The greedy tests of these families can fail: what is theirs alone, damaged, changes tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from parity_checks import MakeEngine, assert_equals_reference, generate, in_this_process, prompts
from tiny_models import tiny_model
from torch import Tensor

from vllm.config import VllmConfig
from vllm.kernels.moe import ClampedSwiglu, ExpertsProblem
from vllm.model_executor.layers import mlp, rotary_embedding
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.moe import MixtureOfExperts
from vllm.model_executor.models import gemma3, gpt_oss, olmo_hybrid
from vllm.model_executor.models.olmo_hybrid import WholeNormAttention
from vllm.v1.attention.backends.paged import PagedAttentionImpl
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.model_runner import ModelRunner

pytestmark = [pytest.mark.parity, in_this_process]

Damage = Callable[[pytest.MonkeyPatch], None]


def _head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean square of each head instead of that of all."""

    def normalised(self: WholeNormAttention, x: Tensor, norm: RMSNorm) -> Tensor:
        heads = x.unflatten(-1, (-1, self.attn.head_size))
        scale = (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (heads * scale).flatten(1) * norm.weight

    monkeypatch.setattr(WholeNormAttention, "_normalised", normalised)


def _no_norm_of_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention layer adds its branches as they are."""
    init = olmo_hybrid.OlmoHybridAttentionLayer.__init__

    def without(self: olmo_hybrid.OlmoHybridAttentionLayer, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        monkeypatch.setattr(self.post_attention_layernorm, "normalise", lambda x: x)

    monkeypatch.setattr(olmo_hybrid.OlmoHybridAttentionLayer, "__init__", without)


def _zeroed_state(part: int) -> Damage:
    """Convolutions' inputs (0) or matrices (1), lost before every step."""

    def damage(monkeypatch: pytest.MonkeyPatch) -> None:
        execute = ModelRunner.execute_model

        def forgetful(runner: ModelRunner, output: SchedulerOutput) -> object:
            for cache in runner.arena.layers.values():
                if isinstance(cache, tuple):
                    cache[part].zero_()
            return execute(runner, output)

        monkeypatch.setattr(ModelRunner, "execute_model", forgetful)

    return damage


def _one_rotation(kind: str) -> Damage:
    """All layers turn as those of `kind`."""

    def damage(monkeypatch: pytest.MonkeyPatch) -> None:
        init = gemma3.Gemma3DecoderLayer.__init__

        def same(
            self: gemma3.Gemma3DecoderLayer, vllm_config: VllmConfig, prefix: str = ""
        ) -> None:
            config = vllm_config.model_config.hf_text_config
            rope = config.rope_parameters[kind]
            with monkeypatch.context() as patch:
                patch.setattr(config, "rope_parameters", dict.fromkeys(config.layer_types, rope))
                init(self, vllm_config, prefix)

        monkeypatch.setattr(gemma3.Gemma3DecoderLayer, "__init__", same)

    return damage


def _bare_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma3, "rounded", lambda value, dtype: 1.0)


def _silu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "get_act_and_mul_fn", lambda name: SiluAndMul())


def _shape_of(module: ModuleType, name: str, **changes: object) -> Damage:
    def damage(monkeypatch: pytest.MonkeyPatch) -> None:
        shape = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: replace(shape(*args), **changes))

    return damage


def _no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = property(lambda self: None, lambda self, sinks: None)
    monkeypatch.setattr(PagedAttentionImpl, "sinks", ignored)


def _no_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_embedding, "attention_factor", lambda rope: 1.0)


def _truncated_ramp(monkeypatch: pytest.MonkeyPatch) -> None:
    frequencies = rotary_embedding.inverse_frequencies
    monkeypatch.setattr(
        rotary_embedding,
        "inverse_frequencies",
        lambda size, rope: frequencies(size, {**rope, "truncate": True}),
    )


def _experts(**changes: object) -> Damage:
    """Whichever kernel computes it."""

    def damage(monkeypatch: pytest.MonkeyPatch) -> None:
        make = MixtureOfExperts._problem

        def changed(layer: MixtureOfExperts, *given: Any) -> ExpertsProblem:
            return replace(make(layer, *given), **changes)

        monkeypatch.setattr(MixtureOfExperts, "_problem", changed)

    return damage


DAMAGES: dict[str, dict[str, Damage]] = {
    "olmo_hybrid": {
        "betas up to 1": _shape_of(olmo_hybrid, "delta_net_shape", beta_scale=1.0),
        "q and k normed by head": _head_by_head,
        "a branch that is not normed": _no_norm_of_branches,
        "lost convolution": _zeroed_state(0),
        "lost matrix": _zeroed_state(1),
    },
    "gemma3": {
        "scale of the head size": _shape_of(gemma3, "attention_shape", scale=None),
        "no windows": _shape_of(gemma3, "attention_shape", sliding_window=None),
        "windows everywhere": _shape_of(gemma3, "attention_shape", sliding_window=24),
        "only the local rotation": _one_rotation("sliding_attention"),
        "only the global rotation": _one_rotation("full_attention"),
        "embeddings not scaled": _bare_embeddings,
        "another activation": _silu,
    },
    "gpt_oss": {
        "no sinks": _no_sinks,
        "no windows": _shape_of(gpt_oss, "attention_shape", sliding_window=None),
        "no temperature": _no_temperature,
        "a truncated ramp": _truncated_ramp,
        "no biases of experts": _experts(gate_up_bias=None, down_bias=None),
        "no clamp": _experts(clamp=ClampedSwiglu(1.702, 1e9, 1.0)),
        "another slope": _experts(clamp=ClampedSwiglu(1.0, 7.0, 1.0)),
    },
}


@pytest.mark.parametrize(
    ("family", "damage"),
    [
        pytest.param(family, damage, id=f"{family}-{name}")
        for family, damages in DAMAGES.items()
        for name, damage in damages.items()
    ],
)
def test_damage_is_noticed(
    family: str, damage: Damage, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch)
    llm = make_engine(family, max_num_batched_tokens=64)
    output = generate(llm, prompts((33,)), max_tokens=24)[0]
    with pytest.raises(AssertionError, match="prompt of 33 tokens"):
        assert_equals_reference(output, tiny_model(family), max_tokens=24)
