# SPDX-License-Identifier: Apache-2.0
"""Stores hidden states of some live requests, as a dataset to go on training a drafter with.

`--capture-live RATE` is its short form (docs/extraction.md). A request is captured if its sender
agreed (`kv_transfer_params: {"capture": true}`), if it is among the sampled ones, if the dataset's
bytes are not used up, and if a writer has room when it ends. Nothing ever waits for it.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.connector import (
    HiddenStatesConnector,
    num_writer_threads,
    storage_path,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.live_saving import (
    LiveCapturePromMetrics,
    LiveCaptureStats,
    LiveDataset,
    LiveSave,
    LiveSaver,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import RowCopier
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import ended_badly
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import (
    placement_identity,
    weights_identity,
)
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_storage import STORAGE_DTYPE_KEY, file_metadata
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

logger = init_logger(__name__)

#: key of a request's `kv_transfer_params` by which its sender agrees
CONSENT = "capture"


def check_consent(params: dict[str, Any]) -> None:
    """ValueError unless the consent is yes or no, or not there."""
    if not isinstance(params.get(CONSENT, False), bool):
        raise ValueError(f"{CONSENT} must be true or false")


def is_sampled(req_id: str, rate: float) -> bool:
    """Whether a request is among the `rate` of all; it follows from the id."""
    digest = hashlib.blake2b(req_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64


DEFAULT_BYTES = 10 * 2**30


class LiveCaptureConnector(HiddenStatesConnector[LiveSaver]):
    """Store-only. Settings (`kv_connector_extra_config`):

    - `shared_storage_path`: the dataset's directory, made on demand; required;
    - `capture_rate`: share of the requests, above 0 and at most 1; required;
    - `capture_bytes` (10 GiB): of the dataset, what is there already included;
    - `num_writer_threads` (8): files written at a time; twice as many may wait for it;
    - `storage_dtype` (`auto`): `auto` or `fp8_e4m3`.

    Raises ValueError without extraction or for settings of a wrong type or range.
    """

    stats_class = LiveCaptureStats
    metrics_class = LiveCapturePromMetrics

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        if not extra.get("shared_storage_path"):
            raise ValueError("LiveCaptureConnector needs shared_storage_path")
        rate, budget = extra.get("capture_rate"), extra.get("capture_bytes", DEFAULT_BYTES)
        if not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise ValueError(f"capture_rate must be above 0 and at most 1, got {rate!r}")
        if not isinstance(budget, int) or budget < 1:
            raise ValueError(f"capture_bytes must be a positive number of bytes, got {budget!r}")
        self._storage_path = storage_path(self._kv_transfer_config)
        self._num_writer_threads = num_writer_threads(self._kv_transfer_config)
        self._budget = budget
        self._rate = rate
        self._model = "" if vllm_config.model_config is None else vllm_config.model_config.model
        self._source = self._source_now()
        #: scheduler side: whether weights and mixers are those that the dataset is of
        self._captures = True

    def _source_now(self) -> dict[str, Any]:
        """What computes the samples, in the words of `LiveDataset`."""
        if self._vllm_config.model_config is None:
            return {"weights": []}
        source: dict[str, Any] = {"weights": weights_identity(self._vllm_config)}
        if (placement := placement_identity(self._vllm_config)) is not None:
            source["placement"] = placement
        return source

    @classmethod
    def check_request(
        cls, kv_transfer_config: KVTransferConfig, params: dict[str, Any], num_completions: int
    ) -> None:
        check_consent(params)

    # ---- worker side ---------------------------------------------------------------------------

    def _make_saver(self, copier: RowCopier) -> LiveSaver:
        dtype = str(copier.format.dtype).removeprefix("torch.")
        settings = {
            "model": self._model,
            "dtype": dtype,
            "layers": self._layer_ids,
            **self._source,
        }
        if self._storage != "auto":
            settings[STORAGE_DTYPE_KEY] = self._storage
        return LiveSaver(
            copier,
            self._dataset(settings),
            metadata=file_metadata(copier.format, self._layer_ids),
            budget=self._budget,
            num_writer_threads=self._num_writer_threads,
        )

    def _dataset(self, settings: dict[str, Any]) -> LiveDataset:
        try:
            return LiveDataset(Path(self._storage_path), settings)
        except OSError as error:
            raise VLLMValidationError(
                f"--capture-live-path {self._storage_path}: the dataset cannot be written: "
                f"{error.strerror}; choose a folder on a file system with room for it",
                "capture_live_path",
                self._storage_path,
            ) from None

    def get_kv_connector_stats(self) -> LiveCaptureStats | None:
        stats = None if self._saver is None else self._saver.take_stats()
        return None if stats is None or stats.is_empty() else stats

    # ---- scheduler side ------------------------------------------------------------------------

    def reset_cache(self) -> bool | None:
        """There may be new weights: what others compute is not captured."""
        self._look_at_source()
        return None

    def leave_memory(self, kv_cache_config: KVCacheConfig) -> None:
        """There may be other mixers: what they compute is not captured either."""
        super().leave_memory(kv_cache_config)
        if self.role is KVConnectorRole.SCHEDULER:
            self._look_at_source()

    def _look_at_source(self) -> None:
        captured, self._captures = self._captures, self._source_now() == self._source
        if captured and not self._captures:
            logger.error(
                "nothing is captured into %s, whose samples are of other weights or another "
                "placement; start a server with another directory",
                self._storage_path,
            )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if not params.get(CONSENT, False) or ended_badly(request) or not self._captures:
            return False, None
        # The last token was sampled but never went through the model: it has no row.
        token_ids = request.all_token_ids[:-1]
        if (
            not is_sampled(request.request_id, self._rate)
            or self._missing_rows(request, token_ids, block_ids) is not None
            or request.num_prompt_tokens > len(token_ids)
        ):
            return False, None
        self._pending.append(
            LiveSave(
                req_id=request.request_id,
                token_ids=torch.tensor(token_ids, dtype=torch.int64),
                num_prompt=request.num_prompt_tokens,
                block_ids=list(block_ids),
            )
        )
        return True, None
