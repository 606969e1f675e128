# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: convolutions, a delta rule with a decay per key channel, gated norm."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import per_rank
from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaGates, KdaPrefill
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.recurrent_mixer import RecurrentMixer, decay_parameter
from vllm.model_executor.layers.short_convolution import ShortConvolution
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import PrefillBatch
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum


@dataclass(frozen=True)
class KimiDeltaAttentionShape:
    """Sizes of the whole layer, before sharding, and the function of the output's gates: sigmoid,
    or silu. Raises ValueError for another."""

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_kernel_size: int
    eps: float
    gate_activation: str = "sigmoid"

    def __post_init__(self) -> None:
        if self.gate_activation not in ("sigmoid", "silu"):
            raise ValueError(
                f"gate activation {self.gate_activation!r} is not supported; supported: sigmoid, "
                "silu"
            )

    @property
    def width(self) -> int:
        """Of all heads' queries, and as much of keys and values."""
        return self.num_heads * self.head_dim

    def state_shape(self, tp_size: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See `MambaStateShapeCalculator`."""
        heads, dim = self.num_heads, self.head_dim
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp_size, heads, heads, dim, dim, self.conv_kernel_size
        )


class KimiDeltaAttention(RecurrentMixer, KeepsJournal):
    """Recurrent token mixer; keeps the convolutions' last inputs and a matrix per head.

    `qkvb_proj` fuses q, k, v and beta, `conv1d` the convolutions of q, k and v (`CHECKPOINT_NAMES`
    maps a checkpoint's tensors onto them). Decays come from `f_b_proj(f_a_proj(x))`, the output's
    gates from `g_b_proj(g_a_proj(x))`.
    """

    mamba_type = MambaAttentionBackendEnum.KDA_ATTN
    channel_decay = True

    CHECKPOINT_NAMES: ClassVar[tuple[tuple[str, str, int], ...]] = (
        ("qkvb_proj", "q_proj", 0),
        ("qkvb_proj", "k_proj", 1),
        ("qkvb_proj", "v_proj", 2),
        ("qkvb_proj", "b_proj", 3),
        ("conv1d", "q_conv1d", 0),
        ("conv1d", "k_conv1d", 1),
        ("conv1d", "v_conv1d", 2),
    )

    def __init__(
        self,
        shape: KimiDeltaAttentionShape,
        prefix: str = "",
        *,
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        size = get_tp_group().world_size
        self.shape, self.tp_size, self.layer_name = shape, size, prefix
        self.num_heads = per_rank("recurrent heads", shape.num_heads, size)
        self.journal_key_heads = self.num_heads
        hidden, width, low = shape.hidden_size, shape.width, shape.head_dim

        def options(name: str) -> dict[str, Any]:
            return {"bias": False, "prefix": f"{prefix}.{name}", "quant_config": quant_config}

        sizes = [width, width, width, shape.num_heads]
        self.qkvb_proj = MergedColumnParallelLinear(hidden, sizes, **options("qkvb_proj"))
        self.f_a_proj = ReplicatedLinear(hidden, low, **options("f_a_proj"))
        self.f_b_proj = ColumnParallelLinear(low, width, **options("f_b_proj"))
        self.g_a_proj = ReplicatedLinear(hidden, low, **options("g_a_proj"))
        self.g_b_proj = ColumnParallelLinear(low, width, **options("g_b_proj"))
        self.conv1d = ShortConvolution(self.qkvb_proj.sections[:3], shape.conv_kernel_size)
        self.A_log = decay_parameter(shape.num_heads)
        self.dt_bias = decay_parameter(width)
        self.o_norm = RMSNorm(shape.head_dim, shape.eps)
        self.o_proj = RowParallelLinear(width, hidden, **options("o_proj"))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        heads = (self.num_heads, self.shape.head_dim)
        width = self.num_heads * self.shape.head_dim
        qkv, b = self.qkvb_proj(hidden_states)[0].split([3 * width, self.num_heads], dim=-1)
        a = self.f_b_proj(self.f_a_proj(hidden_states)[0])[0].unflatten(-1, heads)
        gate = self.g_b_proj(self.g_a_proj(hidden_states)[0])[0].unflatten(-1, heads)
        mixed = qkv.new_empty(len(qkv), *heads)
        self.mix(mixed, qkv, a, b)
        return self.o_proj(self._gated(mixed, gate))[0]

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """The norm of each head times its gate, `[tokens, heads * head_dim]`."""
        kernels, norm = current_platform.kernels, self.o_norm
        if self.shape.gate_activation == "silu":
            return kernels.gated_rms_norm(mixed, gate, norm.weight, norm.variance_epsilon)
        return kernels.mul_sigmoid(norm.normalise(mixed), gate)

    def _gates(self, a: Tensor, b: Tensor) -> KdaGates:
        return KdaGates(a, b, self.A_log, self.dt_bias.view(self.num_heads, -1))

    def decode(self, blocks: Tensor, out: Tensor, *tokens: Tensor) -> None:
        """`tokens`: qkv `[tokens, channels]`, a `[tokens, heads, head_dim]`, b `[tokens, heads]`;
        `out [tokens, heads, head_dim]`."""
        qkv, a, b = tokens
        conv_state, state = self.kv_cache
        problem = KdaDecode(
            qkv,
            self._gates(a, b),
            self.conv1d.weight,
            conv_state,
            state,
            blocks,
            out,
            self.journal,
        )
        current_platform.kernels.kda_decode(problem)

    def prefill(self, batch: PrefillBatch, out: Tensor, *tokens: Tensor) -> None:
        """See `decode`."""
        qkv, a, b = tokens
        conv_state, state = self.kv_cache
        problem = KdaPrefill(
            self.conv1d(qkv, conv_state, batch),
            self._gates(a, b),
            state,
            batch.state_indices,
            batch.has_initial_state,
            batch.query_start_loc,
            batch.chunk_indices,
            batch.chunk_offsets,
            out,
        )
        current_platform.kernels.kda_prefill(problem)

    @staticmethod
    def commit(stack: JournalStack, entries: Tensor) -> None:
        current_platform.kernels.kda_commit(stack, entries)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.shape.state_shape(self.tp_size)
