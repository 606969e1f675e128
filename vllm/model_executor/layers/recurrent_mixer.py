# SPDX-License-Identifier: Apache-2.0
"""What token mixers with a state of fixed size per sequence have in common."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fill import fill
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.model_executor.parameter import empty_parameter, sections_loader, sharded_section
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, PrefillBatch
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum, MambaSpec


class RecurrentMixer(nn.Module, AttentionLayerBase):
    """Says what it keeps (`mamba_type`, `state_shapes`, `state_dtypes`) and computes two kinds of
    tokens, `decode` and `prefill`; the rest of a step is here.

    Decodes leave their updates in a journal if the mixer also `KeepsJournal`, else in the state.
    """

    #: kernels take arrays of fixed size and skip what is absent, so graphs hold the mixer
    reads_fixed_addresses = True
    #: convolution and state, gated norm
    decode_launches = 2
    #: keeps kinds of equal shapes in groups of their own
    mamba_type: ClassVar[MambaAttentionBackendEnum]

    @property
    def decode_flops_per_element(self) -> float:
        """A decay, and products with the key, of the error and with the query."""
        return 7.0

    def after_norm(
        self, norm: RMSNorm, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        """As `SelfAttention.after_norm`; a recurrence needs no positions."""
        normed, total = norm.enter(stream)
        return ResidualStream(total, self(normed)), total

    def mix(self, out: Tensor, *tokens: Tensor) -> None:
        """Everything that touches state: `tokens`, `[tokens, ...]` each, to `out [tokens, ...]`.

        A step's first tokens are its decodes, then come prefills, then padding.
        """
        self.with_connector(self._mix, out, *tokens)

    def _mix(self, out: Tensor, *tokens: Tensor) -> None:
        context = get_forward_context()
        blocks = context.decode_blocks[self.layer_name]
        rows = blocks.shape[0] * context.decode_width
        if rows:
            fill(self.decode, blocks, out[:rows], *(each[:rows] for each in tokens))
        if context.only_decodes:
            return
        batch: PrefillBatch = self.metadata().batch
        if not batch.is_empty:
            own = batch.rows
            fill(self.prefill, batch, out[own], *(each[own] for each in tokens))

    @abstractmethod
    def decode(self, blocks: Tensor, out: Tensor, *tokens: Tensor) -> None:
        """Equally many tokens of each of the sequences with the states `blocks [sequences]` int32,
        at a fixed address; -1: of none."""

    @abstractmethod
    def prefill(self, batch: PrefillBatch, out: Tensor, *tokens: Tensor) -> None:
        """Tokens of new sequences and of such that go on; in a padded step also of none."""

    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what one sequence keeps; `kv_cache` has a tensor for each, blocks first."""

    def state_dtypes(self, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """One for each of `state_shapes`; here a convolution's inputs and a recurrent state."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        return MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        return MambaSpec(
            block_size=vllm_config.model_config.max_model_len,
            shapes=self.state_shapes(),
            dtypes=self.state_dtypes(vllm_config),
            mamba_type=self.mamba_type,
        )

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        return GDNAttentionBackend


def decay_parameter(entries: int) -> nn.Parameter:
    """One that decays are made of, sharded; loaded from a tensor of any shape with as many entries.

    It is fp32 whatever the model: a decay near 1 does not survive bf16.
    """
    section = sharded_section(entries)
    param = empty_parameter(section.local_size, dtype=torch.float32)
    load = sections_loader((section,))

    def load_flat(param: Tensor, loaded: Tensor) -> None:
        load(param, loaded.flatten())

    set_weight_attrs(param, {"weight_loader": load_flat, "dummy_range": (-3.0, -1.0)})
    return param
