# SPDX-License-Identifier: Apache-2.0
"""Graph capture. There is no torch.compile stage: fusion is done in the kernels."""

from __future__ import annotations

import enum
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from vllm.config.base import config, option
from vllm.exceptions import VLLMValidationError


class CompilationMode(enum.IntEnum):
    """Upstream's compile modes; accepted, recorded, and without a compile stage all alike."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """Which batches replay a captured graph; the value is (mixed batches, decode batches)."""

    NONE = (0, 0)
    PIECEWISE = (1, 1)
    FULL = (2, 2)
    FULL_DECODE_ONLY = (0, 2)
    FULL_AND_PIECEWISE = (1, 2)

    @property
    def uses_graphs(self) -> bool:
        return self is not CUDAGraphMode.NONE

    @property
    def decode_is_full(self) -> bool:
        """Decode-only batches replay one graph for the whole model."""
        return self.value[1] == 2

    @property
    def mixed_is_piecewise(self) -> bool:
        """Batches with prefills replay graphs split at the attention-like layers."""
        return self.value[0] == 1

    @property
    def mixed_is_full(self) -> bool:
        return self.value[0] == 2


def _parse_mode(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, CompilationMode):
        names = [mode.name for mode in CompilationMode]
        if value.isdigit():
            return CompilationMode(int(value))
        if value.upper() not in names:
            raise ValueError(f"mode must be 0-3 or one of {', '.join(names)}; got {value!r}")
        return CompilationMode[value.upper()]
    return value


def _parse_graph_mode(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    names = [mode.name for mode in CUDAGraphMode]
    if value.upper() not in names:
        raise ValueError(f"cudagraph_mode must be one of {', '.join(names)}; got {value!r}")
    return CUDAGraphMode[value.upper()]


@config
class CompilationConfig:
    """Graph capture: which batch shapes are recorded once and replayed."""

    mode: Annotated[CompilationMode | None, BeforeValidator(_parse_mode)] = option(
        default=None, flag=False, help="Accepted; there is no torch.compile stage to select."
    )
    cudagraph_mode: Annotated[CUDAGraphMode | None, BeforeValidator(_parse_graph_mode)] = option(
        default=None,
        flag=False,
        help="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE; None is resolved by "
        "the engine.",
    )
    cudagraph_capture_sizes: list[int] | None = option(
        default=None,
        help="Batch sizes (tokens) to capture. Default: 1, 2, 4, then steps of 8 and 16.",
    )
    max_cudagraph_capture_size: int | None = option(
        default=None, help="Largest batch size (tokens) to capture. Default: at most 512."
    )
    custom_ops: list[str] = option(
        default_factory=list, flag=False, help="Accepted; every op is a custom op here."
    )
    splitting_ops: list[str] | None = option(
        default=None, flag=False, help="Accepted; graphs are split at the attention-like layers."
    )
    pass_config: dict[str, Any] = option(
        default_factory=dict, flag=False, help="Accepted; there are no compiler passes."
    )
    static_forward_context: dict[str, Any] = option(
        default_factory=dict, flag=False, help="Layer name -> layer with state."
    )

    #: ops at which graphs are split; plugins append the names of theirs
    _attention_ops: ClassVar[list[str]] = []

    def __post_init__(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if sizes is not None:
            if not sizes or any(size < 1 for size in sizes):
                raise VLLMValidationError(
                    f"--cudagraph-capture-sizes must be positive sizes, got {sizes}",
                    parameter="cudagraph_capture_sizes",
                    value=sizes,
                )
            self.cudagraph_capture_sizes = sorted(set(sizes))
        largest = self.max_cudagraph_capture_size
        if largest is None:
            return
        if largest < 1 or (sizes is not None and largest != max(sizes)):
            raise VLLMValidationError(
                f"--max-cudagraph-capture-size {largest} must be positive and, when "
                "--cudagraph-capture-sizes is given too, its largest entry",
                parameter="max_cudagraph_capture_size",
                value=largest,
            )

    def ignored_keys(self) -> list[str]:
        """Keys that were set and steer a torch.compile stage, which does not exist here."""
        return [
            name
            for name, given in (
                ("mode", self.mode not in (None, CompilationMode.NONE)),
                ("custom_ops", bool(self.custom_ops)),
                ("splitting_ops", self.splitting_ops is not None),
                ("pass_config", bool(self.pass_config)),
            )
            if given
        ]

    def resolve_capture_sizes(self, limit: int) -> None:
        """Fill the sizes to capture; `limit` is the most tokens a decode step can have."""
        if self.cudagraph_mode is None or not self.cudagraph_mode.uses_graphs:
            self.cudagraph_capture_sizes = []
            self.max_cudagraph_capture_size = 0
            return
        if self.cudagraph_capture_sizes is None:
            largest = min(self.max_cudagraph_capture_size or 512, limit)
            self.cudagraph_capture_sizes = default_capture_sizes(largest)
        self.max_cudagraph_capture_size = self.cudagraph_capture_sizes[-1]


def default_capture_sizes(largest: int) -> list[int]:
    """1, 2, 4, steps of 8 to 256, then of 16, ending exactly at `largest`."""
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)]
    return sorted({size for size in steps if size <= largest} | {largest})
