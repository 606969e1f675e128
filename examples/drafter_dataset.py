# SPDX-License-Identifier: Apache-2.0
"""A drafter-training dataset on disk, in the layout that speculators trains from.

    *.arrow, state.json, ...        the samples, by `datasets.save_to_disk`: `input_ids [n]`,
                                    `loss_mask [n]`, `seq_len`
    token_freq.pt                   {token id: occurrences where the loss mask is 1}
    hidden_states/hs_3.safetensors  of sample 3: `hidden_states [n, layers, hidden]`,
                                    `token_ids [n]`
    extraction.json                 the settings of the run (ours; trainers ignore it)

The last of the layers is the model's last one: speculators takes it as what the drafter is to
predict from, and the others as the drafter's input.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors import SafetensorError, safe_open
from training_text import Sample

from vllm.hidden_states_storage import read_hidden_states


@dataclass(frozen=True)
class Settings:
    """What decides the content of a dataset; a run can be continued only with the same ones.

    `layers` is None where a server chose them and the user did not say which.
    """

    model: str
    dtype: str
    layers: list[int] | None
    seq_length: int
    samples: int
    inputs: list[str]


class DrafterDataset:
    """One dataset directory. Raises SystemExit with an explanation for what cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.staging = path / "hidden_states" / ".staging"
        self._settings_file = path / "extraction.json"

    @property
    def is_prepared(self) -> bool:
        return self._settings_file.is_file()

    def prepare(self, settings: Settings, samples: list[Sample]) -> None:
        """Write everything but the hidden states; the settings last, as they mark completion."""
        self.path.mkdir(parents=True, exist_ok=True)
        datasets.disable_progress_bars()
        columns: dict[str, list[Any]] = {
            "input_ids": [sample.token_ids for sample in samples],
            "loss_mask": [sample.loss_mask for sample in samples],
            "seq_len": [len(sample.token_ids) for sample in samples],
        }
        datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(self.path)
        counts: Counter[int] = Counter()
        for sample in samples:
            pairs = zip(sample.token_ids, sample.loss_mask, strict=True)
            counts.update(token for token, counted in pairs if counted)
        torch.save(dict(counts), self.path / "token_freq.pt")
        self._settings_file.write_text(json.dumps(asdict(settings), indent=1) + "\n")

    def check_settings(self, settings: Settings) -> None:
        """SystemExit unless the dataset was started with these settings."""
        stored = json.loads(self._settings_file.read_text())
        for name, value in asdict(settings).items():
            if stored.get(name) != value:
                raise SystemExit(
                    f"error: {self.path} was started with {name} {stored.get(name)}, not {value}; "
                    "continue with the same settings, or choose another --output"
                )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclusive use of the directory, with an empty staging directory inside it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SystemExit(f"error: another run is writing to {self.path}") from error
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir(parents=True)
            try:
                yield
            finally:
                shutil.rmtree(self.staging, ignore_errors=True)

    @cached_property
    def _rows(self) -> Any:
        if not self.is_prepared:
            raise SystemExit(f"error: {self.path} is not a dataset of this example")
        return datasets.load_from_disk(str(self.path)).with_format(None)

    @cached_property
    def layers(self) -> list[int] | None:
        """Ids of the columns; None where nobody said them."""
        stored: list[int] | None = json.loads(self._settings_file.read_text())["layers"]
        return stored

    def __len__(self) -> int:
        return len(self._rows)

    def token_ids(self, index: int) -> list[int]:
        ids: list[int] = self._rows[index]["input_ids"]
        return ids

    def loss_mask(self, index: int) -> list[int]:
        mask: list[int] = self._rows[index]["loss_mask"]
        return mask

    def file_of(self, index: int) -> Path:
        return self.path / "hidden_states" / f"hs_{index}.safetensors"

    def is_finished(self, index: int) -> bool:
        """Whether the sample's file opens and has a row per token; reads no rows."""
        try:
            with safe_open(self.file_of(index), framework="pt") as file:
                rows: int = file.get_slice("hidden_states").get_shape()[0]
        except (FileNotFoundError, SafetensorError):
            return False
        return rows == self._rows[index]["seq_len"]

    def adopt(self, index: int, path: Path) -> None:
        """Check a finished file and move it to its place, atomically."""
        problem = problem_in(path, self.token_ids(index), self.layers)
        if problem:
            raise SystemExit(f"error: the engine's rows of sample {index} are bad: {problem}")
        target = self.file_of(index)
        try:
            os.replace(path, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            copy = self.staging / target.name
            shutil.copyfile(path, copy)
            os.replace(copy, target)
            path.unlink()

    def problems(self) -> Iterator[tuple[int, str | None]]:
        """`(index, problem or None)` of every sample, all values read."""
        for index in range(len(self)):
            yield index, problem_in(self.file_of(index), self.token_ids(index), self.layers)


def problem_in(path: Path, token_ids: list[int], layers: list[int] | None) -> str | None:
    """What is wrong with a sample's file, if anything; it has a column for each of `layers`."""
    try:
        tensors = read_hidden_states(path)
    except FileNotFoundError:
        return "missing"
    except (OSError, SafetensorError) as error:
        return f"cannot be opened: {error}"
    if tensors.keys() != {"hidden_states", "token_ids"}:
        return f"holds {sorted(tensors)} instead of hidden_states and token_ids"
    hidden = tensors["hidden_states"]
    if hidden.dim() != 3 or len(hidden) != len(token_ids):
        return f"rows of shape {list(hidden.shape)} for {len(token_ids)} tokens"
    if layers is not None and hidden.shape[1] != len(layers):
        return f"{hidden.shape[1]} columns for the layers {layers}"
    if tensors["token_ids"].tolist() != token_ids:
        return "token ids differ from the sample's"
    if not torch.isfinite(hidden).all():
        return "values are not finite"
    return None
