# SPDX-License-Identifier: Apache-2.0
"""`EngineArgs`: flags and keyword arguments, derived from the config dataclasses."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm import decisions, envs
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    EPLBConfig,
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
from vllm.config.draft_methods import ALIASES
from vllm.config.draft_methods.base import refuse
from vllm.config.speculative import FILLED_BY_ENGINE
from vllm.engine.batch_defaults import UsageContext, batch_limits
from vllm.engine.connector_flags import (
    capture_connector,
    capture_extraction,
    offload_connector,
)
from vllm.engine.unsupported_flags import UNSUPPORTED_FLAGS, add_unsupported, check_unsupported
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_flags
from vllm.utils.dataclass_flags import FlagSpec, flag_specs
from vllm.utils.options import build, flag_name
from vllm.utils.startup_phases import FIRST_OF_ENGINE, startup_phase

if TYPE_CHECKING:
    from vllm.transformers_utils.speculators import SpeculatorsCheckpoint

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

#: arguments that are objects of these classes, or JSON
_OBJECTS: dict[str, type[Any]] = {
    "attention_config": AttentionConfig,
    "eplb_config": EPLBConfig,
    "kv_events_config": KVEventsConfig,
    "kv_transfer_config": KVTransferConfig,
    "structured_outputs_config": StructuredOutputsConfig,
}
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
            group.add_argument(flag_name(name), type=kind, default=None, help=text)
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

    def create_model_config(self) -> ModelConfig:
        """Read the checkpoint's config and check that its architecture is served.

        If the model is a draft checkpoint of the speculators library, its target becomes the model,
        here and for what is created later.
        """
        from vllm.engine.resolve import check_architecture

        for name, value in target_of_draft(self).items():
            setattr(self, name, value)
        config = self._make(ModelConfig)
        check_architecture(config)
        return config

    @startup_phase(FIRST_OF_ENGINE)
    def create_engine_config(
        self, usage_context: UsageContext = UsageContext.UNKNOWN_CONTEXT
    ) -> VllmConfig:
        """The complete, resolved configuration; every automatic choice is recorded."""
        # Parsing flags needs no layers, connectors and devices.
        from vllm.engine.resolve import resolve

        envs.check_variables()
        envs.warn_unknown_variables()
        log = decisions.DecisionLog()
        with log.current():
            config = self._unresolved_config(usage_context)
        config.decisions = log
        return resolve(config)

    def _unresolved_config(self, usage_context: UsageContext) -> VllmConfig:
        model = self.create_model_config()
        parallel = self._make(ParallelConfig)
        values = self._values(VllmConfig)
        cache = self._cache_config(model)
        # A connector first: later choices depend on what it can do.
        transfer = offload_connector(cache, values.get("kv_transfer_config"))
        transfer = capture_connector(cache, transfer)
        speculative = capture_extraction(
            cache, self._speculative_config(model, parallel), model, parallel
        )
        values.update(
            model_config=model,
            cache_config=cache,
            kv_transfer_config=transfer,
            parallel_config=parallel,
            scheduler_config=self._scheduler_config(model, transfer, speculative, usage_context),
            device_config=self._make(DeviceConfig),
            load_config=self._make(LoadConfig),
            compilation_config=self._compilation_config(),
            observability_config=self._make(ObservabilityConfig),
            speculative_config=speculative,
        )
        return VllmConfig(**values)

    def _values(self, cls: type[Any]) -> dict[str, Any]:
        """The given values for the fields of `cls`; None leaves a field at its default."""
        mine = [spec for spec in FLAG_SPECS if spec.config is cls]
        values = {spec.field: getattr(self, spec.name) for spec in mine}
        return {
            field: build(_OBJECTS[field], value, flag_name(field)) if field in _OBJECTS else value
            for field, value in values.items()
            if value is not None
        }

    def _make(self, cls: type[C]) -> C:
        return cls(**self._values(cls))

    def _cache_config(self, model: ModelConfig) -> CacheConfig:
        values = self._values(CacheConfig)
        if "enable_prefix_caching" not in values:
            values["enable_prefix_caching"] = True
            decisions.record("enable_prefix_caching", True, "every kind of state can be continued")
        if model.is_hybrid and values.get("mamba_cache_mode") == "align":
            why = "checkpoints are kept at exact token counts, so nothing needs aligning"
            decisions.record("mamba_cache_mode", "none", why, "align")
        return CacheConfig(**values)

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
        if "async_scheduling" not in values:
            values["async_scheduling"] = True
            decisions.record("async_scheduling", True, "every feature works with it", False)
        limits = batch_limits(
            values.get("max_num_batched_tokens"),
            values.get("max_num_seqs"),
            max_model_len=model.max_model_len,
            chunked_prefill=values.get("enable_chunked_prefill", True),
            usage=usage,
            platform=current_platform,
            tokens_per_request=speculative.tokens_per_request if speculative else 1,
        )
        values.update(
            dataclasses.asdict(limits),
            max_model_len=model.max_model_len,
            disable_hybrid_kv_cache_manager=resolve_hybrid_manager(
                self.disable_hybrid_kv_cache_manager, transfer
            ),
        )
        return SchedulerConfig(**values)

    def _compilation_config(self) -> CompilationConfig:
        flag, given = "--compilation-config", self.compilation_config
        values = self._values(CompilationConfig)
        shortcuts = {key: (flag_name(key), value) for key, value in values.items()}
        if isinstance(given, CompilationConfig):
            _joined(flag, vars(given), shortcuts)  # refuses them all
            return copy.copy(given)
        given = {"mode": given} if isinstance(given, int) else {} if given is None else given
        if isinstance(given, Mapping):
            given = _joined(flag, given, shortcuts)
        return build(CompilationConfig, given, flag)

    def speculative_values(self) -> dict[str, Any] | None:
        """The keys of `--speculative-config` and what its shortcuts say; None without any."""
        flag, given = "--speculative-config", self.speculative_config
        if isinstance(given, SpeculativeConfig):
            names = [f.name for f in dataclasses.fields(given)]
            given = {n: getattr(given, n) for n in names if n not in FILLED_BY_ENGINE}
        shortcuts = {
            key: (flag_name(name), getattr(self, name))
            for name, key in _SPEC_SHORTCUTS.items()
            if getattr(self, name) is not None
        }
        if given is None and not shortcuts:
            return None
        if not isinstance(given, Mapping | None):
            raise VLLMValidationError(
                f"{flag} must be a JSON object, got {given!r}", "speculative_config"
            )
        return _joined(flag, given or {}, shortcuts)

    def _speculative_config(
        self, model: ModelConfig, parallel: ParallelConfig
    ) -> SpeculativeConfig | None:
        values = self.speculative_values()
        if values is None:
            return None
        return SpeculativeConfig.of(values, model, parallel, "--speculative-config")


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of the asynchronous engine; the same fields."""


