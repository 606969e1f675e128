# SPDX-License-Identifier: Apache-2.0
"""The worker side of live capture: a sample is taken if there is room for it at once, or never."""

import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import tensor_file
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import (
    CopyEvent,
    RowCopier,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_saver import RowSaver
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import RowSave
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    CounterStats,
    KVConnectorPromMetrics,
)
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_storage import StoredRows
from vllm.logger import init_logger


class LiveDataset:
    """The directory that live requests' hidden states go to: a drafter dataset that grows.

        capture.json                    what is captured: model, weights, dtype, ids of the columns
        hidden_states/hs_3.safetensors  of sample 3, as offline extraction writes it
        samples.jsonl                   a line per sample, in their order: `{"num_prompt": n}`

    A sample is its line: a file without one is replaced by the next sample. What trainers read
    besides, `examples/collect_capture.py` makes of these. This process has the directory for
    itself. ValueError if another has it, or if what is captured there is not `settings`; OSError if
    it cannot be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._files = path / "hidden_states"
        self._lines = path / "samples.jsonl"
        self._files.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            self._take(path, settings)
            self._num_samples = self._whole_lines()
        except BaseException:
            os.close(self._lock_fd)
            raise
        #: bytes of the samples' files
        self.num_bytes = sum(
            self._file(i).stat().st_size
            for i in range(self._num_samples)
            if self._file(i).is_file()
        )
        self._writing = threading.Lock()

    def _take(self, path: Path, settings: dict[str, Any]) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VLLMValidationError(
                f"another server captures into {path}, or another replica of this one: start a "
                "server with a directory of its own for each"
            ) from None
        for left in self._files.glob(".*.partial"):  # of writers that were killed
            left.unlink()
        said = path / "capture.json"
        if not said.exists():
            others = (*path.glob("extraction.json"), *islice(self._files.glob("hs_*"), 1))
            if others:
                raise VLLMValidationError(
                    f"{others[0]} is no server's capture; choose another directory"
                )
            new = path / ".capture.json"
            new.write_text(json.dumps(settings, indent=1) + "\n")
            os.replace(new, said)
            return
        stored = json.loads(said.read_text())
        # Captures of earlier versions do not say of which weights and placement they are.
        unsaid = {"weights", "placement"} - stored.keys()
        if stored != {k: v for k, v in settings.items() if k not in unsaid}:
            raise VLLMValidationError(
                f"{path} holds captures of {stored}, not {settings}; choose another directory"
            )

    def _whole_lines(self) -> int:
        """Lines that are complete; what a killed server, or a full disk, left of one is cut off."""
        text = self._lines.read_bytes() if self._lines.exists() else b""
        end = text.rfind(b"\n") + 1
        if end < len(text):
            os.truncate(self._lines, end)
        return text.count(b"\n")

    def _file(self, index: int) -> Path:
        return self._files / f"hs_{index}.safetensors"

    def add(
        self, tensors: dict[str, Tensor], num_prompt: int, metadata: dict[str, str] | None = None
    ) -> None:
        """Write one sample of `hidden_states [n, columns, hidden]` and `token_ids [n]`, from any
        thread. `metadata`: of its file. OSError, and no sample, if that fails."""
        partial = self._files / f".{threading.get_ident()}.partial"
        try:
            tensor_file.write(str(partial), tensors, metadata)
            with self._writing:
                os.replace(partial, self._file(self._num_samples))
                self._add_line(json.dumps({"num_prompt": num_prompt}) + "\n")
                self._num_samples += 1
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _add_line(self, text: str) -> None:
        """OSError, and nothing of it, if that fails: the next line must not go on with it."""
        with self._lines.open("ab", buffering=0) as lines:
            end = lines.tell()
            if lines.write(text.encode()) < len(text):
                lines.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._lines))

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock_fd)


_SAMPLES, _BYTES, _DROPPED = "samples", "bytes", "dropped_"
#: why a request that was sampled is not in the dataset: its bytes are used up, all writers are
#: busy, or the disk failed
BUDGET, BUSY, FAILED = "budget", "busy", "failed"
REASONS = (BUDGET, BUSY, FAILED)


class LiveCaptureStats(CounterStats):
    """Counts since the last report."""

    def take(self, num_bytes: int) -> None:
        """A sample goes to a writer."""
        self.add(**{_SAMPLES: 1, _BYTES: num_bytes})

    def drop(self, reason: str) -> None:
        """A sample does not become one, for one of `REASONS`."""
        self.add(**{_DROPPED + reason: 1})


class LiveCapturePromMetrics(KVConnectorPromMetrics):
    """`vllm:live_capture_samples`, `_bytes` and `_dropped{reason}`."""

    def make_metrics(self, labelnames: list[str]) -> None:
        name = "vllm:live_capture"
        self._plain = {
            _SAMPLES: self._counter_cls(
                f"{name}_samples", "Live requests given to the writers.", labelnames
            ),
            _BYTES: self._counter_cls(f"{name}_bytes", "Bytes of these.", labelnames),
        }
        self._dropped = self._counter_cls(
            f"{name}_dropped",
            "Live requests that were sampled and are not in the dataset.",
            [*labelnames, "reason"],
        )
        for values in self.per_engine_labelvalues.values():
            for metric in self._plain.values():
                metric.labels(*values)
            for reason in REASONS:
                self._dropped.labels(*values, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            if key in self._plain:
                self._plain[key].labels(*values).inc(count)
            else:
                self._dropped.labels(*values, key.removeprefix(_DROPPED)).inc(count)


logger = init_logger(__name__)


@dataclass
class LiveSave(RowSave):
    """A finished request to capture; the first `num_prompt` of its tokens are the prompt's."""

    num_prompt: int


