# SPDX-License-Identifier: Apache-2.0
"""The short depthwise convolution in front of a recurrence."""

import torch
from torch import Tensor, nn

from vllm.exceptions import VLLMValidationError
from vllm.kernels.tuning.shapes import ConvolutionShape, KernelShapes, ReadsTiles
from vllm.model_executor.parameter import (
    Section,
    ShardId,
    empty_parameter,
    load_sections,
    local_size,
    sections_loader,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import PrefillBatch

#: widths that the kernels of every device have
_MIN_TAPS, _MAX_TAPS = 2, 4


class ShortConvolution(nn.Module, ReadsTiles):
    """A depthwise convolution: `weight [channels, width]`, sharded by sections such as q, k, v, and
    `bias [channels]` or None. VLLMValidationError for a width that kernels have not."""

    def __init__(self, sections: tuple[Section, ...], width: int, *, bias: bool = False) -> None:
        super().__init__()
        if not _MIN_TAPS <= width <= _MAX_TAPS:
            raise VLLMValidationError(
                f"a convolution of {width} taps is not supported; supported: {_MIN_TAPS} to "
                f"{_MAX_TAPS}",
                "model",
            )
        self.sections = sections
        self.weight = empty_parameter(local_size(sections), width)
        bound = width**-0.5
        set_weight_attrs(
            self.weight, {"weight_loader": self.weight_loader, "dummy_range": (-bound, bound)}
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter(local_size(sections))
            set_weight_attrs(
                self.bias,
                {"weight_loader": sections_loader(sections), "dummy_range": (-bound, bound)},
            )

    def weight_loader(self, param: Tensor, loaded: Tensor, shard_id: ShardId | None = None) -> None:
        """`loaded [channels, 1, width]` as torch's Conv1d stores it, of all sections or of one."""
        flat = loaded.squeeze(1) if loaded.dim() == 3 else loaded
        load_sections(param, flat, shard_id, sections=self.sections)

    def kernel_shapes(self) -> KernelShapes:
        channels, taps = self.weight.shape
        shape = ConvolutionShape(channels, taps, self.bias is not None)
        return KernelShapes(convolutions=(shape,))

    def forward(self, x: Tensor, conv_state: Tensor, batch: PrefillBatch) -> Tensor:
        """Of prefills: `x [tokens, channels]`, any token stride, to a dense tensor of its shape;
        `conv_state [num_blocks, width - 1, channels]` goes on with `batch` (`causal_conv1d`)."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        current_platform.kernels.causal_conv1d(
            x,
            self.weight,
            self.bias,
            conv_state,
            batch.state_indices,
            batch.has_initial_state,
            batch.query_start_loc,
            out=out,
        )
        return out
