# SPDX-License-Identifier: Apache-2.0
"""The model: which checkpoint, in which dtype, how long sequences may be."""

from __future__ import annotations

import io
import os
import pickle
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeInt, ValidatorFunctionWrapHandler, WrapValidator

from vllm import decisions
from vllm.config.generation_defaults import record_ignored, sampling_defaults
from vllm.config.model_rules import (
    resolve_dtype,
    resolve_max_model_len,
    shared_sliding_window,
)
from vllm.config.parallel import ParallelConfig
from vllm.exceptions import VLLMValidationError
from vllm.utils.options import FlagKind, config, option
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


def _none_or(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """None stands for "not given" until construction fills the field."""
    return None if value is None else check(-1 if value == "auto" else _text(value))


def _joined(value: Any) -> Any:
    """A list of names as text."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return ",".join(value)
    return value


def _aliases(value: Any) -> Any:
    """An object of placements as `NAME=PLACEMENT` texts."""
    if isinstance(value, dict):
        return [f"{name}={_joined(placement)}" for name, placement in value.items()]
    return value


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@config
class ModelConfig:
    """The checkpoint and how it is run.

    Reads `config.json`; weights are not touched. After construction `dtype` is a `torch.dtype`,
    `max_model_len` the tokens of the longest sequence, and `hf_config` / `hf_text_config` the
    parsed config and its text part. Raises `VLLMValidationError` for what cannot be honoured.
    """

    model: Annotated[str, BeforeValidator(_text)] = option(
        default=DEFAULT_MODEL, help="Directory or hub name of the checkpoint."
    )
    tokenizer: Annotated[str, WrapValidator(_none_or)] = option(
        default=None, help="Directory or hub name of the tokenizer; the model's when absent."
    )
    tokenizer_mode: Literal["auto", "hf", "slow"] = option(
        default="auto", help="`auto` and `hf` use the fast tokenizer, `slow` the Python one."
    )
    trust_remote_code: bool = option(
        default=False, help="Allow config and tokenizer code that comes with the checkpoint."
    )
    dtype: Any = option(
        default="auto",
        choices=("auto", *STR_DTYPE_TO_TORCH_DTYPE),
        help="Dtype of weights and activations: `auto` (the checkpoint's, 16 bit for float32 "
        "checkpoints), `half`, `float16`, `bfloat16`, `float`, `float32`.",
    )
    seed: int = option(default=0, help="Seed of the random number generators.")
    revision: str | None = option(default=None, help="Branch, tag or commit of the checkpoint.")
    code_revision: str | None = option(default=None, help="Revision of the checkpoint's code.")
    tokenizer_revision: str | None = option(default=None, help="Revision of the tokenizer.")
    max_model_len: Annotated[int, WrapValidator(_none_or)] = option(
        default=None,
        kind=FlagKind.LENGTH,
        help="Tokens of the longest sequence, prompt and output; the model's limit when absent, "
        "`auto` or -1: what fits in memory, up to that limit.",
    )
    quantization: str | None = option(
        default=None,
        aliases=("-q",),
        help="Quantisation of the weights: `fp8` makes a 16-bit checkpoint float8 while it loads; "
        "a quantised checkpoint says itself what it is (docs/quantization.md).",
    )
    enforce_eager: bool = option(default=False, help="Never capture graphs.")
    max_logprobs: int = option(
        default=20, help="Most logprobs a request may ask for per token; -1: the vocabulary size."
    )
    logprobs_mode: Literal["raw_logprobs"] = option(
        default="raw_logprobs",
        help="What logprobs describe: the model's distribution before any sampling parameter.",
    )
    skip_tokenizer_init: bool = option(
        default=False, help="Load no tokenizer; prompts are token ids and no text is returned."
    )
    enable_sleep_mode: bool = option(
        default=False,
        help="Allow `sleep` and `wake_up`, which free the device memory for a while.",
    )
    served_model_name: str | list[str] | None = option(
        default=None,
        help="Names under which the model is served; the first appears in responses and metrics.",
    )
    hf_token: bool | str | None = option(
        default=None,
        help="Token for the hub, exported as HF_TOKEN; without a value: the saved login.",
    )
    placement: Annotated[str | None, BeforeValidator(_joined)] = option(
        default=None,
        help="Mixer of each layer of a supernet (Apriel2): names joined by commas, or `all-X`, "
        "`everyNth-X`, `bookend-attn-X`; the checkpoint's main mixers when absent.",
    )
    placement_alias: Annotated[list[str], BeforeValidator(_aliases)] = option(
        default_factory=list,
        help="Names of placements of a supernet, NAME=PLACEMENT: a request whose `model` (or "
        "`placement`) is NAME runs with it. They have memory and graphs from the start.",
    )
    max_request_placements: NonNegativeInt | None = option(
        default=None,
        help="Placements of a supernet without an alias that requests may have in use at once; 8 "
        "by default.",
    )
    hf_overrides: Any = option(
        default_factory=dict,
        kind=FlagKind.JSON,
        help="Changes to the model config, merged key by key; offline also a callable.",
    )
    generation_config: str = option(
        default="auto",
        help="Source of sampling defaults: `auto` (the checkpoint), `vllm` (none), or a directory.",
    )
    override_generation_config: dict[str, Any] = option(
        default_factory=dict,
        kind=FlagKind.JSON,
        help="Changes to the generation config: sampling defaults, end-of-sequence ids.",
    )
    runner: Literal["auto", "generate"] = option(
        default="auto", help="Kind of service; only generation models are served."
    )
    convert: Literal["auto", "none"] = option(
        default="auto", help="Adaptation of the model to another task; there is none."
    )
    model_impl: Literal["auto", "vllm"] = option(
        default="auto", help="Implementation of the model; always the built-in one."
    )
    config_format: Literal["auto", "hf"] = option(
        default="auto", help="Format of the model config; always Hugging Face's."
    )
    language_model_only: bool = option(
        default=False,
        help="Serve the text part of a multimodal model; other parts are never loaded, so this "
        "only states what happens anyway.",
    )
    limit_mm_per_prompt: dict[str, Any] = option(
        default_factory=dict,
        kind=FlagKind.JSON,
        help="Most media items per prompt and kind; only text is served, so every limit holds.",
    )
    allowed_local_media_path: str = option(
        default="", help="Directory from which media may be read; only text is served."
    )
    hf_config: Any = option(default=None, flag=False, help="The parsed config.")
    hf_text_config: Any = option(default=None, flag=False, help="Its text part.")
    model_arch_config: Any = option(default=None, flag=False, help="Its sizes.")
    max_model_len_auto: bool = option(
        default=False, flag=False, help="`max_model_len` may shrink to what memory holds."
    )

    def __post_init__(self) -> None:
        self.tokenizer = self.tokenizer or self.model
        self.tokenizer_revision = self.tokenizer_revision or self.revision
        self.served_model_name = self.served_model_name or self.model
        if self.model and "" in self.served_names:
            raise VLLMValidationError(
                "--served-model-name: a name is empty; give one, or leave out the flag for the "
                "model's own",
                "served_model_name",
            )
        if isinstance(self.hf_token, str):
            # the hub client reads it in every process and for every kind of file
            os.environ["HF_TOKEN"] = self.hf_token
        if self.hf_config is None:
            self._load_hf_config()
        self.refresh_hf_config(self.hf_config)
        if self.hf_text_config is not self.hf_config or self.limit_mm_per_prompt:
            decisions.record("multimodal input", "none", "only the text part is served")
        self.dtype = resolve_dtype(self.dtype, self.model, self.hf_config, self.hf_text_config)
        self.max_model_len_auto = self.max_model_len == -1
        self.max_model_len = resolve_max_model_len(self.max_model_len, self.model_arch_config)
        self._check_aliases()
        if self.max_logprobs < -1:
            raise VLLMValidationError(
                f"--max-logprobs must be at least 0, or -1 for the vocabulary size; got "
                f"{self.max_logprobs}",
                parameter="max_logprobs",
                value=self.max_logprobs,
            )

    def _check_aliases(self) -> None:
        taken = set(self.served_names)
        for text in self.placement_alias:
            name, equals, placement = text.partition("=")
            problem = "is no NAME=PLACEMENT" if not (name and equals and placement) else None
            if name in taken:
                problem = "has a name that is in use already"
            if "," in name:
                problem = "has a name like a placement, whose mixers are joined by commas"
            if problem is not None:
                raise VLLMValidationError(
                    f"--placement-alias {text!r} {problem}", "placement_alias", text
                )
            taken.add(name)

    def _load_hf_config(self) -> None:
        from vllm.transformers_utils.config import get_config

        if not (callable(self.hf_overrides) or isinstance(self.hf_overrides, dict)):
            raise VLLMValidationError(
                f"--hf-overrides must be a JSON object or a callable, got {self.hf_overrides!r}",
                parameter="hf_overrides",
            )
        self.hf_config = get_config(
            self.model,
            self.trust_remote_code,
            self.revision,
            self.code_revision,
            hf_overrides=self.hf_overrides,
        )
        if callable(self.hf_overrides):
            # applied above; a lambda could not be sent to the engine's process
            self.hf_overrides = {}

    def refresh_hf_config(self, hf_config: Any) -> None:
        """Adopt `hf_config` and recompute what is read from it."""
        from vllm.transformers_utils.config import get_hf_text_config
        from vllm.transformers_utils.model_arch_config_convertor import convert

        self.hf_config = hf_config
        self.hf_text_config = get_hf_text_config(hf_config)
        self.model_arch_config = convert(hf_config, self.hf_text_config)

    def __copy__(self) -> ModelConfig:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Remote-code config classes can be unpickled only once transformers set up their path."""
        return _restore, (type(self), self.trust_remote_code, pickle.dumps(self.__dict__))

    @property
    def architectures(self) -> list[str]:
        return list(self.model_arch_config.architectures)

    @property
    def architecture(self) -> str:
        """The first architecture of the config."""
        return self.architectures[0] if self.architectures else ""

    @property
    def served_names(self) -> list[str]:
        """Every name requests may use; the first is shown in responses."""
        names = self.served_model_name or self.model
        return [names] if isinstance(names, str) else list(names)

    @property
    def placement_aliases(self) -> dict[str, str]:
        """Placements of a supernet by the names that requests use."""
        return dict(text.split("=", 1) for text in self.placement_alias)

    @property
    def most_request_placements(self) -> int:
        """What `max_request_placements` comes to."""
        return 8 if self.max_request_placements is None else self.max_request_placements

    @property
    def is_hybrid(self) -> bool:
        """Whether some layer keeps a recurrent state."""
        return bool(self.model_arch_config.is_hybrid)

    @property
    def use_mla(self) -> bool:
        """Whether attention keeps a compressed latent."""
        return bool(self.model_arch_config.use_mla)

    @property
    def has_experts(self) -> bool:
        """Whether some layer may be a mixture of experts, as its config says."""
        return bool(self.model_arch_config.has_experts)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.hf_config.is_encoder_decoder)

    def get_num_layers(self, parallel_config: ParallelConfig | None = None) -> int:
        """Decoder layers of the model, of all pipeline stages together."""
        return int(self.model_arch_config.num_hidden_layers)

    def get_num_kv_heads(self, parallel_config: ParallelConfig | None = None) -> int:
        """Key/value heads of one tensor-parallel rank, at least 1 (they are then replicated, as a
        latent always is)."""
        ranks = parallel_config.tensor_parallel_size if parallel_config else 1
        return max(1, int(self.model_arch_config.num_kv_heads) // ranks)

    def get_total_num_kv_heads(self) -> int:
        return int(self.model_arch_config.num_kv_heads)

    def get_head_size(self) -> int:
        return int(self.model_arch_config.head_size)

    def get_hidden_size(self) -> int:
        return int(self.model_arch_config.hidden_size)

    def get_vocab_size(self) -> int:
        return int(self.model_arch_config.vocab_size)

    def get_sliding_window(self) -> int | None:
        """The window in tokens when every layer uses it, else None."""
        return shared_sliding_window(self.hf_text_config)

    def try_get_generation_config(self) -> dict[str, Any]:
        """Generation settings, per `generation_config`; overrides win.

        Where the source of sampling defaults names no end-of-sequence ids, they are the
        checkpoint's; where that has no generation config, those of its `config.json`.
        """
        found = {**self._sampling_source, **self.override_generation_config}
        if "eos_token_id" not in found:
            found["eos_token_id"] = self._own_generation_config.get("eos_token_id")
        return found

    @cached_property
    def _sampling_source(self) -> dict[str, Any]:
        """What `generation_config` names, read once."""
        from vllm.transformers_utils.config import get_generation_config

        if self.generation_config == "auto":
            return self._own_generation_config
        if self.generation_config == "vllm":
            return {}
        return get_generation_config(self.generation_config, required=True)

    @cached_property
    def _own_generation_config(self) -> dict[str, Any]:
        """The checkpoint's generation config, or what its `config.json` says in place of one; read
        once."""
        from transformers import GenerationConfig

        from vllm.transformers_utils.config import get_generation_config

        return get_generation_config(self.model, revision=self.revision) or {
            "eos_token_id": GenerationConfig.from_model_config(self.hf_config).eos_token_id
        }

    def record_generation_config(self) -> None:
        """Record what the generation config says of sampling and is not served."""
        record_ignored(self.try_get_generation_config())

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Default sampling parameters, named as in `SamplingParams`."""
        return sampling_defaults(self.try_get_generation_config())


def _restore(cls: type[ModelConfig], trust_remote_code: bool, state: bytes) -> ModelConfig:
    if trust_remote_code:
        from transformers.dynamic_module_utils import init_hf_modules

        init_hf_modules()
    restored = cls.__new__(cls)
    restored.__dict__.update(pickle.load(io.BytesIO(state)))
    return restored
