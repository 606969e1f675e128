# SPDX-License-Identifier: Apache-2.0
"""The areas with few settings: attention, device, events, weights, adapters, logs, grammars."""

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import FlagKind, config, json_config, option


@json_config
class AttentionConfig:
    """The structured form of `--attention-backend`."""

    backend: str | None = option(default=None, help="See --attention-backend.")


@config
class DeviceConfig:
    """Where the model runs."""

    device: Literal["auto", "cpu", "cuda"] = option(
        default="auto",
        help="Device kind; `auto` is CUDA when a GPU is visible, else the CPU. Set the environment "
        "variable VLLM_TARGET_DEVICE=cpu to force the CPU.",
    )

    def __post_init__(self) -> None:
        from vllm.platforms import current_platform

        if self.device not in ("auto", current_platform.device_type):
            raise VLLMValidationError(
                f"--device {self.device}: this process runs on {current_platform.device_type}; "
                f"start it with VLLM_TARGET_DEVICE={self.device}",
                parameter="device",
                value=self.device,
            )
        self.device = current_platform.device_type

    @property
    def device_type(self) -> str:
        return self.device


@json_config
class KVEventsConfig:
    """Where the engine announces stored and removed blocks."""

    enable_kv_cache_events: bool = option(default=False, help="Publish events.")
    publisher: str | None = option(
        default=None, help="`zmq`, `null` or a registered one; `zmq` when events are enabled."
    )
    endpoint: str = option(default="tcp://*:5557", help="Address the publisher binds.")
    replay_endpoint: str | None = option(default=None, help="Address that serves missed events.")
    buffer_steps: PositiveInt = option(default=10_000, help="Event batches kept for replay.")
    hwm: NonNegativeInt = option(
        default=100_000, help="Messages queued for a subscriber before it loses some; 0: no limit."
    )
    max_queue_size: PositiveInt = option(default=100_000, help="Event batches waiting to be sent.")
    topic: str = option(default="", help="Topic of the messages.")

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"


@config
class LoadConfig:
    """Loading of the checkpoint's weights."""

    load_format: Literal["auto", "safetensors", "hf", "dummy"] = option(
        default="auto",
        help="`auto`, `hf` and `safetensors` read the checkpoint's safetensors files; `dummy` "
        "fills the weights with small random numbers.",
    )
    download_dir: str | None = option(
        default=None, help="Directory for downloaded checkpoints; the HF cache when absent."
    )
    ignore_patterns: str | list[str] = option(
        default_factory=lambda: ["original/**/*"],
        help="File patterns that are never downloaded or loaded.",
    )
    model_loader_extra_config: dict[str, Any] = option(
        default_factory=dict,
        kind=FlagKind.JSON,
        help="Settings of a loader; the safetensors loader has none, so this must stay empty.",
    )
    use_tqdm_on_load: bool = option(default=True, help="Show a progress bar while loading.")

    def __post_init__(self) -> None:
        if self.model_loader_extra_config:
            raise VLLMValidationError(
                "--model-loader-extra-config: the safetensors loader has no settings; got keys "
                + ", ".join(self.model_loader_extra_config),
                parameter="model_loader_extra_config",
            )


@config
class LoRAConfig:
    """Importable because clients name the type; constructing one raises."""

    max_lora_rank: int = option(default=16, flag=False, help="Largest adapter rank.")
    max_loras: int = option(default=1, flag=False, help="Adapters in one batch.")

    def __post_init__(self) -> None:
        raise VLLMValidationError(
            "LoRA adapters are not supported; merge the adapter into the checkpoint",
            parameter="lora_config",
        )


@config
class ObservabilityConfig:
    """Logs and metrics."""

    disable_log_stats: bool = option(
        default=False, help="Do not log throughput and do not collect metrics."
    )
    expert_counts: bool = option(
        default=False,
        help="Count how many tokens every expert of a mixture gets; GET /experts shows it.",
    )


@json_config
class StructuredOutputsConfig:
    """Server-wide settings of structured outputs."""

    backend: Literal["auto", "xgrammar"] = option(
        default="auto", help="The grammar compiler; there is one."
    )
    disable_any_whitespace: bool = option(
        default=False,
        help="JSON without free whitespace: one space after colons and commas, none elsewhere.",
    )
