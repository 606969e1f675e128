# SPDX-License-Identifier: Apache-2.0
"""Graph capture. There is no torch.compile stage: fusion is done in the kernels."""

from __future__ import annotations

import enum
from collections.abc import MutableMapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import config, option


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


#: most decodes captured by default
DECODE_LIMIT = 512
#: most tokens of a step with prefills captured by default: above, the device takes longer than the
#: host needs to launch the step
PIECEWISE_LIMIT = 2048


def _parse_mode(value: Any) -> Any:
    if isinstance(value, str) and value.isdigit():
        return CompilationMode(int(value))
    return _named(value, CompilationMode, "mode must be 0-3 or")


def _parse_graph_mode(value: Any) -> Any:
    return _named(value, CUDAGraphMode, "cudagraph_mode must be")


def _named(value: Any, modes: type[enum.Enum], wanted: str) -> Any:
    if not isinstance(value, str):
        return value
    names = [mode.name for mode in modes]
    if value.upper() not in names:
        raise ValueError(f"{wanted} one of {', '.join(names)}; got {value!r}")
    return modes[value.upper()]


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
    cudagraph_capture_sizes: Annotated[list[PositiveInt], Field(min_length=1)] | None = option(
        default=None,
        help="Batch sizes (tokens) to capture, for decode steps (up to --max-num-seqs) and for "
        "steps with prefills alike. Default: for decodes 1, 2, 4, then steps of 8, 16 and 48; "
        "for steps with prefills 22 sizes from 8 to 2048.",
    )
    max_cudagraph_capture_size: PositiveInt | None = option(
        default=None,
        help="Largest batch size (tokens) to capture; larger steps run eagerly. Default: at most "
        "512 for decode steps, 2048 for steps with prefills.",
    )
    decode_capture_sizes: list[int] = option(
        default_factory=list, flag=False, help="Resolved: decode steps captured whole."
    )
    piecewise_capture_sizes: list[int] = option(
        default_factory=list, flag=False, help="Resolved: steps captured in pieces."
    )
    capture_sizes_given: bool = option(
        default=False, flag=False, help="Resolved: the sizes are the user's, not the default."
    )
    ready_in: NonNegativeFloat | None = option(
        default=None,
        help="Seconds, from the start of the server's process or the call of LLM(), after which no "
        "more graphs are captured before the engine is ready: the rest is captured while it is "
        "idle, and one size a second under load; until then such steps replay a larger "
        "graph, or run eagerly without one. Default: all are captured first.",
    )
    ready_by_s: float | None = option(
        default=None, flag=False, help="Resolved: `ready_in` on the machine's monotonic clock."
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
    static_forward_context: MutableMapping[str, Any] = option(
        default_factory=dict,
        flag=False,
        help="Layer name -> layer with state: what a worker shows to connectors and backends.",
    )

    #: ops at which graphs are split; plugins append the names of theirs
    _attention_ops: ClassVar[list[str]] = []

    def __post_init__(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if sizes is not None:
            self.cudagraph_capture_sizes = sorted(set(sizes))
        largest = self.max_cudagraph_capture_size
        if largest is not None and sizes is not None and largest != max(sizes):
            raise VLLMValidationError(
                f"--max-cudagraph-capture-size {largest} must be the largest entry of "
                "--cudagraph-capture-sizes",
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

    def resolve_capture_sizes(self, max_rows: int, max_tokens: int) -> None:
        """Fill the sizes to capture for steps of at most `max_rows` decodes, `max_tokens` tokens.

        VLLMValidationError for a size that no step can have.
        """
        given, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        mode = self.cudagraph_mode or CUDAGraphMode.NONE
        self.decode_capture_sizes = self.piecewise_capture_sizes = []
        self.capture_sizes_given = given is not None
        if given is not None and mode.uses_graphs:
            self._check_capture_sizes(given, mode, max_rows, max_tokens)
        if mode.decode_is_full:
            limit = min(largest or DECODE_LIMIT, max_rows)
            self.decode_capture_sizes = (
                [size for size in given if size <= max_rows]
                if given is not None
                else default_capture_sizes(limit)
            )
        if mode.mixed_is_piecewise:
            limit = min(largest or PIECEWISE_LIMIT, max_tokens)
            self.piecewise_capture_sizes = (
                list(given) if given is not None else default_piecewise_sizes(limit)
            )
        sizes = sorted({*self.decode_capture_sizes, *self.piecewise_capture_sizes})
        self.cudagraph_capture_sizes = sizes
        self.max_cudagraph_capture_size = sizes[-1] if sizes else 0

    def _check_capture_sizes(
        self, given: list[int], mode: CUDAGraphMode, max_rows: int, max_tokens: int
    ) -> None:
        limit, flag = max_rows, "--max-num-seqs"
        if mode.mixed_is_piecewise:
            limit, flag = max_tokens, "--max-num-batched-tokens"
        if given[-1] > limit:
            raise VLLMValidationError(
                f"--cudagraph-capture-sizes asks for {given[-1]}, but with {flag} {limit} and "
                f"cudagraph_mode {mode.name} no such step exists; capture at most that",
                parameter="cudagraph_capture_sizes",
                value=given,
            )


def default_capture_sizes(largest: int) -> list[int]:
    """1, 2, 4, steps of 8 to 128, of 16 to 288 and then of 48, ending exactly at `largest`.

    Finer steps would gain nothing on an H200: cuBLAS' time does not grow evenly with the rows (416
    take 3 to 45 % longer than 432), and in the mean over batches the matmuls of models 2,048, 2,560
    and 4,096 wide take 0.6 and 6 % less and 1 % more time than with steps of 16 from 256 on.
    """
    steps = [1, 2, 4, *range(8, 129, 8), *range(144, 289, 16), *range(336, largest + 1, 48)]
    return sorted({size for size in steps if size <= largest} | {largest})


def default_piecewise_sizes(largest: int) -> list[int]:
    """Powers of two from 8 to 64, then steps of 64 to 384 and of 128, ending exactly at `largest`.

    A step pays for its padding where it is bound by compute, and there matmuls have tiles of 128
    rows; small sizes can be sparse.
    """
    steps = [8, 16, 32, *range(64, 385, 64), *range(512, largest + 1, 128)]
    return sorted({size for size in steps if size <= largest} | {largest})
