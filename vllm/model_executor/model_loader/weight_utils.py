# SPDX-License-Identifier: Apache-2.0
"""Finding and reading a checkpoint's safetensors files."""

import json
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader.device_stream import (
    StoredTensor,
    read_header,
    stream_tensors,
)
from vllm.model_executor.parameter import default_weight_loader as default_weight_loader
from vllm.model_executor.parameter import load_sections, sharded_section

INDEX_NAME = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
WHOLE_NAME = "model.safetensors"
#: file -> names to read from it, None for all
FilePlan = dict[Path, list[str] | None]


def checkpoint_dir(
    model: str, revision: str | None, download_dir: str | None, ignore_patterns: Sequence[str]
) -> Path:
    """The local directory of a checkpoint, downloaded from the HF hub if it is not one."""
    local = Path(model)
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=["*.safetensors", "*.safetensors.index.json"],
            ignore_patterns=list(ignore_patterns),
        )
    )


def safetensors_files(
    directory: Path, ignore_patterns: Sequence[str] = (), named: object = None
) -> FilePlan:
    """The files to read: `named`, the config's `transformers_weights`, a file or an index; without
    it `model.safetensors`, which is the whole checkpoint unless the index names it, else what the
    index names, else every safetensors file.

    Raises ValueError when there is none, when the index is unreadable or names an absent file, when
    `named` is no such file, and when two files have a tensor of one name.
    """
    files = [
        path
        for path in sorted(directory.glob("*.safetensors"))
        if not any(fnmatch(path.name, pattern) for pattern in ignore_patterns)
    ]
    if named is not None:
        return _named_files(directory, named, files)
    index, whole = directory / INDEX_NAME, directory / WHOLE_NAME
    indexed = _indexed_files(index) if index.is_file() else {}
    if whole in files and whole not in indexed:
        why = f"unless {INDEX_NAME} names it, it is the whole checkpoint, as for transformers"
        _record_choice(WHOLE_NAME, why, [path for path in (*indexed, *files) if path != whole])
        return {whole: None}
    _check_present(index, indexed)
    if indexed:
        return indexed
    if not files:
        others = sorted(path.name for path in directory.glob("*.bin"))
        found = f"found only {', '.join(others)}; convert them" if others else "found none"
        raise VLLMValidationError(f"{directory}: no *.safetensors file ({found})")
    if len(files) > 1:
        _check_apart(files)
    return {path: None for path in files}


def _named_files(directory: Path, named: object, files: Sequence[Path]) -> FilePlan:
    """What `transformers_weights` names, of a directory with `files`."""
    is_name = isinstance(named, str) and Path(named).name == named
    if not is_name or not str(named).endswith((".safetensors", _INDEX_SUFFIX)):
        raise VLLMValidationError(
            f"{directory / 'config.json'}: transformers_weights {named!r} is not supported; it may "
            f"name a file *.safetensors, or an index *{_INDEX_SUFFIX}, in the same directory"
        )
    path = directory / str(named)
    if not path.is_file():
        raise VLLMValidationError(f"{path} is absent, which transformers_weights names")
    plan: FilePlan = {path: None}
    if path.name.endswith(_INDEX_SUFFIX):
        plan = _indexed_files(path)
        _check_present(path, plan)
    why = "config.json names it in transformers_weights"
    _record_choice(path.name, why, [other for other in files if other not in plan])
    return plan


def _record_choice(chosen: str, why: str, left_out: Sequence[Path]) -> None:
    if left_out:
        names = dict.fromkeys(path.name for path in left_out)
        decisions.record("checkpoint files", chosen, why, f"reading {', '.join(names)}")


def _check_present(index: Path, indexed: FilePlan) -> None:
    absent = [path.name for path in indexed if not path.is_file()]
    if absent:
        raise VLLMValidationError(f"{index} names absent files: {', '.join(absent)}")


def _check_apart(files: Sequence[Path]) -> None:
    """Raises ValueError for a name that two files have: which one is meant, nothing says."""
    owners: dict[str, Path] = {}
    for path in files:
        for one in read_header(path):
            first = owners.setdefault(one.name, path)
            if first != path:
                raise VLLMValidationError(
                    f"{path.parent}: both {first.name} and {path.name} have {one.name}; leave one "
                    f"file out (--ignore-patterns {path.name}), or add a {INDEX_NAME}"
                )


def _indexed_files(index: Path) -> FilePlan:
    """Raises ValueError for what is no index with names of tensors and of their files."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        owners = [(name, index.parent / file) for name, file in sorted(weight_map.items())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VLLMValidationError(f"{index}: not a safetensors index ({error!r})") from error
    if not owners:
        raise VLLMValidationError(f"{index}: not a safetensors index (it names no tensor)")
    plan: dict[Path, list[str] | None] = {}
    for name, path in owners:
        names = plan.setdefault(path, [])
        assert names is not None
        names.append(name)
    return plan


def part_of(plan: FilePlan, wants: Callable[[str], bool]) -> tuple[FilePlan, list[str]]:
    """The tensors of `plan` whose names are wanted, and the files that have any; the other names.
    Reads headers alone."""
    part: FilePlan = {}
    left_out: list[str] = []
    for path, names in plan.items():
        present = names if names is not None else [one.name for one in read_header(path)]
        wanted = [name for name in present if wants(name)]
        left_out += sorted(set(present) - set(wanted))
        if wanted:
            part[path] = wanted
    return part, left_out


def device_weights_iterator(
    plan: FilePlan, device: torch.device, use_tqdm: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Stream `(name, tensor on device)`, read by threads ahead of use.

    Raises ValueError naming a file that is truncated or corrupt, or that lacks an indexed name.
    """
    files = [(path, _wanted(path, names)) for path, names in plan.items()]
    total = sum(one.num_bytes for _, tensors in files for one in tensors)
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not use_tqdm
    ) as bar:
        for name, tensor in stream_tensors(files, device):
            yield name, tensor
            bar.update(tensor.nbytes)


def _wanted(path: Path, names: list[str] | None) -> list[StoredTensor]:
    stored = read_header(path)
    if names is None:
        return stored
    absent = sorted(set(names) - {one.name for one in stored})
    if absent:
        raise VLLMValidationError(_lacks(path, absent))
    wanted = set(names)
    return [one for one in stored if one.name in wanted]


def _lacks(path: Path, absent: list[str]) -> str:
    return f"{path} lacks {len(absent)} indexed tensors: {absent[:20]}"


def safetensors_weights_iterator(
    plan: FilePlan, use_tqdm: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Stream `(name, tensor)`; a tensor is a view of the mapped file, read when it is copied.

    Raises ValueError naming a file that is truncated or corrupt, or that lacks an indexed name.
    """
    bar = tqdm(plan.items(), desc="Loading weights", disable=not use_tqdm or len(plan) == 1)
    for path, names in bar:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                present = set(file.keys())
                absent = sorted(set(names or ()) - present)
                if absent:
                    raise VLLMValidationError(_lacks(path, absent))
                for name in names if names is not None else sorted(present):
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise VLLMValidationError(f"{path} is truncated or corrupt: {error}") from error


def sharded_weight_loader(shard_axis: int) -> Callable[[Tensor, Tensor], None]:
    """A weight loader that cuts `shard_axis` evenly over the tensor-parallel group."""

    def load(param: Tensor, loaded: Tensor) -> None:
        section = sharded_section(loaded.shape[shard_axis])
        load_sections(param, loaded, sections=(section,), dim=shard_axis)

    return load
