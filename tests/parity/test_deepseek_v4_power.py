# SPDX-License-Identifier: Apache-2.0
"""The comparison of DeepSeek-V4's logits can fail: each part of the model, damaged, moves some of
them by ten thousand times its bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from deepseek_v4_logits import FAMILY, IDS, prompt_logits
from parity_checks import MakeEngine, in_this_process
from tiny_models import hf_reference_logits, tiny_model
from torch import Tensor

from vllm.kernels.hyper_connection import CollapseProblem, Connection, ConnectionProblem
from vllm.kernels.moe import ExpertsProblem, Routing, RoutingProblem
from vllm.model_executor.layers import compressed_attention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import deepseek_v4
from vllm.platforms import current_platform

pytestmark = [pytest.mark.parity, in_this_process]

#: of the comparison, and what each damage must do
BOUND, POWER = 1e-5, 0.1

Damage = Callable[[pytest.MonkeyPatch], None]


def _op(name: str, change: Callable[..., Any]) -> Damage:
    """`change(run, *args)` for the op `run(*args)`."""

    def damage(monkeypatch: pytest.MonkeyPatch) -> None:
        kernels = current_platform.kernels
        run = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, partial(change, run))

    return damage


def _mix(change: Callable[[Connection], Connection]) -> Damage:
    return _op("join_streams", lambda run, x, branch, c: run(x, branch, change(c)))


def _connect(**changes: Any) -> Damage:
    def connect(run: Any, problem: ConnectionProblem) -> Connection:
        made: Connection = run(replace(problem, **changes))
        return made

    return _op("connect_streams", connect)


def _mean_stream(run: Any, problem: CollapseProblem) -> Tensor:
    return problem.streams.mean(1)


def _clamp(**changes: float) -> Damage:
    def experts(run: Any, problem: ExpertsProblem) -> Tensor:
        assert problem.clamp is not None
        out: Tensor = run(replace(problem, clamp=replace(problem.clamp, **changes)))
        return out

    return _op("run_experts", experts)


def _rule(**changes: Any) -> Damage:
    return _op("route_experts", lambda run, p: run(replace(p, rule=replace(p.rule, **changes))))


def _biased_weights(run: Any, problem: RoutingProblem) -> Routing:
    """The bias that chooses is in the weights, too."""
    routing: Routing = run(problem)
    if problem.bias is None:
        return routing
    top_k, scale = problem.rule.top_k, problem.rule.scale
    logits = problem.logits[:, : problem.num_experts]
    scores = torch.nn.functional.softplus(logits).sqrt() + problem.bias
    # While kernels are only noted, before a start, nothing has been routed.
    named = routing.experts[:, :top_k].long().clamp(0, problem.num_experts - 1)
    chosen = scores.gather(1, named)
    weights = routing.weights.clone()
    weights[:, :top_k] = chosen / chosen.sum(1, keepdim=True) * scale
    return Routing(weights, routing.experts)


def _without_shared(run: Any, problem: RoutingProblem) -> Routing:
    routing: Routing = run(problem)
    weights = routing.weights.clone()
    weights[:, -1] = 0
    return Routing(weights, routing.experts)


def _without_head_norm(run: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = x if x.dim() == 3 else run(x, *args, **kwargs)
    return out


ROPE_OF, ATTENTION = deepseek_v4.rope_of, deepseek_v4.attention_shape
ROTATE = compressed_attention.rotate_pairs


def _rope(which: Callable[[bool], bool], **parameters: Any) -> Damage:
    """Another of the two rotations, or changed ones."""

    def rope_of(config: Any, max_model_len: int, compressed: bool) -> RotaryEmbedding:
        changed = {kind: rope | parameters for kind, rope in config.rope_parameters.items()}
        fields = type(config).from_dict(config.to_dict() | {"rope_parameters": changed})
        return ROPE_OF(fields, max_model_len, which(compressed))

    return lambda monkeypatch: monkeypatch.setattr(deepseek_v4, "rope_of", rope_of)


def _attention(**changes: Any) -> Damage:
    return lambda monkeypatch: monkeypatch.setattr(
        deepseek_v4,
        "attention_shape",
        lambda config, index: replace(ATTENTION(config, index), **changes),
    )


def _turned(turn: Callable[[Tensor, Tensor, bool], Tensor]) -> Damage:
    return lambda monkeypatch: monkeypatch.setattr(
        compressed_attention,
        "rotate_pairs",
        lambda x, angles, inverse=False: turn(x, angles, inverse),
    )


def _loaded(part: str, value: float) -> Damage:
    """The parameters whose names end in `part` are `value` after they have been loaded."""

    def damage(monkeypatch: pytest.MonkeyPatch) -> None:
        load = deepseek_v4.DeepseekV4ForCausalLM.load_weights

        def loaded(self: Any, weights: Any) -> set[str]:
            names = load(self, weights)
            found = [param for name, param in self.named_parameters() if name.endswith(part)]
            assert found
            for param in found:
                param.data.fill_(value)
            return names

        monkeypatch.setattr(deepseek_v4.DeepseekV4ForCausalLM, "load_weights", loaded)

    return damage


DAMAGES: dict[str, Damage] = {
    "mix not transposed": _mix(lambda c: replace(c, mix=c.mix.mT.contiguous())),
    "writing weights halved": _mix(lambda c: replace(c, post=c.post / 2)),
    "three iterations": _connect(iterations=3),
    "streams averaged at the end": _op("collapse_streams", _mean_stream),
    "no clamp": _clamp(limit=1e9),
    "gpt-oss's clamp": _clamp(offset=1.0),
    "sigmoid scores": _rule(scores="sigmoid"),
    "no scale": _rule(scale=1.0),
    "weights not divided by their sum": _rule(renormalize=False),
    "bias in the weights": _op("route_experts", _biased_weights),
    "no bias": _op("route_experts", lambda run, p: run(replace(p, bias=None))),
    "no table": _op("route_experts", lambda run, p: run(replace(p, chosen=None))),
    "no shared expert": _op("route_experts", _without_shared),
    "no YaRN": _rope(lambda given: given, rope_type="default"),
    "one rotation for all": _rope(lambda given: False),
    "YaRN in windows, too": _rope(lambda given: True),
    "window one token short": _attention(window=15),
    "all entries": _attention(index_topk=200),
    "no inverse rotation": _turned(lambda x, a, inv: x if inv else ROTATE(x, a)),
    "inverse rotation of the other sign": _turned(lambda x, a, inv: ROTATE(x, a)),
    "no head norm": _op("rms_norm", _without_head_norm),
    "no sinks": _loaded("attn_sink", float("-inf")),
    "no biases of positions": _loaded("ape", 0.0),
    "index heads alike": _loaded("weights_proj.weight", 0.1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_noticed(
    damage: Damage, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch)
    expected = hf_reference_logits(tiny_model(FAMILY), IDS)[:-1].log_softmax(-1)
    found = prompt_logits(make_engine(FAMILY, max_num_batched_tokens=64, max_logprobs=-1))
    difference = float((found - expected).abs().max())
    assert difference > POWER >= 10_000 * BOUND, difference
