# SPDX-License-Identifier: Apache-2.0
"""Linear layers, whole or sharded over the tensor-parallel group.

Weights are `[out, in]` as in the checkpoint. Column-parallel layers shard the output rows,
row-parallel layers the input columns (Megatron-LM, arXiv 1909.08053, section 3). `forward` returns
`(output, output_bias)`: the second is the bias when `skip_bias_add` leaves adding it to the
caller, else None; with `return_bias=False` it returns the output alone.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from vllm.distributed.collective import Collective, Communicates
from vllm.distributed.communication_op import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import copied_parts, divide
from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.residual_stream import BranchParts, ResidualStream
from vllm.model_executor.layer_errors import naming_layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.quantization.base import LinearMethod, QuantizationConfig
from vllm.model_executor.layers.quantization.unquantized import UnquantizedLinearMethod
from vllm.model_executor.parameter import (
    Section,
    WeightLayout,
    empty_parameter,
    local_size,
    sections_loader,
)
from vllm.model_executor.utils import AfterLoading, set_weight_attrs
from vllm.platforms import current_platform

LinearOutput = Any  # `(Tensor, Tensor | None)`, or a Tensor with `return_bias=False`


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [..., in] @ weight [out, in].T + bias [out]`: the matmul entry of unquantised weights."""
    return current_platform.kernels.linear(x, weight, bias)


class LinearOptions(TypedDict, total=False):
    """What every linear layer is told by name: see `LinearBase`."""

    skip_bias_add: bool
    params_dtype: torch.dtype | None
    quant_config: QuantizationConfig | None
    prefix: str
    return_bias: bool


class LinearBase(nn.Module, AfterLoading):
    """Parameters, bias rule and identity of a linear layer.

    `quant_config` chooses the layer's `quant_method`: how weights are kept and multiplied by.
    """

    quant_method: LinearMethod
    weight: nn.Parameter

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.skip_bias_add = skip_bias_add
        self.params_dtype = params_dtype
        self.prefix = prefix
        self.quant_config = quant_config
        self.return_bias = return_bias
        group = get_tp_group()
        self.tp_rank = 0 if disable_tp else group.rank_in_group
        self.tp_size = 1 if disable_tp else group.world_size

    def create_parameters(self, layout: WeightLayout, bias: bool) -> None:
        """Make the weight's parameters and, if asked, `bias [rows]`, on the default device."""
        self.layout = layout
        self.quant_method = UnquantizedLinearMethod()
        if self.quant_config is not None:
            self.quant_method = self.quant_config.get_quant_method(self, self.prefix)
        self.quant_method.create_weights(self, layout, self.params_dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter(layout.shape[0], dtype=self.params_dtype)
            set_weight_attrs(self.bias, {"weight_loader": sections_loader(layout.rows)})

    def process_weights_after_loading(self) -> None:
        self.quant_method.process_weights_after_loading(self)

    def pack(self, output: Tensor) -> LinearOutput:
        """The return value: see the module docstring."""
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return f"in={self.input_size}, out={self.output_size}, tp={self.tp_rank}/{self.tp_size}"


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole weight."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(input_size, output_size, disable_tp=True, **options)
        layout = WeightLayout((Section(0, output_size),), Section(0, input_size))
        self.create_parameters(layout, bias)

    def forward(self, x: Tensor) -> LinearOutput:
        """`[..., input_size] -> [..., output_size]`."""
        return self.pack(
            self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        )


class ColumnParallelLinear(LinearBase, Communicates):
    """Output rows sharded: each rank computes its own part of the output features."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        output_sizes: Sequence[int] | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(input_size, output_size, **options)
        self.gather_output = gather_output
        with naming_layer(self.prefix):
            self.sections = self.make_sections(output_sizes or [output_size])
            self.output_size_per_partition = local_size(self.sections)
            self.create_parameters(WeightLayout(self.sections, Section(0, input_size)), bias)

    def make_sections(self, output_sizes: Sequence[int]) -> tuple[Section, ...]:
        """One section per fused matrix, numbered from 0."""
        return tuple(
            Section(i, size, self.tp_size, self.tp_rank) for i, size in enumerate(output_sizes)
        )

    def forward(self, x: Tensor) -> LinearOutput:
        """`[..., input_size] -> [..., output_size_per_partition]` (all of it when gathered)."""
        output = self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        return self.pack(self._gathered(output))

    def after_norm(self, norm: RMSNorm, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        """The output of `forward` for the stream's norm, and the stream added up."""
        bias = None if self.skip_bias_add else self.bias
        output, total = self.quant_method.apply_after_norm(self, stream, norm.arguments, bias)
        return self._gathered(output), total

    def _gathered(self, output: Tensor) -> Tensor:
        if self.gather_output and self.tp_size > 1:
            return tensor_model_parallel_all_gather(output)
        return output

    def collectives(self, element_bytes: int) -> list[Collective]:
        """See `Communicates`."""
        if not self.gather_output or self.tp_size == 1:
            return []
        return [Collective("all-gather", "layers", self.output_size_per_partition * element_bytes)]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel matrices of one input in one weight; shard ids 0, 1, 2, ...

    Raises ValueError for `gather_output`: gathered ranks would interleave the matrices.
    """

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], bias: bool = True, **kwargs: Any
    ) -> None:
        if kwargs.get("gather_output"):
            raise ValueError("a merged column-parallel layer cannot gather its output")
        self.output_sizes = list(output_sizes)
        super().__init__(
            input_size, sum(output_sizes), bias, output_sizes=self.output_sizes, **kwargs
        )

    @property
    def output_partition_sizes(self) -> list[int]:
        """Width of each matrix's part in this process, in order."""
        return [section.local_size for section in self.sections]


class SharingColumnParallelLinear(MergedColumnParallelLinear):
    """The matrices `shared`, by number, are cut into `shared_parts`, the others by the ranks: with
    fewer parts than ranks, neighbouring ranks hold copies of one (`copied_parts`)."""

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        *,
        shared: Sequence[int],
        shared_parts: int,
        **kwargs: Any,
    ) -> None:
        self.shared, self.shared_parts = tuple(shared), shared_parts
        super().__init__(input_size, output_sizes, bias, **kwargs)

    def make_sections(self, output_sizes: Sequence[int]) -> tuple[Section, ...]:
        parts = self.shared_parts
        part = self.tp_rank * parts // self.tp_size
        return tuple(
            Section(i, size, parts, part) if i in self.shared else section
            for i, (size, section) in enumerate(
                zip(output_sizes, super().make_sections(output_sizes), strict=True)
            )
        )


