# SPDX-License-Identifier: Apache-2.0
"""Where weights come from."""

from typing import Any, Literal

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import FlagKind, config, option


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
