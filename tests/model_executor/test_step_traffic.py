# SPDX-License-Identifier: Apache-2.0
"""What layers say they exchange is what a forward pass exchanges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model_executor.harness import Chunk, Harness, make_config
from tests.tiny_models import tiny_model
from vllm.distributed.collective import Collective
from vllm.distributed.parallel_state import GroupCoordinator, as_first_rank_of
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.decode_work import num_layers, step_collectives
from vllm.model_executor.model_outline import models_on_meta
from vllm.model_executor.models.interfaces import SharesVocabulary
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sharded_sampler import draw_sharded
from vllm.v1.sample.vocab_shard import VocabShard

FAMILIES = (
    "llama", "qwen3_5", "qwen3_5_tied", "mixtral", "qwen3_5_moe", "kimi_linear", "nemotron_h_moe",
    "granite_h", "olmo_hybrid",
)  # fmt: skip
TOKENS = 3


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, float]]:
    """Kind and bytes of each collective, which this process then does for all ranks."""
    found: Counter[tuple[str, float]] = Counter()

    def all_reduce(self: GroupCoordinator, x: Tensor, in_place: bool = False) -> Tensor:
        found["all-reduce", x.nbytes] += self.world_size > 1
        return x

    def all_gather(self: GroupCoordinator, x: Tensor, dim: int = -1) -> Tensor:
        found["all-gather", x.nbytes] += self.world_size > 1
        return torch.cat([x] * self.world_size, dim)

    def reduce_scatter(self: GroupCoordinator, x: Tensor) -> Tensor:
        part = x[: len(x) // self.world_size]
        found["reduce-scatter", part.nbytes] += self.world_size > 1
        return part

    monkeypatch.setattr(GroupCoordinator, "all_reduce", all_reduce)
    monkeypatch.setattr(GroupCoordinator, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(GroupCoordinator, "all_gather", all_gather)
    return found


def told(collectives: list[Collective], tokens: int) -> Counter[tuple[str, float]]:
    return Counter((one.kind, one.token_bytes * tokens) for one in collectives)


@torch.inference_mode()
def sample(harness: Harness, token_ids: list[int]) -> None:
    """A greedy step, as workers sample where they share the vocabulary."""
    hidden = harness.step([Chunk(0, 0, token_ids)])
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    model = harness.model
    assert isinstance(model, SharesVocabulary)
    shard = VocabShard.of_model(model, "logits", "")
    if shard is not None:
        greedy = SamplingMetadata(None, None, None, None, None, None)
        own = shard.own(model.own_logits(hidden))
        draw_sharded(own, greedy, torch.arange(len(own)), shard)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_exchanges_what_layers_say(
    family: str, ranks: int, seen: Counter[tuple[str, float]]
) -> None:
    with as_first_rank_of(ranks):
        harness = Harness(tiny_model(family), num_seqs=1)
        # As in decode steps, all tokens are sampled from.
        sample(harness, list(range(40, 40 + TOKENS)))
        found = step_collectives(harness.model, torch.float32.itemsize)
    assert +seen == told(found, TOKENS)
    assert bool(found) == (ranks > 1)
    # Fewer groups of channels than ranks, or a norm over all heads.
    shares_norms = family in ("granite_h", "olmo_hybrid") and ranks > 1
    assert any(one.what == "norms" for one in found) == shares_norms


def test_spread_experts_exchange_one_sum(seen: Counter[tuple[str, float]]) -> None:
    config = make_config(tiny_model("mixtral"))
    config.parallel_config.enable_expert_parallel = True
    with as_first_rank_of(2):
        harness = Harness(tiny_model("mixtral"), num_seqs=1, config=config)
        sample(harness, [40, 41, 42])
        found = step_collectives(harness.model, torch.float32.itemsize)
    assert +seen == told(found, 3)
    experts = [one for one in found if one.what == "experts"]
    assert len(experts) == config.model_config.get_num_layers()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_5_moe", "nemotron_h_moe"])
def test_replicas_exchange_rows_and_sums(
    family: str, ranks: int, seen: Counter[tuple[str, float]]
) -> None:
    config = make_config(tiny_model(family))
    config.parallel_config.enable_expert_parallel = True
    with as_first_rank_of(ranks, replicas=2):
        harness = Harness(tiny_model(family), num_seqs=1, config=config)
        sample(harness, [40, 41, 42])
        found = step_collectives(harness.model, torch.float32.itemsize)
    assert +seen == told(found, 3)
    kinds = Counter(one.kind for one in found if one.what == "experts")
    assert kinds["all-gather"] == 2 * kinds["reduce-scatter"] > 0
    assert kinds["all-reduce"] == (kinds["reduce-scatter"] if ranks > 1 else 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_tied"])
def test_stages_exchange_what_the_whole_model_does(family: str) -> None:
    path: Path = tiny_model(family)
    config = EngineArgs(str(path), max_model_len=256).create_engine_config()
    _, (whole, *_) = models_on_meta(config, 2)
    config.parallel_config.pipeline_parallel_size = 2
    stages = [models_on_meta(config, 2, stage)[1][0] for stage in (0, 1)]
    found = [
        step_collectives(model, 4, is_first=i == 0, is_last=i == 1)
        for i, model in enumerate(stages)
    ]
    assert sum((told(one, 1) for one in found), Counter()) == told(step_collectives(whole, 4), 1)
    assert {one.what for one in found[0]} == {"embedding", "layers"}
    assert {one.what for one in found[1]} == {"logits", "layers"}
    assert sum(map(num_layers, stages)) == num_layers(whole) == len(whole.model.layers)


def test_bytes_around_a_ring() -> None:
    total, part = Collective("all-reduce", "layers", 12.0), Collective("all-gather", "logits", 12.0)
    # In 4 pieces, 3 steps to add them up and 3 to hand the sums on.
    assert total.hops(4) == 6 and total.sent_bytes(4, 10) == 120 / 4 * 6
    assert part.hops(4) == 3 and part.sent_bytes(4, 10) == 120 * 3
    assert total.sent_bytes(2, 10) == 120 == part.sent_bytes(2, 10)
