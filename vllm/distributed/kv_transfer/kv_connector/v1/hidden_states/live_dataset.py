# SPDX-License-Identifier: Apache-2.0
"""The directory that live requests' hidden states go to: a drafter dataset that grows.

    capture.json                    what is captured: model, dtype, ids of the columns
    hidden_states/hs_3.safetensors  of sample 3, as offline extraction writes it
    samples.jsonl                   a line per sample, in their order: `{"num_prompt": n}`

A sample is its line: a file without one is replaced by the next sample. What trainers read besides,
`examples/collect_capture.py` makes of these.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import tensor_file


class LiveDataset:
    """One directory, which this process has for itself. ValueError if another has it, or if what
    is captured there is not `settings`; OSError if it cannot be written."""

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
            raise ValueError(f"another server captures into {path}") from None
        said = path / "capture.json"
        if not said.exists():
            said.write_text(json.dumps(settings, indent=1) + "\n")
            return
        stored = json.loads(said.read_text())
        if stored != settings:
            raise ValueError(
                f"{path} holds captures of {stored}, not {settings}; choose another directory"
            )

    def _whole_lines(self) -> int:
        """Lines that are complete; what a killed server left of one is cut off."""
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
                with self._lines.open("a") as lines:
                    lines.write(json.dumps({"num_prompt": num_prompt}) + "\n")
                self._num_samples += 1
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock_fd)
