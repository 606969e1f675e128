# SPDX-License-Identifier: Apache-2.0
"""Mamba (arXiv 2312.00752) whose x and B are shared by groups of heads, as in Apriel2."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import copied_parts, per_rank
from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    SharingColumnParallelLinear,
)
from vllm.model_executor.layers.mamba.ops.mamba1.problem import (
    Mamba1Decode,
    Mamba1Gates,
    Mamba1Prefill,
    repeat_groups,
)
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.recurrent_mixer import RecurrentMixer, decay_parameter
from vllm.model_executor.layers.short_convolution import ShortConvolution
from vllm.model_executor.parameter import empty_parameter, sections_loader, sharded_section
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import PrefillBatch
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum


@dataclass(frozen=True)
class GroupedMambaShape:
    """Sizes of the whole layer, before sharding.

    `inner` channels, `state_size` (N) of each head; `shared` channels of x and of B, N of each
    group. `repeats_first`: x is repeated for the heads of a group before the convolution, which
    then has `inner` channels, not after it.
    """

    hidden_size: int
    inner: int
    shared: int
    state_size: int
    dt_rank: int
    conv_kernel_size: int
    conv_bias: bool
    dt_bias: bool
    proj_bias: bool = False
    repeats_first: bool = True

    def __post_init__(self) -> None:
        if self.shared % self.state_size or self.inner % self.shared:
            raise ValueError(
                f"{self.inner} channels cannot share {self.shared} in groups of {self.state_size}"
            )


class GroupedMamba(RecurrentMixer, KeepsJournal):
    """Recurrent token mixer; keeps the convolution's last inputs and a matrix per head.

    `in_proj` is z, x, B and C, in this order in checkpoints too. The bias of `dt_proj` is added
    twice, by the projection and by the scan: so the models were trained.
    """

    mamba_type = MambaAttentionBackendEnum.MAMBA1
    #: a convolution, the state, and a gate of torch
    decode_launches = 7
    element_decay = True

    def __init__(
        self,
        shape: GroupedMambaShape,
        prefix: str = "",
        *,
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        size = get_tp_group().world_size
        self.shape, self.tp_size, self.layer_name = shape, size, prefix
        groups = shape.shared // shape.state_size
        group_parts = copied_parts("groups of recurrent heads", groups, size)
        self.journal_key_heads = groups // group_parts
        heads = per_rank("recurrent heads", shape.inner // shape.state_size, size)
        self.inner = heads * shape.state_size
        self.shared = self.journal_key_heads * shape.state_size

        def options(name: str) -> dict[str, Any]:
            return {"prefix": f"{prefix}.{name}", "quant_config": quant_config}

        hidden, low = shape.hidden_size, shape.dt_rank
        sizes = [shape.inner, shape.shared, shape.shared, shape.inner]
        self.in_proj = SharingColumnParallelLinear(
            hidden,
            sizes,
            shape.proj_bias,
            shared=(1, 2),
            shared_parts=group_parts,
            **options("in_proj"),
        )
        self.dt_in_proj = ReplicatedLinear(hidden, low, bias=False, **options("dt_in_proj"))
        self.dt_proj = ColumnParallelLinear(
            low, shape.inner, bias=shape.dt_bias, **options("dt_proj")
        )
        whole = sharded_section(shape.inner)
        section = whole if shape.repeats_first else self.in_proj.sections[1]
        self.conv1d = ShortConvolution((section,), shape.conv_kernel_size, bias=shape.conv_bias)
        # fp32 whatever the model: see `decay_parameter`.
        self.A_log = empty_parameter(self.inner, shape.state_size, dtype=torch.float32)
        set_weight_attrs(
            self.A_log, {"weight_loader": sections_loader((whole,)), "dummy_range": (-3.0, -1.0)}
        )
        self.D = decay_parameter(shape.inner)
        self.register_buffer("no_bias", torch.zeros(self.inner), persistent=False)
        self.out_proj = RowParallelLinear(
            shape.inner, hidden, bias=shape.proj_bias, **options("out_proj")
        )

    no_bias: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        parts = self.in_proj(hidden_states)[0]
        z, x, B, C = parts.split([self.inner, self.shared, self.shared, self.inner], dim=-1)
        if self.shape.repeats_first:
            x = repeat_groups(x, self.inner, self.shape.state_size)
        dt = self.dt_proj(self.dt_in_proj(hidden_states)[0])[0]
        y = parts.new_empty(len(parts), self.inner)
        self.mix(y, x, B, C, dt)
        return self.out_proj((y.float() * silu(z.float())).to(y.dtype))[0]

    def _gates(self, B: Tensor, C: Tensor, dt: Tensor) -> Mamba1Gates:
        bias = self.no_bias if self.dt_proj.bias is None else self.dt_proj.bias
        return Mamba1Gates(B, C, dt, self.A_log, bias, self.D)

    def decode(self, blocks: Tensor, out: Tensor, *tokens: Tensor) -> None:
        """`tokens`: x `[tokens, conv channels]`, B `[tokens, groups * N]`, C and dt `[tokens,
        channels]`; `out [tokens, channels]`."""
        x, B, C, dt = tokens
        conv_state, state = self.kv_cache
        problem = Mamba1Decode(
            x,
            self._gates(B, C, dt),
            self.conv1d.weight,
            self.conv1d.bias,
            conv_state,
            state,
            blocks,
            out,
            self.journal,
        )
        current_platform.kernels.mamba1_decode(problem)

    def prefill(self, batch: PrefillBatch, out: Tensor, *tokens: Tensor) -> None:
        """See `decode`."""
        x, B, C, dt = tokens
        conv_state, state = self.kv_cache
        mixed = self.conv1d(x, conv_state, batch)
        problem = Mamba1Prefill(
            repeat_groups(mixed, self.inner, self.shape.state_size),
            self._gates(B, C, dt),
            state,
            batch.state_indices,
            batch.has_initial_state,
            batch.query_start_loc,
            out,
        )
        current_platform.kernels.mamba1_prefill(problem)

    def journal_log_rates(self) -> Tensor:
        return self.A_log

    @staticmethod
    def commit(stack: JournalStack, entries: Tensor) -> None:
        current_platform.kernels.mamba1_commit(stack, entries)

    @property
    def _conv_channels(self) -> int:
        """Of the convolution, in this shard."""
        return self.inner if self.shape.repeats_first else self.shared

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        size = self.shape.state_size
        return (self.shape.conv_kernel_size - 1, self._conv_channels), (
            self.inner // size,
            size,
            size,
        )
