# SPDX-License-Identifier: Apache-2.0
"""Capture of the target's residual stream: a reader of the tap with a cache layer of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_transfer_state import (
    maybe_save_kv_layer,
    maybe_wait_for_layer_load,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionLayer,
    ExtractHiddenStatesModel,
    aux_layer_ids,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.residual_tap import ResidualTap
from vllm.v1.worker.step_inputs import StepInputs


class HiddenStateCapture:
    """Caches every step's rows, those of prefill chunks included, so that none is ever missing.

    Raises ValueError unless `num_speculative_tokens` is 1 and layer ids are configured.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.num_speculative_tokens != 1:
            raise ValueError("extract_hidden_states needs num_speculative_tokens = 1")
        model_config = vllm_config.model_config
        assert model_config is not None
        self.vllm_config = vllm_config
        self.residual_layer_ids = aux_layer_ids(vllm_config)
        #: this step's rows `[max tokens, columns, hidden]`; a fixed address for captured graphs
        self.hidden_states = torch.zeros(
            vllm_config.max_tokens_per_step,
            len(self.residual_layer_ids),
            model_config.get_hidden_size(),
            dtype=model_config.dtype,
            device=device,
        )
        self.model = ExtractHiddenStatesModel(vllm_config=vllm_config)
        self.attn_layer_names = [
            layer.layer_name
            for layer in self.model.modules()
            if isinstance(layer, CacheOnlyAttentionLayer)
        ]

    @classmethod
    def create(cls, vllm_config: VllmConfig, device: torch.device) -> HiddenStateCapture | None:
        """None where nothing is configured to be captured."""
        speculative = vllm_config.speculative_config
        if speculative is None or not speculative.uses_extract_hidden_states():
            return None
        return cls(vllm_config, device)

    def observe(self, inputs: StepInputs, hidden: Tensor, residual: Sequence[Tensor]) -> None:
        """See `ResidualReader`."""
        self.store(residual)

    def store(self, streams: Sequence[Tensor]) -> None:
        """Cache this step's rows inside its forward context: one `[tokens, hidden]` per id."""
        rows = self.hidden_states[: streams[0].shape[0]]
        torch.stack(list(streams), dim=1, out=rows)
        self.model(rows)

    @contextmanager
    def layer_hooks(self) -> Iterator[None]:
        """Around a replay that holds `store`: what the caching layers tell a connector."""
        layers = get_forward_context().no_compile_layers
        metadata = get_forward_context().attn_metadata
        for name in self.attn_layer_names:
            maybe_wait_for_layer_load(name)
        yield
        for name in self.attn_layer_names:
            maybe_save_kv_layer(name, layers[name].kv_cache, metadata[name])


class ExtractHiddenStatesProposer(HiddenStateCapture):
    """A capture in the shape of a drafter, for programs that drive one themselves; the engine's own
    reads the tap. Its draft is the sampled token itself, which is rarely accepted."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.layer_ids = self.residual_layer_ids
        self.kv_cache_gid = -1
        self._loaded = False

    def load_model(self, target_model: nn.Module) -> None:
        """Ask the target for its hidden states.

        ValueError when the target cannot return them, or has no layer of a configured id.
        """
        ResidualTap(target_model, [self])
        self._loaded = True

    def validate_same_kv_cache_group(self, kv_cache_config: KVCacheConfig) -> None:
        """Find the caching layer's group; ValueError unless one group holds all its layers."""
        groups = {
            gid
            for gid, group in enumerate(kv_cache_config.kv_cache_groups)
            if set(group.layer_names) & set(self.attn_layer_names)
        }
        if len(groups) != 1:
            raise ValueError(f"layers {self.attn_layer_names} are in state groups {sorted(groups)}")
        self.kv_cache_gid = groups.pop()

    def propose(self, sampled_token_ids: Tensor, target_hidden_states: list[Tensor]) -> Tensor:
        """Cache this step's rows; runs inside the step's forward context.

        `target_hidden_states`: one `[tokens, hidden]` per configured id, ascending. Returns
        `sampled_token_ids`.
        """
        if not self._loaded:
            raise RuntimeError("load_model() has not been called")
        if len(target_hidden_states) != len(self.layer_ids):
            raise ValueError(
                f"the target returned {len(target_hidden_states)} hidden states for layer ids "
                f"{self.layer_ids}"
            )
        self.store(target_hidden_states)
        return sampled_token_ids

    @staticmethod
    def prepare_next_token_ids_padded(
        sampled_token_ids: Tensor, backup_token_ids: Tensor, discard_request_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`(next_token_ids [n], num_valid [n])` of `sampled_token_ids [n, k]`, -1 where rejected.

        The next token is the last valid one; `backup_token_ids [n]` where there is none or where
        `discard_request_mask [n]` (a request still in its prompt). All on the device.
        """
        valid = (sampled_token_ids >= 0) & ~discard_request_mask[:, None]
        num_valid = valid.sum(dim=1)
        last = sampled_token_ids.gather(1, (num_valid - 1).clamp(min=0)[:, None]).squeeze(1)
        return torch.where(num_valid > 0, last, backup_token_ids), num_valid
