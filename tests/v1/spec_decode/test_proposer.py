# SPDX-License-Identifier: Apache-2.0
"""The caching layer and its proposer, with the platform's own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.config.draft_methods.base import DraftSettings
from vllm.config.draft_methods.replay import ReplaySettings
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionBackend,
    CacheOnlyAttentionLayer,
    CacheOnlyAttentionMetadata,
    ExtractHiddenStatesModel,
    aux_layer_ids,
    basic_cache,
)
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.model_executor.state_layers import collect_layers, hand_over_layers
from vllm.v1.kv_cache_interface import ArenaPlan, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

HIDDEN, NUM_LAYERS = 8, 4
LAYER = f"cache_only_layers.{NUM_LAYERS}"


@dataclass
class FakeModelConfig:
    dtype: torch.dtype = torch.float32
    max_model_len: int = 64

    def get_hidden_size(self) -> int:
        return HIDDEN

    def get_num_layers(self, parallel_config: object = None) -> int:
        return NUM_LAYERS


@dataclass
class FakeHfConfig:
    eagle_aux_hidden_state_layer_ids: list[int]


@dataclass
class FakeDraft:
    hf_config: FakeHfConfig


@dataclass
class FakeSpeculative:
    draft_model_config: FakeDraft | None
    num_speculative_tokens: int = 1
    method: str = "extract_hidden_states"
    draft_settings: DraftSettings | None = None


def make_config(ids: list[int], num_speculative_tokens: int = 1) -> VllmConfig:
    config = VllmConfig()
    config.model_config = FakeModelConfig()  # type: ignore[assignment]
    draft = FakeDraft(FakeHfConfig(ids))
    config.speculative_config = FakeSpeculative(draft, num_speculative_tokens)  # type: ignore[assignment]
    config.scheduler_config.max_num_batched_tokens = 64
    return config


class Target(nn.Module, EagleModelMixin, SupportsEagle3):
    """Layer k adds 1, so the stream after k layers is `embedding + k`."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self._set_aux_hidden_state_layers(layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return (2,)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        aux: list[Tensor] = []
        for layer in range(NUM_LAYERS):
            self._maybe_add_hidden_state(aux, layer, x, None)
            x = x + 1
        self._maybe_add_hidden_state(aux, NUM_LAYERS, x, None)
        return x, aux


@pytest.fixture
def connector_calls() -> Iterator[list[str]]:
    """A connector that only listens, for the duration of a test."""
    from tests.distributed.kv_transfer.toy_connectors import PlainConnector, plain
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

    calls: list[str] = []

    class Listener(PlainConnector):
        def wait_for_layer_load(self, layer_name: str) -> None:
            calls.append(f"load {layer_name}")

        def save_kv_layer(
            self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any
        ) -> None:
            assert isinstance(attn_metadata, CacheOnlyAttentionMetadata)
            calls.append(f"save {layer_name} {tuple(kv_layer.shape)}")

    listener = Listener(VllmConfig(kv_transfer_config=plain()), None)  # type: ignore[arg-type]
    listener.bind_connector_metadata(KVConnectorMetadata())
    kv_transfer_state.current_slot().connector = listener
    yield calls
    kv_transfer_state.current_slot().connector = None


def layers_of(proposer: ExtractHiddenStatesProposer) -> dict[str, AttentionLayerBase]:
    assert proposer.model is not None
    return collect_layers(proposer.vllm_config, proposer.model)


def make_proposer(ids: list[int], block_size: int = 16) -> ExtractHiddenStatesProposer:
    config = make_config(ids)
    with set_current_vllm_config(config):
        proposer = ExtractHiddenStatesProposer(config, torch.device("cpu"))
        proposer.load_model(Target())
    layer = layers_of(proposer)[LAYER]
    pool = torch.full((6, block_size * len(ids) * HIDDEN + 8), float("nan"))
    layer.kv_cache = pool[:, :-8].unflatten(1, (block_size, len(ids), HIDDEN))
    return proposer


