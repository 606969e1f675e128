# SPDX-License-Identifier: Apache-2.0
"""`VllmConfig`: everything an engine is built from, sent to the engine core as one object."""

from __future__ import annotations

import uuid
from typing import Any

from vllm.config.areas import (
    AttentionConfig,
    DeviceConfig,
    KVEventsConfig,
    LoadConfig,
    LoRAConfig,
    ObservabilityConfig,
    StructuredOutputsConfig,
)
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.draft_ladder import draft_ladder
from vllm.config.draft_methods.base import DraftSettings
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.decisions import DecisionLog
from vllm.exceptions import VLLMValidationError
from vllm.utils.options import FlagKind, config, option


def _short_id() -> str:
    return uuid.uuid4().hex[:5]


@config
class VllmConfig:
    """Structured settings and plugins.

    Holds all configs of one engine. `vllm.engine.resolve` makes the choices that follow from
    several of them, each a decision record.
    """

    # None only in tests of parts that need no model; not in the type, which every part reads.
    model_config: ModelConfig = option(default=None, flag=False, help="The model.")
    cache_config: CacheConfig = option(
        default_factory=CacheConfig, flag=False, help="State memory."
    )
    parallel_config: ParallelConfig = option(
        default_factory=ParallelConfig, flag=False, help="Spread over devices."
    )
    scheduler_config: SchedulerConfig = option(
        default_factory=SchedulerConfig, flag=False, help="Batching."
    )
    device_config: DeviceConfig = option(
        default_factory=DeviceConfig, flag=False, help="The device."
    )
    load_config: LoadConfig = option(default_factory=LoadConfig, flag=False, help="Weights.")
    lora_config: LoRAConfig | None = option(default=None, flag=False, help="Adapters: none.")
    observability_config: ObservabilityConfig = option(
        default_factory=ObservabilityConfig, flag=False, help="Logs and metrics."
    )
    compilation_config: CompilationConfig = option(
        default_factory=CompilationConfig,
        aliases=("-cc",),
        resolved=True,
        kind=FlagKind.JSON,
        help="Graph capture: a JSON object with keys such as cudagraph_mode and "
        "cudagraph_capture_sizes, or a compile mode 0-3.",
    )
    speculative_config: SpeculativeConfig | None = option(
        default=None,
        aliases=("-sc",),
        kind=FlagKind.JSON,
        help="Speculation or hidden-state extraction, a JSON object.",
    )
    kv_transfer_config: KVTransferConfig | None = option(
        default=None, kind=FlagKind.JSON, help="KV connector, a JSON object."
    )
    kv_events_config: KVEventsConfig | None = option(
        default=None,
        kind=FlagKind.JSON,
        help="Publishing of what the prefix cache holds, a JSON object: "
        '{"enable_kv_cache_events": true}.',
    )
    additional_config: dict[str, Any] = option(
        default_factory=dict,
        kind=FlagKind.JSON,
        help="A free JSON object for plugins.",
    )
    structured_outputs_config: StructuredOutputsConfig = option(
        default_factory=StructuredOutputsConfig,
        resolved=True,
        kind=FlagKind.JSON,
        help='Structured outputs, a JSON object: {"disable_any_whitespace": true}.',
    )
    attention_backend: str | None = option(
        default=None,
        help="Backend of paged attention: PAGED (own kernels), FLASHINFER (CUDA, compiles at first "
        "use), or a class outside the package, as my_package.my_backend.MyBackend; default: chosen "
        "and recorded.",
    )
    attention_config: AttentionConfig | None = option(
        default=None,
        aliases=("-ac",),
        kind=FlagKind.JSON,
        help='Settings of attention, a JSON object: {"backend": ...} is --attention-backend.',
    )
    optimization_level: int = option(
        default=2,
        aliases=("-O",),
        help="Graphs to capture unless cudagraph_mode says otherwise: 0 none, 1 piecewise, "
        "2 and 3 full graphs for decode and piecewise ones for prefill.",
    )
    instance_id: str = option(default_factory=_short_id, flag=False, help="Name of this engine.")
    quant_config: Any = option(default=None, flag=False, help="Quantisation of the weights.")

    decisions: DecisionLog = option(
        default_factory=DecisionLog, flag=False, help="What was chosen for this engine, and why."
    )
    is_resolved: bool = option(
        default=False,
        flag=False,
        help="Whether `vllm.engine.resolve` made the choices that depend on the model class, the "
        "device and the connector.",
    )

    def __post_init__(self) -> None:
        level = self.optimization_level
        if not 0 <= level <= 3:
            raise VLLMValidationError(
                f"-O {level}: the optimization level must be 0, 1, 2 or 3",
                "optimization_level",
                level,
            )
        self._adopt_attention_config()
        if self.model_config is not None:
            self.scheduler_config.max_model_len = self.model_config.max_model_len
            if self.cache_config.sliding_window is None:
                self.cache_config.sliding_window = self.model_config.get_sliding_window()

    @property
    def drafter(self) -> DraftSettings | None:
        """The settings of the configured drafter, if there is one."""
        return None if self.speculative_config is None else self.speculative_config.draft_settings

    @property
    def ends_rows(self) -> bool:
        """Whether workers compute nothing of a request after a token that ends it, before the
        scheduler knows of that token: where a row of a drafter depends on the token after its own,
        the state after the last token could not be continued."""
        drafter = self.drafter
        return drafter is not None and drafter.num_ahead > 0 and not self.cache_config.sanitize

    @property
    def tokens_to_verify(self) -> int:
        """Tokens of a decoding request in one step, at most: its newest one and drafts."""
        return 1 if self.drafter is None else 1 + self.drafter.num_drafts

    @property
    def step_widths(self) -> tuple[int, ...]:
        """Tokens that each decode of a step may have, ascending, up to `tokens_to_verify`: a step
        runs one of them, and has graphs for each."""
        full_width = self.drafter is not None and self.drafter.full_width
        return tuple(1 + k for k in draft_ladder(self.tokens_to_verify - 1, full_width))

    @property
    def max_tokens_per_step(self) -> int:
        """Tokens that a step runs at most: those scheduled, and what pads decodes to one width."""
        scheduler = self.scheduler_config
        padding = scheduler.max_num_seqs * (self.tokens_to_verify - 1)
        return scheduler.max_num_batched_tokens + padding

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be launched before the oldest one's result is known: one per pipeline
        stage, and with asynchronous scheduling one more, so that the next is there already."""
        return self.parallel_config.pipeline_parallel_size + self.scheduler_config.async_scheduling

    def _adopt_attention_config(self) -> None:
        """The two spellings of the attention backend become one."""
        asked = self.attention_config.backend if self.attention_config else None
        if asked is None:
            return
        if self.attention_backend not in (None, asked):
            raise VLLMValidationError(
                f"--attention-backend {self.attention_backend} and --attention-config backend "
                f"{asked} differ; give one of them",
                parameter="attention_backend",
                value=asked,
            )
        self.attention_backend = asked
