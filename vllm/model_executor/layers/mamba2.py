# SPDX-License-Identifier: Apache-2.0
"""Mamba2 (arXiv 2405.21060) as in Nemotron-H, Granite 4 and Falcon-H1: convolution, state space,
gate."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from vllm.distributed.collective import Collective, Communicates
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import check_shared_evenly, copied_parts, divide, per_rank
from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.layers.linear import (
    RowParallelLinear,
    SharingColumnParallelLinear,
)
from vllm.model_executor.layers.mamba.ops.mamba2.problem import (
    Mamba2Decode,
    Mamba2Gates,
    Mamba2Prefill,
)
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.recurrent_mixer import RecurrentMixer, decay_parameter
from vllm.model_executor.layers.short_convolution import ShortConvolution
from vllm.model_executor.parameter import Section, empty_parameter, sections_loader, sharded_section
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import PrefillBatch
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of the whole layer, before sharding.

    `dt_limit`: bounds of step sizes. `norm_groups`: parts of the heads' channels that the gated
    norm takes apart, 0 for a gate without norm; `norm_before_gate`: the gate multiplies the norm,
    instead of what goes into it. `out_bias`: whether `out_proj` has one, None: as `in_proj`.
    `multipliers`: of the projected z, x, B, C and dt, none for ones.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel_size: int
    eps: float
    norm_groups: int
    norm_before_gate: bool = False
    conv_bias: bool = True
    proj_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    out_bias: bool | None = None
    multipliers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_shared_evenly(self.num_heads, "heads", self.num_groups, "groups")

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    def state_shape(self, num_ranks: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """What one sequence keeps on one of `num_ranks`: `(taps - 1, channels)` of the
        convolution, `(heads, head_dim, state_size)`. Raises VLLMValidationError for heads or groups
        that the ranks cannot share."""
        heads = per_rank("recurrent heads", self.num_heads, num_ranks)
        groups = self.num_groups // _group_parts(self.num_groups, num_ranks)
        channels = heads * self.head_dim + 2 * groups * self.state_size
        return (self.conv_kernel_size - 1, channels), (heads, self.head_dim, self.state_size)


def _group_parts(num_groups: int, num_ranks: int) -> int:
    """See `copied_parts`: ranks that share a group have heads of it, and copies of its B and C."""
    return copied_parts("groups of recurrent heads", num_groups, num_ranks)


class GatedGroupNorm(nn.Module, Communicates):
    """`norm(y * silu(z)) * weight`, or `norm(y) * weight * silu(z)`, of channels in groups.

    With fewer groups than ranks a group's channels lie on several: they add up its squares.
    """

    def __init__(
        self, section: Section, num_groups: int, eps: float, *, norm_before_gate: bool
    ) -> None:
        super().__init__()
        parts = _group_parts(num_groups, section.parts)
        #: in this shard; of all of them; the ranks that share one, and the first of this rank's
        self.num_groups, self.all_groups = num_groups // parts, num_groups
        self.sharers = section.parts // parts
        self.first_group = section.part * parts // section.parts * self.num_groups
        self.eps, self.norm_before_gate = eps, norm_before_gate
        self.weight = empty_parameter(section.local_size)
        set_weight_attrs(
            self.weight, {"weight_loader": sections_loader((section,)), "dummy_range": (0.9, 1.1)}
        )

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """`y, z [tokens, channels] -> [tokens, channels]`; the norm is rounded before `weight`."""
        wide, gate = y.float(), silu(z.float())
        if not self.norm_before_gate:
            wide = wide * gate
        groups = wide.unflatten(-1, (self.num_groups, -1))
        normed = groups * torch.rsqrt(self._mean_square(groups) + self.eps)
        scaled = self.weight * normed.flatten(-2).to(y.dtype)
        return (scaled * gate).to(y.dtype) if self.norm_before_gate else scaled

    def _mean_square(self, groups: Tensor) -> Tensor:
        """`[tokens, groups, channels] -> [tokens, groups, 1]`."""
        if self.sharers == 1:
            return groups.square().mean(-1, keepdim=True)
        sums = groups.new_zeros(len(groups), self.all_groups)
        own = slice(self.first_group, self.first_group + self.num_groups)
        sums[:, own] = groups.square().sum(-1)
        sums = tensor_model_parallel_all_reduce(sums)
        return sums[:, own, None] / (groups.shape[-1] * self.sharers)

    def collectives(self, element_bytes: int) -> list[Collective]:
        """See `Communicates`: sums of squares, in fp32 whatever the model's dtype."""
        if self.sharers == 1:
            return []
        return [Collective("all-reduce", "norms", self.all_groups * torch.float32.itemsize)]


