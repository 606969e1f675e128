# SPDX-License-Identifier: Apache-2.0
"""What fixes the state of a prefix besides its tokens: what two engines, or an engine and its next
start, must have in common for one to continue from what the other left. JSON values."""

import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import xxhash

from vllm.config import VllmConfig
from vllm.model_executor.placements import expand
from vllm.transformers_utils.config import read_config_dict
from vllm.transformers_utils.configs.apriel2 import Apriel2TextConfig
from vllm.utils.torch_utils import get_kv_cache_torch_dtype
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.version import __version__

#: bytes at the end of every file of weights that say which training run wrote it
_TAIL_BYTES = 64 * 1024
#: differ between copies of one checkpoint and change nothing
_CONFIG_NOISE = ("_name_or_path", "transformers_version")


def model_identity(vllm_config: VllmConfig) -> dict[str, Any]:
    """What the values of a layer's state depend on, however they lie in memory."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    # `auto` and the model's dtype, `fp8` and `fp8_e4m3` are two names of one.
    cache_dtype = get_kv_cache_torch_dtype(vllm_config.cache_config.cache_dtype, model.dtype)
    return {
        "model_config": config_digest(model.hf_config.to_dict()),
        "placement": placement_identity(vllm_config),
        "weights": weights_identity(vllm_config),
        "captured_layers": (
            speculative.extraction_layer_ids
            if speculative is not None and speculative.uses_extract_hidden_states()
            else None
        ),
        "drafter": _drafter(vllm_config),
        "engine_version": __version__,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "dtype": str(model.dtype),
        "cache_dtype": str(cache_dtype),
        "quantization": str(model.quantization),
    }


def weights_identity(vllm_config: VllmConfig) -> list[Any]:
    """The target's weights, as its checkpoint has them now."""
    model = vllm_config.model_config
    return _weights(vllm_config, model.model, model.revision)


def placement_identity(vllm_config: VllmConfig) -> str | None:
    """A supernet's mixer of each layer, joined by commas, however they were asked for; `_` where a
    layer has one only. None where no layer has several."""
    model = vllm_config.model_config
    config = model.hf_text_config
    if not isinstance(config, Apriel2TextConfig):
        return None
    choices, layers = config.choices(), range(config.num_hidden_layers)
    if not choices:
        return None
    names = [config.main_mixer_name(layer) for layer in layers]
    if model.placement is not None:
        names = expand(model.placement, len(layers))
    return ",".join(names[layer] if layer in choices else "_" for layer in layers)


def state_identity(vllm_config: VllmConfig, config: KVCacheConfig) -> dict[str, Any]:
    """What the bytes of a block of the arena depend on, and its name."""
    identity = {
        **model_identity(vllm_config),
        "hash_algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
        "hash_seed": _seed_digest(os.environ.get("PYTHONHASHSEED")),
        "state_groups": [
            {
                "spec": _spec(group.kv_cache_spec),
                "layers": list(group.layer_names),
                "block_bytes": plan.block_bytes,
                "layer_offsets": list(plan.layer_offsets.values()),
            }
            for group, plan in zip(config.kv_cache_groups, config.plan.groups, strict=True)
        ],
    }
    found: dict[str, Any] = json.loads(json.dumps(identity, default=repr))
    return found


def _spec(spec: KVCacheSpec) -> dict[str, Any]:
    """Field by field, so that a difference is named. A recurrent state is one block, however long
    the longest request may be, which is its `block_size`."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if spec.is_recurrent:
        del values["block_size"]
    return {"kind": spec.kind, **values}


def checkpoints(vllm_config: VllmConfig) -> list[tuple[str, str | None]]:
    """Name or directory, and revision, of every checkpoint whose weights make the state; of random
    weights none."""
    if _is_random(vllm_config):
        return []
    model, drafter = vllm_config.model_config, vllm_config.drafter
    found: list[tuple[str, str | None]] = [(model.model, model.revision)]
    if drafter is not None and drafter.checkpoint is not None:
        found.append((drafter.checkpoint, drafter.checkpoint_revision))
    return found


def checkpoint_files(vllm_config: VllmConfig, model: str, revision: str | None) -> list[Path]:
    """The files of weights of a checkpoint that is on this machine; else none."""
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        cache = vllm_config.load_config.download_dir
        try:
            directory = Path(
                snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
            )
        except (LocalEntryNotFoundError, HFValidationError):
            return []
    return sorted(directory.glob("*.safetensors"))


def _drafter(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """Of a drafter whose layers keep state beside the target's."""
    drafter = vllm_config.drafter
    if drafter is None or not (drafter.reads_target or drafter.is_draft_model):
        return None
    checkpoint, revision = drafter.checkpoint, drafter.checkpoint_revision
    own: dict[str, Any] = {}
    if checkpoint is not None:
        own["model_config"] = config_digest(read_config_dict(checkpoint, revision=revision))
        own["weights"] = _weights(vllm_config, checkpoint, revision)
    return {"method": drafter.method, "layer_ids": list(drafter.layer_ids), **own}


def _seed_digest(seed: str | None) -> str | None:
    """Whoever knows the seed can prepare names of prefixes, so it is not told."""
    return None if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:16]


def config_digest(config: dict[str, Any]) -> str:
    """Of what a `config.json` says, wherever it lies."""
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _weights(vllm_config: VllmConfig, model: str, revision: str | None) -> list[Any]:
    """Of each file its name, size and the digest of its last bytes; paths and times differ between
    machines. Of a checkpoint that is not on this machine its name."""
    if _is_random(vllm_config):
        return ["dummy", vllm_config.model_config.seed]
    files = checkpoint_files(vllm_config, model, revision)
    return [tail_digest(path) for path in files] or [model, str(revision)]


def _is_random(vllm_config: VllmConfig) -> bool:
    return vllm_config.load_config.load_format == "dummy"


def tail_digest(path: Path) -> list[Any]:
    """Name, size and the digest of the last bytes of a file of weights."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return [path.name, size, xxhash.xxh3_64_hexdigest(file.read())]
