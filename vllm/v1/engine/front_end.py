# SPDX-License-Identifier: Apache-2.0
"""What both front ends (`LLMEngine`, `AsyncLLM`) are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from vllm.model_executor.placements import check_form
from vllm.tokenizers import get_tokenizer
from vllm.utils.startup_phases import startup_phase
from vllm.v1.engine.exceptions import EngineSleepingError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.placements import PlacementChange, show_placement
from vllm.v1.engine.sleep import ASLEEP, TAGS, FrontEndSleep, SleepState
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.reader import Metric, get_metrics_snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.placements import Placement
    from vllm.v1.engine.replica_router import ReplicaRouter


class FrontEnd:
    """Tokenizer, input and output processing and statistics, without the engine core."""

    def __init__(self, vllm_config: VllmConfig, log_stats: bool) -> None:
        assert vllm_config.model_config is not None
        self.vllm_config = vllm_config
        self.model_config: ModelConfig = vllm_config.model_config
        self.log_stats = log_stats
        self.sleep = FrontEndSleep()
        #: of this engine alone
        self.metrics = CollectorRegistry()
        self._loggers: StatLoggerManager | None = None
        self.tokenizer = _load_tokenizer(self.model_config)
        self.input_processor = InputProcessor(vllm_config, self.tokenizer)
        self.output_processor = OutputProcessor(
            self.tokenizer,
            vllm_config.scheduler_config.stream_interval,
            core_sees_stops=vllm_config.kv_transfer_config is not None,
        )

    def require_awake(self) -> None:
        """`EngineSleepingError` while any part of the engine sleeps or is about to."""
        if self.sleep.is_sleeping:
            raise EngineSleepingError(ASLEEP)

    def make_stat_loggers(
        self,
        configs: Sequence[VllmConfig],
        router: ReplicaRouter | None = None,
        alone: bool = True,
    ) -> StatLoggerManager | None:
        """After the cores have started: some metrics show what they decided, which is in `configs`.
        `router`: chooses among several. One of several front ends leaves the log to the process
        that knows them all."""
        if self.log_stats:
            rank_of = None if router is None else router.rank_of
            self._loggers = StatLoggerManager(configs, self.metrics, alone, rank_of)
            if router is not None:
                self.metrics.register(router.collector(self.model_config.served_names[0]))
        return self._loggers

    def get_metrics(self) -> list[Metric]:
        """A snapshot of this engine's metrics; `ValueError` when statistics are off."""
        if self._loggers is None:
            raise ValueError("metrics are off; use disable_log_stats=False")
        return get_metrics_snapshot(self.metrics)

    def note_sleep(self, level: int) -> None:
        """The core has fallen asleep at `level`."""
        self.sleep.fell_asleep()
        if self._loggers is not None:
            self._loggers.record_sleep(level)

    def note_wake_up(self, tags: Iterable[str]) -> None:
        """These parts of the core are awake again."""
        self.sleep.woke_up(tags)
        if self._loggers is not None and not self.sleep.asleep:
            self._loggers.record_sleep(0)

    def adopt_sleep(self, state: SleepState) -> None:
        """What of the core sleeps, as this front end begins."""
        if state.asleep:
            self.note_sleep(state.level)
        self.note_wake_up(set(TAGS) - state.asleep)

    def placement_of(self, asked: Placement) -> Placement:
        """What is asked for, or what it is an alias of; `VLLMValidationError` for what is neither
        a list of names nor text."""
        check_form(asked)
        aliases = self.model_config.placement_aliases
        return aliases.get(asked, asked) if isinstance(asked, str) else asked

    def show_placement(self, placement: Placement, change: PlacementChange) -> None:
        """From now on the configuration and metrics describe another placement."""
        show_placement(self.vllm_config, placement, change)
        if self._loggers is not None:
            self._loggers.record_memory(change.memory)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """`ValueError` when the engine runs without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: --skip-tokenizer-init is set")
        return self.tokenizer


@startup_phase("tokenizer")
def _load_tokenizer(model_config: ModelConfig) -> PreTrainedTokenizerBase | None:
    if model_config.skip_tokenizer_init:
        return None
    return get_tokenizer(
        model_config.tokenizer,
        tokenizer_mode=model_config.tokenizer_mode,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.tokenizer_revision,
    )
