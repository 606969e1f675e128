# SPDX-License-Identifier: Apache-2.0
"""`EngineArgs`: flags and keyword arguments, derived from the config dataclasses."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from vllm import decisions, envs
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.config.speculative import FILLED_BY_ENGINE
from vllm.engine.batch_defaults import UsageContext, batch_limits
from vllm.engine.unsupported_flags import UNSUPPORTED_FLAGS, add_unsupported, check_unsupported
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_flags
from vllm.utils.dataclass_flags import FlagSpec, flag_specs
from vllm.utils.options import build, check_keys
from vllm.utils.startup_phases import FIRST_OF_ENGINE, startup_phase

logger = init_logger(__name__)

C = TypeVar("C")

#: classes whose fields become flags, in the order of the help
FLAG_CLASSES: tuple[type[Any], ...] = (
    ModelConfig,
    LoadConfig,
    CacheConfig,
    ParallelConfig,
    SchedulerConfig,
    DeviceConfig,
    CompilationConfig,
    ObservabilityConfig,
    VllmConfig,
)
FLAG_SPECS: tuple[FlagSpec, ...] = tuple(s for cls in FLAG_CLASSES for s in flag_specs(cls))

#: shortcut -> key of the speculative config
_SPEC_SHORTCUTS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}


def _dataclass_field(name: str, default: Any) -> tuple[str, Any, Any]:
    if isinstance(default, dict | list):
        return name, Any, dataclasses.field(default_factory=lambda: copy.deepcopy(default))
    return name, Any, dataclasses.field(default=default)


_FIELDS = [
    *(_dataclass_field(spec.name, spec.default) for spec in FLAG_SPECS),
    *(_dataclass_field(name, None) for name in _SPEC_SHORTCUTS),
    _dataclass_field("swap_space", None),
    *(_dataclass_field(name, flag.default) for name, flag in UNSUPPORTED_FLAGS.items()),
]
_Fields: Any = dataclasses.make_dataclass("_Fields", _FIELDS)


@dataclasses.dataclass
class EngineArgs(_Fields):
    """Everything that can be said about an engine, as in `EngineArgs(model=..., dtype=...)`.

    The fields are the flags with underscores. None means "decide for me" where the help says so.
    An unknown keyword is a `TypeError`; a value that cannot be honoured a `VLLMValidationError`.
    """

    def __post_init__(self) -> None:
        from vllm.plugins import load_general_plugins

        check_unsupported(vars(self))
        if self.swap_space is not None:
            logger.warning("swap_space is ignored: preempted requests are recomputed")
        load_general_plugins()

    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        """Add every engine flag."""
        for cls in FLAG_CLASSES:
            add_dataclass_flags(parser, cls)
        group = parser.add_argument_group("Speculation", "Shortcuts for --speculative-config.")
        for name, key in _SPEC_SHORTCUTS.items():
            kind: Any = int if key == "num_speculative_tokens" else str
            text = f"Sets `{key}` of --speculative-config."
            group.add_argument(_flag(name), type=kind, default=None, help=text)
        other = parser.add_argument_group("Other", "A flag file, and flags without effect.")
        other.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line "
                           "is stronger.")  # fmt: skip
        other.add_argument("--swap-space", type=float, help="Ignored, with a warning.")
        add_unsupported(parser, "Unsupported", UNSUPPORTED_FLAGS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """From a namespace; flags that the parser did not have keep their defaults."""
        values = vars(args)
        names = [f.name for f in dataclasses.fields(cls) if f.name in values]
        return cls(**{name: values[name] for name in names})

    def _values(self, cls: type[Any]) -> dict[str, Any]:
        """The given values for the fields of `cls`; "decide for me" entries are left out."""
        values = {}
        for spec in FLAG_SPECS:
            if spec.config is cls:
                value = getattr(self, spec.name)
                if value is not None or (spec.default is None and not spec.info.resolved):
                    values[spec.field] = value
        return values

    def create_model_config(self) -> ModelConfig:
        """Read the checkpoint's config and check that its architecture is served."""
        from vllm.engine.resolve import check_architecture

        values = self._values(ModelConfig)
        if values.get("tokenizer") is None:
            values.pop("tokenizer", None)
        if values.get("max_model_len") is None:
            values.pop("max_model_len", None)
        config = ModelConfig(**values)
        check_architecture(config)
        return config

    @startup_phase(FIRST_OF_ENGINE)
    def create_engine_config(
        self, usage_context: UsageContext = UsageContext.UNKNOWN_CONTEXT
    ) -> VllmConfig:
        """The complete, resolved configuration; every automatic choice is recorded."""
        # Parsing flags needs no layers, connectors and devices.
        from vllm.engine.resolve import resolve

        envs.warn_unknown_variables()
        model = self.create_model_config()
        parallel = ParallelConfig(**self._values(ParallelConfig))
        transfer = self._kv_transfer_config()
        speculative = self._speculative_config(model, parallel)
        values = self._values(VllmConfig)
        values.pop("compilation_config", None)
        if self.attention_config is not None:
            given = self.attention_config
            values["attention_config"] = build(AttentionConfig, given, "--attention-config")
        if self.kv_events_config is not None:
            given = self.kv_events_config
            values["kv_events_config"] = build(KVEventsConfig, given, "--kv-events-config")
        if self.structured_outputs_config is not None:
            values["structured_outputs_config"] = build(
                StructuredOutputsConfig,
                self.structured_outputs_config,
                "--structured-outputs-config",
            )
        values.update(
            model_config=model,
            cache_config=self._cache_config(model),
            parallel_config=parallel,
            scheduler_config=self._scheduler_config(model, transfer, speculative, usage_context),
            device_config=DeviceConfig(**self._values(DeviceConfig)),
            load_config=LoadConfig(**self._values(LoadConfig)),
            compilation_config=self._compilation_config(),
            observability_config=ObservabilityConfig(**self._values(ObservabilityConfig)),
            kv_transfer_config=transfer,
            speculative_config=speculative,
        )
        return resolve(VllmConfig(**values))

    def _cache_config(self, model: ModelConfig) -> CacheConfig:
        values = self._values(CacheConfig)
        caching = self.enable_prefix_caching
        if caching is None:
            caching = True
            decisions.record("enable_prefix_caching", True, "every kind of state can be continued")
        if model.is_hybrid and values.get("mamba_cache_mode") == "align":
            why = "checkpoints are kept at exact token counts, so nothing needs aligning"
            decisions.record("mamba_cache_mode", "none", why, "align")
        return CacheConfig(**{**values, "enable_prefix_caching": caching})

    def _scheduler_config(
        self,
        model: ModelConfig,
        transfer: KVTransferConfig | None,
        speculative: SpeculativeConfig | None,
        usage: UsageContext,
    ) -> SchedulerConfig:
        from vllm.engine.resolve import resolve_hybrid_manager
        from vllm.platforms import current_platform

        values = self._values(SchedulerConfig)
        chunked = values.setdefault("enable_chunked_prefill", True)
        if "async_scheduling" not in values:
            values["async_scheduling"] = True
            decisions.record("async_scheduling", True, "every feature works with it", False)
        limits = batch_limits(
            values.get("max_num_batched_tokens"),
            values.get("max_num_seqs"),
            max_model_len=model.max_model_len,
            chunked_prefill=chunked,
            usage=usage,
            platform=current_platform,
            tokens_per_request=speculative.tokens_per_request if speculative else 1,
        )
        disable = resolve_hybrid_manager(self.disable_hybrid_kv_cache_manager, transfer)
        values.update(
            dataclasses.asdict(limits),
            max_model_len=model.max_model_len,
            disable_hybrid_kv_cache_manager=disable,
        )
        return SchedulerConfig(**values)

    def _kv_transfer_config(self) -> KVTransferConfig | None:
        given = self.kv_transfer_config
        return None if given is None else build(KVTransferConfig, given, "--kv-transfer-config")

    def _compilation_config(self) -> CompilationConfig:
        given = self.compilation_config
        if given is None:
            given = {}
        if isinstance(given, int):
            given = {"mode": given}
        flags = {k: v for k, v in self._values(CompilationConfig).items() if v is not None}
        if isinstance(given, CompilationConfig):
            if flags:
                _fail_twice(next(iter(flags)), "--compilation-config")
            return given
        if isinstance(given, Mapping):
            for key in flags:
                if key in given:
                    _fail_twice(key, "--compilation-config")
            given = {**given, **flags}
        return build(CompilationConfig, given, "--compilation-config")

    def _speculative_config(
        self, model: ModelConfig, parallel: ParallelConfig
    ) -> SpeculativeConfig | None:
        given = self._given_speculation()
        if given is None:
            return None
        if "tensor_parallel_size" in given:
            raise VLLMValidationError(
                "--speculative-config: write draft_tensor_parallel_size instead of "
                "tensor_parallel_size",
                parameter="speculative_config.tensor_parallel_size",
            )
        check_keys(SpeculativeConfig, given, "--speculative-config", hidden=FILLED_BY_ENGINE)
        return SpeculativeConfig(
            **given, target_model_config=model, target_parallel_config=parallel
        )

    def _given_speculation(self) -> dict[str, Any] | None:
        """`--speculative-config` with the shortcuts merged in."""
        given = self.speculative_config
        if isinstance(given, SpeculativeConfig):
            names = [f.name for f in dataclasses.fields(given)]
            given = {n: getattr(given, n) for n in names if n not in FILLED_BY_ENGINE}
        if given is not None and not isinstance(given, Mapping):
            raise VLLMValidationError(
                f"--speculative-config must be a JSON object, got {given!r}", "speculative_config"
            )
        merged = dict(given or {})
        for name, key in _SPEC_SHORTCUTS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if key in merged:
                _fail_twice(key, "--speculative-config", _flag(name))
            merged[key] = value
        return merged or (None if given is None else {})


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of the asynchronous engine; the same fields."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _fail_twice(key: str, structured: str, flag: str | None = None) -> None:
    raise VLLMValidationError(
        f"{key} is given both by {flag or _flag(key)} and in {structured}; use one of them",
        parameter=key,
    )
