# SPDX-License-Identifier: Apache-2.0
"""What the hosts of one engine must have in common, and how they differ."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import (
    checkpoint_files,
    checkpoints,
    config_digest,
    tail_digest,
)
from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils.config import read_config_dict
from vllm.utils.options import flag_name, flag_of
from vllm.version import __version__

#: what a host may have of its own: where hosts and files are, names made up at a start, secrets,
#: and what workers have nothing to do with
_OWN = frozenset(
    {
        "node_rank",
        "master_addr",
        "master_port",
        "download_dir",
        "engine_id",
        "hf_token",
        "served_model_name",
        "allowed_local_media_path",
        "disable_log_stats",
        "use_tqdm_on_load",
    }
)
#: variables that decide what the workers of a host compute
_VARIABLES = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_SANITIZE",
)
_MOST_SHOWN = 5
#: one path may be another directory on another host; the drafter's, if it has a checkpoint
_WEIGHTS = ("the last bytes of the model's weights", "the last bytes of the drafter's weights")


def versions() -> dict[str, str]:
    """Of what the workers of all hosts must have alike."""
    return {
        "vllm": __version__,
        "torch": torch.__version__.partition("+")[0],
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def check_versions(theirs: Mapping[str, str], whose: str) -> None:
    """`VLLMValidationError`, which names `whose` they are, where they are not this host's."""
    differing = [
        f"{name} is {theirs.get(name, 'older')} there and {ours} here"
        for name, ours in versions().items()
        if theirs.get(name) != ours
    ]
    if differing:
        raise VLLMValidationError(
            f"{whose}: {'; '.join(differing)}; all hosts of an engine need the same versions",
            "distributed_executor_backend",
        )


def agreement(config: VllmConfig) -> dict[str, str]:
    """Name of a setting (a flag, where it is one) -> its value as text, as this host has resolved
    it."""
    stated = {
        **versions(),
        "the device": config.device_config.device_type,
        "config.json of the model": config_digest(config.model_config.hf_config.to_dict()),
        **_drafter(config),
        **_weights_here(config),
        **{name: _text(getattr(envs, name)) for name in _VARIABLES},
    }
    for field in dataclasses.fields(config):
        part, info = getattr(config, field.name), flag_of(field)
        if dataclasses.is_dataclass(part):
            inside = "" if info is None else flag_name(info.name or field.name) + " "
            for name, value in _settings(part).items():
                stated[inside + (name if inside else flag_name(name))] = _text(value)
        elif info is not None:
            stated[flag_name(info.name or field.name)] = _text(part)
    return stated


def _drafter(config: VllmConfig) -> dict[str, str]:
    drafter = config.drafter
    if drafter is None or drafter.checkpoint is None:
        return {}
    raw = read_config_dict(drafter.checkpoint, revision=drafter.checkpoint_revision)
    return {"config.json of the drafter": config_digest(raw)}


def _weights_here(config: VllmConfig) -> dict[str, str]:
    """Digests of the weights that no download is still to bring."""
    found = {}
    for name, checkpoint in zip(_WEIGHTS, checkpoints(config), strict=False):
        if files := checkpoint_files(config, *checkpoint):
            found[name] = _digest([tail_digest(path) for path in files])
    return found


def differences(ours: Mapping[str, str], theirs: Mapping[str, str], node_rank: int) -> str | None:
    """Which settings of that host differ from those of the first one, in words; None: none does."""
    differing = [
        f"{name} is {theirs.get(name)} on node {node_rank} and {ours.get(name)} on node 0"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
        and (name not in _WEIGHTS or (name in ours and name in theirs))
    ]
    if not differing:
        return None
    more = len(differing) - _MOST_SHOWN
    shown = differing[:_MOST_SHOWN] + ([f"{more} more"] if more > 0 else [])
    return "; ".join(shown)


def _settings(part: Any) -> dict[str, Any]:
    """Name -> value of the fields of a config that a user sets."""
    flags = {field.name: flag_of(field) for field in dataclasses.fields(part)}
    return {
        info.name or name: getattr(part, name)
        for name, info in flags.items()
        if info is not None and name not in _OWN
    }


def _text(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """`value` as JSON has it; an object of an unknown kind by its class alone."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(one)) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(_settings(value))
    if isinstance(value, torch.dtype):
        return str(value)
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]