class QKVParallelLinear(ColumnParallelLinear):
    """q, k and v projections in one weight, sharded by heads; shard ids "q", "k", "v".

    With more ranks than kv heads, neighbouring ranks hold copies of the same kv head.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_kv_heads or total_num_heads
        kv_size = self.total_num_kv_heads * head_size
        sizes = [total_num_heads * head_size, kv_size, kv_size]
        super().__init__(hidden_size, sum(sizes), bias, output_sizes=sizes, **kwargs)
        self.q_size, self.kv_size, _ = (section.local_size for section in self.sections)
        self.num_heads = divide(self.q_size, head_size)
        self.num_kv_heads = divide(self.kv_size, head_size)

    def keys_and_values(self, x: Tensor) -> Tensor:
        """`[tokens, hidden_size] -> [tokens, 2 * kv_size]`: what `forward` gives, without q."""
        bias = None if self.skip_bias_add else self.bias
        return self.quant_method.apply_from(self.q_size, self, x, bias)

    def make_sections(self, output_sizes: Sequence[int]) -> tuple[Section, ...]:
        q_size, k_size, v_size = output_sizes
        kv_parts = copied_parts("key/value heads", self.total_num_kv_heads, self.tp_size)
        kv_part = self.tp_rank * kv_parts // self.tp_size
        return (
            Section("q", q_size, self.tp_size, self.tp_rank),
            Section("k", k_size, kv_parts, kv_part),
            Section("v", v_size, kv_parts, kv_part),
        )


class RowParallelLinear(LinearBase, Communicates):
    """Input columns sharded: each rank computes a partial sum, summed over the group.

    The bias is whole on every rank and added by rank 0 before the sum. Without `reduce_results`
    the partial sum is returned.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(input_size, output_size, **options)
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        with naming_layer(self.prefix):
            columns = Section(0, input_size, self.tp_size, self.tp_rank)
            self.input_size_per_partition = columns.local_size
            self.create_parameters(WeightLayout((Section(0, output_size),), columns), bias)

    def forward(self, x: Tensor) -> LinearOutput:
        """`[..., input_size_per_partition] -> [..., output_size]`."""
        return self.pack(self._reduced(self._part(x)))

    def add_to(self, residual: Tensor, x: Tensor | Fp8Rows) -> ResidualStream:
        """The output of `forward` as a branch of the stream `residual [tokens, output_size]`."""
        if self.tp_size > 1:
            return ResidualStream(residual, self._branch(residual, x))
        bias = None if self.skip_bias_add else self.bias
        return self.quant_method.apply_and_add(self, x, bias, residual)

    def _branch(self, residual: Tensor, x: Tensor | Fp8Rows) -> Tensor | BranchParts:
        if not self.reduce_results:
            return self._part(x)
        group, rows, dtype = get_tp_group(), len(residual), residual.dtype
        pushed = group.pushed_sums
        if pushed is not None and pushed.takes(rows, self.output_size, dtype):
            return pushed.begin(rows, dtype, lambda run: self._part(x[run]))
        part = self._part(x)
        return group.part_before_norm(part, residual) or self._reduced(part)

    def _part(self, x: Tensor | Fp8Rows) -> Tensor:
        """This rank's part of the sum."""
        if not self.input_is_parallel:
            assert isinstance(x, Tensor)
            size = self.input_size_per_partition
            x = x.narrow(-1, self.tp_rank * size, size)
        adds_bias = not self.skip_bias_add and self.tp_rank == 0
        return self.quant_method.apply(self, x, self.bias if adds_bias else None)

    def _reduced(self, part: Tensor) -> Tensor:
        if not self.reduce_results or self.tp_size == 1:
            return part
        return tensor_model_parallel_all_reduce(part, in_place=True)

    def collectives(self, element_bytes: int) -> list[Collective]:
        """See `Communicates`."""
        if not self.reduce_results or self.tp_size == 1:
            return []
        return [Collective("all-reduce", "layers", self.output_size * element_bytes)]