def run(
    proposer: ExtractHiddenStatesProposer, target: Target, slots: list[int], x: Tensor
) -> Tensor:
    """One step; returns the cache."""
    layers = layers_of(proposer)
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    metadata = CacheOnlyAttentionMetadata(slot_mapping)
    context = ForwardContext(layers, {LAYER: metadata}, {LAYER: slot_mapping})
    sampled = torch.tensor([[5]])
    with set_forward_context(context):
        _, aux = target(x)
        assert proposer.propose(sampled, aux) is sampled
    return layers[LAYER].kv_cache


def target_of(proposer: ExtractHiddenStatesProposer) -> Target:
    target = Target()
    target.set_aux_hidden_state_layers(proposer.layer_ids)
    return target


@pytest.mark.parametrize("ids", [[0, 2, 4], [4], [2, 2, 1, 4], [4, 1]])
@pytest.mark.parametrize("block_size", [16, 3])
def test_rows_of_every_id_at_their_slots(ids: list[int], block_size: int) -> None:
    proposer = make_proposer(ids, block_size)
    x = torch.randn(7, HIDDEN)
    slots = [5, 4, 11, 2, 3, 9, 17]
    cache = run(proposer, target_of(proposer), slots, x)
    for row, slot in enumerate(slots):
        for column, layer_id in enumerate(sorted(ids)):
            stored = cache[slot // block_size, slot % block_size, column]
            assert torch.equal(stored, _after(x[row], layer_id))
    written = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for slot in slots:
        written[slot // block_size, slot % block_size] = True
    assert cache[~written].isnan().all()


def _after(x: Tensor, num_layers: int) -> Tensor:
    for _ in range(num_layers):
        x = x + 1
    return x


def test_padding_rows_are_not_written() -> None:
    proposer = make_proposer([0, 4])
    x = torch.randn(5, HIDDEN)
    cache = run(proposer, target_of(proposer), [20, -1, 21, -1, -1], x)
    assert torch.equal(cache[1, 4, 0], x[0]) and torch.equal(cache[1, 5, 0], x[2])
    assert cache.flatten(0, 1)[[i for i in range(96) if i not in (20, 21)]].isnan().all()


def test_rows_past_the_slots_are_graph_padding() -> None:
    proposer = make_proposer([0])
    x = torch.randn(8, HIDDEN)
    cache = run(proposer, target_of(proposer), [16, 17], x)
    assert torch.equal(cache[1, :2, 0], x[:2]) and cache[1, 2:].isnan().all()


def test_longest_prompt_loses_no_row() -> None:
    """The drafter runs at the length limit too: every token of the step is written."""
    proposer = make_proposer([4])
    x = torch.randn(64, HIDDEN)
    cache = run(proposer, target_of(proposer), list(range(16, 80)), x)
    assert torch.equal(cache[1:5].flatten(0, 1)[:, 0], _after(x, 4))


def test_hooks(connector_calls: list[str]) -> None:
    proposer = make_proposer([0, 4])
    run(proposer, target_of(proposer), [16], torch.randn(1, HIDDEN))
    assert connector_calls == [f"load {LAYER}", f"save {LAYER} (6, 16, 2, {HIDDEN})"]


def test_layer_is_found_and_describes_itself() -> None:
    proposer = make_proposer([0, 4, 4])
    config = proposer.vllm_config
    hand_over_layers(config, layers_of(proposer))
    found = get_layers_from_vllm_config(config, CacheOnlyAttentionLayer, [LAYER])
    assert list(found) == [LAYER] == proposer.attn_layer_names
    spec = found[LAYER].get_kv_cache_spec(config)
    assert (spec.block_size, spec.num_kv_heads, spec.head_size) == (16, 3, HIDDEN)
    assert spec.dtype == torch.float32
    assert spec.page_size_bytes == 16 * 3 * HIDDEN * 4
    assert found[LAYER].get_attn_backend() is CacheOnlyAttentionBackend
    assert CacheOnlyAttentionBackend.supports_full_graph
    plan = ArenaPlan(page_bytes=256, num_pages=4, groups=())
    groups = [KVCacheGroupSpec(["other"], spec), KVCacheGroupSpec([LAYER], spec)]
    proposer.validate_same_kv_cache_group(KVCacheConfig(4, [], groups, plan))
    assert proposer.kv_cache_gid == 1
    with pytest.raises(ValueError, match="state groups"):
        proposer.validate_same_kv_cache_group(KVCacheConfig(4, [], groups[:1], plan))


def test_rows_keep_the_model_dtype() -> None:
    config = make_config([1])
    config.model_config.dtype = torch.bfloat16  # type: ignore[union-attr]
    with set_current_vllm_config(config):
        proposer = ExtractHiddenStatesProposer(config, torch.device("cpu"))
        proposer.load_model(Target())
    layer = layers_of(proposer)[LAYER]
    assert layer.get_kv_cache_spec(config).dtype == torch.bfloat16
    assert proposer.hidden_states.dtype == torch.bfloat16
    assert proposer.hidden_states.shape == (64, 1, HIDDEN)


def test_there_is_a_row_for_every_token_that_pads_a_decode() -> None:
    config = make_config([1])
    config.scheduler_config.max_num_seqs = 5
    config.speculative_config.draft_settings = ReplaySettings(num_speculative_tokens=3)  # type: ignore[union-attr]
    with set_current_vllm_config(config):
        proposer = ExtractHiddenStatesProposer(config, torch.device("cpu"))
    assert proposer.hidden_states.shape == (64 + 5 * 3, 1, HIDDEN)


def test_a_replay_makes_the_calls_of_the_layer(connector_calls: list[str]) -> None:
    proposer = make_proposer([0, 4])
    layers = layers_of(proposer)
    metadata = CacheOnlyAttentionMetadata(torch.tensor([1]))
    with set_forward_context(ForwardContext(layers, {LAYER: metadata})):
        with proposer.layer_hooks():
            assert connector_calls == [f"load {LAYER}"]
            connector_calls.append("replay")
    assert connector_calls[1:] == ["replay", f"save {LAYER} (6, 16, 2, {HIDDEN})"]


def test_basic_cache() -> None:
    cache = torch.zeros(2, 4, 1, 3)
    basic_cache(torch.ones(2, 1, 3), cache, torch.tensor([6, -1]))
    assert cache.flatten(0, 1)[6].tolist() == [[1, 1, 1]] and cache.sum() == 3


def test_refusals() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens = 1"):
        ExtractHiddenStatesProposer(make_config([1], 2), torch.device("cpu"))
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids must be set"):
        ExtractHiddenStatesProposer(make_config([]), torch.device("cpu"))
    with pytest.raises(ValueError, match="draft_model_config"):
        aux_layer_ids(VllmConfig())
    config = make_config([1, 2])
    with set_current_vllm_config(config):
        proposer = ExtractHiddenStatesProposer(config, torch.device("cpu"))
        with pytest.raises(RuntimeError, match="load_model"):
            proposer.propose(torch.tensor([[1]]), [])
        with pytest.raises(ValueError, match="Linear cannot return hidden states"):
            proposer.load_model(nn.Linear(1, 1))
        proposer.load_model(Target())
    with pytest.raises(ValueError, match="returned 1 hidden states for layer ids"):
        proposer.propose(torch.tensor([[1]]), [torch.zeros(1, HIDDEN)])


def test_model_has_no_weights() -> None:
    config = make_config([1])
    with set_current_vllm_config(config):
        model = ExtractHiddenStatesModel(vllm_config=config, prefix="draft")
    assert model.load_weights(iter(())) == set() and not list(model.parameters())
    assert list(collect_layers(config, model)) == [f"draft.{LAYER}"]


def test_next_tokens() -> None:
    sampled = torch.tensor([[7, -1], [8, 9], [-1, -1], [4, 5]])
    backup = torch.tensor([1, 2, 3, 6])
    discard = torch.tensor([False, False, False, True])
    prepare = ExtractHiddenStatesProposer.prepare_next_token_ids_padded
    tokens, counts = prepare(sampled, backup, discard)
    assert tokens.tolist() == [7, 9, 3, 6] and counts.tolist() == [1, 2, 0, 0]