def _joined(
    structured: str, given: Mapping[str, Any], shortcuts: Mapping[str, tuple[str, Any]]
) -> dict[str, Any]:
    """The object given for the flag `structured` with what other flags say: key -> (flag, value).

    Raises `VLLMValidationError` for a key that is given in both places.
    """
    joined = dict(given)
    for key, (flag, value) in shortcuts.items():
        if key in joined:
            raise VLLMValidationError(
                f"{key} is given both by {flag} and in {structured}; use one of them", key
            )
        joined[key] = value
    return joined


def target_of_draft(args: EngineArgs) -> dict[str, Any]:
    """The arguments that change if `args.model` is a speculators checkpoint that can draft: its
    verifier (a name or a local directory) is served, and it drafts. Nothing for other models.

    What `speculative_config` says is stronger than the checkpoint. `VLLMValidationError` if it says
    another method or model, and for a checkpoint that names no verifier.
    """
    from vllm.transformers_utils.config import read_config_dict
    from vllm.transformers_utils.speculators import METHODS, parse_speculators

    draft = str(args.model)
    raw = read_config_dict(draft, revision=args.revision)
    if raw.get("speculators_model_type") not in METHODS:
        return {}
    found = parse_speculators(draft, raw)
    assert found is not None
    if found.verifier is None:
        raise VLLMValidationError(
            f"{draft!r} is a draft checkpoint ({found.method}) that names no verifier; serve the "
            f'target with --speculative-config \'{{"model": "{draft}"}}\'',
            parameter="model",
            value=draft,
        )
    decisions.record(
        "model", found.verifier, f"{draft} is a draft checkpoint ({found.method}) of it", draft
    )
    given = args.speculative_values() or {}
    _check_drafts_with(found, args.revision, given)
    own: dict[str, Any] = {"method": found.method, "model": draft, "revision": args.revision}
    if given.get("num_speculative_tokens") is None:
        own["num_speculative_tokens"] = found.num_speculative_tokens
    return {
        "model": found.verifier,
        "revision": None,
        "tokenizer": args.tokenizer or found.verifier,
        "served_model_name": args.served_model_name or [draft, found.verifier],
        "speculative_config": given | own,
        **dict.fromkeys(_SPEC_SHORTCUTS),
    }


def _check_drafts_with(
    found: SpeculatorsCheckpoint, revision: str | None, given: Mapping[str, Any]
) -> None:
    """`VLLMValidationError` if the keys `given` of a `speculative_config` want another drafter than
    the served checkpoint at `revision`."""
    method, model = given.get("method"), given.get("model")
    what = f"where the draft checkpoint {found.path} is served; serve {found.verifier} instead"
    if method is not None and ALIASES.get(method, method) != found.method:
        refuse("method", f"must be absent or {found.method} {what}, got {method}", method)
    if model is not None and Path(model).resolve() != Path(found.path).resolve():
        refuse("model", f"must be absent {what}, got {model}", model)
    asked = given.get("revision")
    if asked not in (None, revision):
        refuse(
            "revision",
            f"must be absent where the draft checkpoint {found.path} is served, at --revision "
            f"({revision}), got {asked}",
            asked,
        )