class Mamba2(RecurrentMixer, KeepsJournal):
    """Recurrent token mixer; keeps the convolution's last inputs and a matrix per head.

    `in_proj` is z, x, B, C and dt, in this order in checkpoints too.
    """

    mamba_type = MambaAttentionBackendEnum.MAMBA2
    #: a convolution, the state, and a gated norm of torch
    decode_launches = 13
    multipliers: Tensor | None

    def __init__(
        self,
        shape: Mamba2Shape,
        prefix: str = "",
        *,
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        size = get_tp_group().world_size
        self.shape, self.tp_size, self.layer_name = shape, size, prefix
        self.num_heads = per_rank("recurrent heads", shape.num_heads, size)
        group_parts = _group_parts(shape.num_groups, size)
        self.num_groups = shape.num_groups // group_parts
        self.journal_key_heads = self.num_groups
        self.width = divide(shape.width, size)
        shared = shape.num_groups * shape.state_size
        self.in_proj = SharingColumnParallelLinear(
            shape.hidden_size,
            [shape.width, shape.width, shared, shared, shape.num_heads],
            shape.proj_bias,
            shared=(2, 3),
            shared_parts=group_parts,
            prefix=f"{prefix}.in_proj",
            quant_config=quant_config,
        )
        self.register_buffer("multipliers", self._channel_multipliers(), persistent=False)
        sections = self.in_proj.sections[1:4]
        self.conv1d = ShortConvolution(sections, shape.conv_kernel_size, bias=shape.conv_bias)
        self.A_log = decay_parameter(shape.num_heads)
        self.dt_bias = decay_parameter(shape.num_heads)
        self.D = decay_parameter(shape.num_heads)
        self.norm: GatedGroupNorm | None = None
        if shape.norm_groups:
            self.norm = GatedGroupNorm(
                sharded_section(shape.width),
                shape.norm_groups,
                shape.eps,
                norm_before_gate=shape.norm_before_gate,
            )
        self.out_proj = RowParallelLinear(
            shape.width,
            shape.hidden_size,
            shape.proj_bias if shape.out_bias is None else shape.out_bias,
            prefix=f"{prefix}.out_proj",
            quant_config=quant_config,
        )

    def _channel_multipliers(self) -> Tensor | None:
        """`[channels of in_proj]` of this shard."""
        if not self.shape.multipliers:
            return None
        widths = self.in_proj.output_partition_sizes
        pairs = zip(widths, self.shape.multipliers, strict=True)
        return torch.cat([torch.full((width,), multiplier) for width, multiplier in pairs])

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        channels = self._channels
        parts = self.in_proj(hidden_states)[0]
        if self.multipliers is not None:
            parts = parts * self.multipliers
        z, xbc, dt = parts.split([self.width, channels, self.num_heads], dim=-1)
        mixed = parts.new_empty(len(parts), self.num_heads, self.shape.head_dim)
        self.mix(mixed, xbc, dt)
        y = mixed.flatten(1)
        gated = self.norm(y, z) if self.norm else (y.float() * silu(z.float())).to(y.dtype)
        return self.out_proj(gated)[0]

    @property
    def _channels(self) -> int:
        """Of the convolution, in this shard."""
        return self.width + 2 * self.num_groups * self.shape.state_size

    def _gates(self, dt: Tensor) -> Mamba2Gates:
        return Mamba2Gates(dt, self.A_log, self.dt_bias, self.D, self.shape.dt_limit)

    def decode(self, blocks: Tensor, out: Tensor, *tokens: Tensor) -> None:
        """`tokens`: xbc `[tokens, channels]` and dt `[tokens, heads]`; `out [tokens, heads,
        head_dim]`."""
        xbc, dt = tokens
        conv_state, state = self.kv_cache
        problem = Mamba2Decode(
            xbc,
            self._gates(dt),
            self.conv1d.weight,
            self.conv1d.bias,
            conv_state,
            state,
            blocks,
            out,
            self.journal,
        )
        current_platform.kernels.mamba2_decode(problem)

    def prefill(self, batch: PrefillBatch, out: Tensor, *tokens: Tensor) -> None:
        """See `decode`."""
        xbc, dt = tokens
        conv_state, state = self.kv_cache
        problem = Mamba2Prefill(
            self.conv1d(xbc, conv_state, batch),
            self._gates(dt),
            state,
            batch.state_indices,
            batch.has_initial_state,
            batch.query_start_loc,
            out,
        )
        current_platform.kernels.mamba2_prefill(problem)

    @staticmethod
    def commit(stack: JournalStack, entries: Tensor) -> None:
        current_platform.kernels.mamba2_commit(stack, entries)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.shape.state_shape(self.tp_size)