class LiveSaver(RowSaver):
    """`budget`: bytes of the dataset; `metadata`: of its files."""

    def __init__(
        self,
        copier: RowCopier,
        dataset: LiveDataset,
        *,
        metadata: dict[str, str],
        budget: int,
        num_writer_threads: int,
    ) -> None:
        super().__init__(copier, num_writer_threads)
        self._dataset = dataset
        self._metadata = metadata
        self._budget = budget
        #: bytes on disk or on their way there
        self._promised = dataset.num_bytes
        self._stats = LiveCaptureStats()

    def step(self, saves: Iterable[LiveSave], finished_req_ids: set[str]) -> set[str]:
        """Start copies where there is room, drop the rest; returns the requests whose blocks are
        not needed any more."""
        return {save.req_id for save in saves if not self._take(save)} | self._take_copied()

    def take_stats(self) -> LiveCaptureStats:
        """Since the last call."""
        with self._lock:
            stats, self._stats = self._stats, LiveCaptureStats()
        return stats

    def shutdown(self) -> None:
        """Finish what was taken."""
        super().shutdown()
        self._dataset.close()

    def _take(self, save: LiveSave) -> bool:
        num_tokens = len(save.token_ids)
        row_bytes = self._copier.format.row_bytes + torch.int64.itemsize
        num_bytes = tensor_file.HEADER_ALLOWANCE + num_tokens * row_bytes
        with self._lock:
            reason = None
            if self._promised + num_bytes > self._budget:
                reason = BUDGET
            elif not self._has_room:
                reason = BUSY
            if reason is not None:
                self._stats.drop(reason)
                return False
            self._promised += num_bytes
            self._stats.take(num_bytes)
        self._start(save, partial(self._write, save, num_bytes))
        return True

    def _write(self, save: LiveSave, num_bytes: int, rows: StoredRows, event: CopyEvent) -> None:
        """On a writer thread."""
        try:
            event.synchronize()
            tensors = {**rows.tensors, "token_ids": save.token_ids}
            self._dataset.add(tensors, save.num_prompt, self._metadata)
        except Exception as error:
            # Of a full disk, which every request that comes meets, one line.
            trace = None if isinstance(error, OSError) else error
            logger.error("request %s is not captured: %s", save.req_id, error, exc_info=trace)
            with self._lock:
                self._promised -= num_bytes
                self._stats.drop(FAILED)
