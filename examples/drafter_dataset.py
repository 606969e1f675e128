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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import torch
from datasets.arrow_writer import ArrowWriter
from safetensors import SafetensorError, safe_open
from training_text import Sample

from vllm.hidden_states_storage import read_hidden_states, stored_layer_ids


@dataclass(frozen=True)
class Settings:
    """What decides the content of a dataset; a run can be continued only with the same ones.

    `layers` is None where a server chose them and the user did not say which, `weights`, a digest
    of the checkpoint's files, where they are not known here.
    """

    model: str
    dtype: str
    layers: list[int] | None
    seq_length: int
    samples: int
    inputs: list[str]
    weights: str | None = None


_INTS = pyarrow.list_(pyarrow.int64())
_SCHEMA = pyarrow.schema({"input_ids": _INTS, "loss_mask": _INTS, "seq_len": pyarrow.int64()})
#: samples in memory while they are written
_ROWS = 256


class DrafterDataset:
    """One dataset directory. Raises SystemExit with an explanation for what cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.staging = path / "hidden_states" / ".staging"
        self._settings_file = path / "extraction.json"
        #: of the rows of the first sample that was looked at
        self._form: str | None = None
        #: of the first one that says them
        self._layers_seen: list[int] | None = None

    @property
    def is_prepared(self) -> bool:
        return self._settings_file.is_file()

    @property
    def has_rows(self) -> bool:
        """Whether hidden states of any sample are there."""
        return next((self.path / "hidden_states").glob("hs_*.safetensors"), None) is not None

    def prepare(self, settings: Settings, samples: Iterable[Sample]) -> None:
        """Write everything but the hidden states, sample by sample; the settings last, as they mark
        completion.

        Each file gets its name when it is whole: a trainer may have an older version of it open.
        """
        new = self.path / ".preparing"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            self._write_text(new, settings, samples)
            last = self._settings_file.name
            for file in sorted(new.iterdir(), key=lambda file: (file.name == last, file.name)):
                os.replace(file, self.path / file.name)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _write_text(self, path: Path, settings: Settings, samples: Iterable[Sample]) -> None:
        datasets.disable_progress_bars()
        counts: Counter[int] = Counter()
        # Beside what is made of them: a dataset is not saved into its own directory.
        rows = path / "rows" / "all.arrow"
        rows.parent.mkdir()
        with ArrowWriter(path=str(rows), schema=_SCHEMA, writer_batch_size=_ROWS) as writer:
            for one in samples:
                ids, mask = one.token_ids, one.loss_mask
                writer.write({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
                pairs = zip(ids, mask, strict=True)
                counts.update(token for token, counted in pairs if counted)
            writer.finalize()
        datasets.Dataset.from_file(str(rows)).with_format("torch").save_to_disk(path)
        shutil.rmtree(rows.parent)
        torch.save(dict(counts), path / "token_freq.pt")
        text = json.dumps(asdict(settings), indent=1) + "\n"
        (path / self._settings_file.name).write_text(text)

    def check_settings(self, settings: Settings) -> None:
        """SystemExit unless the dataset was started with these settings."""
        stored = json.loads(self._settings_file.read_text())
        for name, value in asdict(settings).items():
            # Datasets of earlier versions do not say of which weights they are.
            if stored.get(name) != value and (name in stored or name != "weights"):
                raise SystemExit(
                    f"error: {self.path} was started with {name} {stored.get(name)}, not {value}; "
                    "continue with the same settings, or choose another --output"
                )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclusive use of the directory, with an empty staging directory inside it."""
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "capture.json").exists():
            raise SystemExit(
                f"error: {self.path} holds what a server captured, of which collect_capture.py "
                "makes a dataset; choose another --output"
            )
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
        """Whether the sample's file opens, is of its tokens, has a row for each, and rows like
        other samples'; reads no rows."""
        try:
            with safe_open(self.file_of(index), framework="pt") as file:
                rows = file.get_slice("hidden_states")
                token_ids = file.get_tensor("token_ids").tolist()
                own = rows.get_shape()[0] == len(token_ids) and token_ids == self.token_ids(index)
            file_of = self.file_of(index)
            return own and not (layers_problem(file_of, self.layers) or self._difference(file_of))
        except (FileNotFoundError, SafetensorError):
            return False

    def _difference(self, path: Path) -> str | None:
        """How a file's rows differ in form or layers from the first ones that were seen; None if
        they do not. A server may be started with other layers between two runs."""
        with safe_open(path, framework="pt") as file:
            rows = file.get_slice("hidden_states")
            _, columns, hidden = rows.get_shape()
            form = f"{columns} columns of {hidden} {rows.get_dtype()}"
        self._form = self._form or form
        if form != self._form:
            return f"{form}, while other samples have {self._form}"
        layers = stored_layer_ids(path)
        self._layers_seen = self._layers_seen or layers
        if layers is None or layers == self._layers_seen:
            return None
        return f"rows of layers {layers}, while other samples have those of {self._layers_seen}"

    def adopt(self, index: int, path: Path) -> None:
        """Check a finished file and move it to its place, atomically."""
        problem = self._problem(index, path)
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
            yield index, self._problem(index, self.file_of(index))

    def _problem(self, index: int, path: Path) -> str | None:
        """What is wrong with a file as that of a sample."""
        problem = problem_in(path, self.token_ids(index), self.layers)
        return problem or self._difference(path)


def layers_problem(path: Path, layers: list[int] | None) -> str | None:
    """Whether a file says that it is of other layers."""
    stored = stored_layer_ids(path)
    if stored is None or layers is None or stored == layers:
        return None
    return f"rows of layers {stored} instead of {layers}"


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
    if problem := layers_problem(path, layers):
        return problem
    if tensors["token_ids"].tolist() != token_ids:
        return "token ids differ from the sample's"
    if not torch.isfinite(hidden).all():
        return "values are not finite"
    return None
