# SPDX-License-Identifier: Apache-2.0
"""Loading of model configs through transformers, with one clear sentence for each failure."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils.lean_import import without_model_classes
from vllm.transformers_utils.speculators import METHODS, verifier_of
from vllm.utils.class_registry import resolve_class
from vllm.utils.options import merged

#: old names of entries of `rope_parameters`
_ROPE_DICT, _ROPE_ENTRIES = "rope_scaling", ("rope_theta", "partial_rotary_factor")
_MODELOPT_FILE = "hf_quant_config.json"
#: keys that describe the checkpoint as a whole, never a part of it
_TOP_ONLY = frozenset({"architectures", "model_type"})


def apply_overrides(config: PretrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Merge `overrides` in place; nested objects merge key by key.

    A key that only the text part has goes there; one that both have (as `dtype`) goes to both.
    """
    text = config.get_text_config(decoder=True)
    wraps = text is not config
    known, text_fields = set(config.to_dict()), text.to_dict()
    text_known = set(text_fields)
    for key, value in _modern_rope(overrides, text_fields).items():
        in_text = wraps and key in text_known and key not in _TOP_ONLY
        if in_text:
            _merge_attribute(text, key, value)
        if not in_text or key in known:
            _merge_attribute(config, key, value)
    if "num_hidden_layers" in overrides and "layer_types" not in overrides:
        _fit_layer_types(text)


def _modern_rope(overrides: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, `rope_theta` and `partial_rotary_factor` under their present name,
    `rope_parameters`. VLLMValidationError where the config has several rotations, by name, and
    these are for none of them."""
    result = dict(overrides)
    if "rope_parameters" not in fields:
        return result
    rope: dict[str, Any] = {}
    if isinstance(result.get(_ROPE_DICT), Mapping):
        rope.update(result.pop(_ROPE_DICT))
        if "type" in rope:
            rope.setdefault("rope_type", rope.pop("type"))
    rope.update({key: result.pop(key) for key in _ROPE_ENTRIES if key in result})
    if rope:
        result["rope_parameters"] = merged(rope, result.get("rope_parameters", {}))
    given, current = result.get("rope_parameters") or {}, fields["rope_parameters"] or {}
    names = [name for name, entry in current.items() if isinstance(entry, Mapping)]
    for_none = [key for key in given if key not in names]
    if names and for_none:
        raise VLLMValidationError(
            f"hf_overrides: {', '.join(for_none)} must be given for one of the model's rotations, "
            f'such as {{"rope_parameters": {{"{names[0]}": {{...}}}}}}; they are '
            + ", ".join(names),
            parameter="hf_overrides",
        )
    return result


def _fit_layer_types(text: PretrainedConfig) -> None:
    """A smaller `num_hidden_layers` keeps the first layers' types; a larger one has no types."""
    layer_types = getattr(text, "layer_types", None)
    count = getattr(text, "num_hidden_layers", None)
    if not layer_types or count is None or count == len(layer_types):
        return
    if count > len(layer_types):
        raise VLLMValidationError(
            f"hf_overrides: num_hidden_layers {count} is more than the {len(layer_types)} entries "
            "of layer_types; override layer_types too",
            parameter="hf_overrides",
        )
    text.layer_types = layer_types[:count]


def _merge_attribute(config: PretrainedConfig, key: str, value: Any) -> None:
    from transformers import PretrainedConfig

    current = getattr(config, key, None)
    if isinstance(value, Mapping) and isinstance(current, PretrainedConfig):
        apply_overrides(current, value)
    elif isinstance(value, Mapping) and isinstance(current, Mapping):
        setattr(config, key, merged(current, value))
    else:
        setattr(config, key, value)


#: model_type -> config class, for types transformers does not know; plugins add theirs
_CONFIG_REGISTRY: dict[str, type[PretrainedConfig]] = {}
#: the same for our own classes, dotted path, imported on first use
_OWN_CONFIGS = {
    "apriel2": "vllm.transformers_utils.configs.apriel2.Apriel2Config",
    "apriel2_text": "vllm.transformers_utils.configs.apriel2.Apriel2TextConfig",
}

HfOverrides = Mapping[str, Any] | Callable[["PretrainedConfig"], "PretrainedConfig"]


def get_config(
    model: str | Path,
    trust_remote_code: bool = False,
    revision: str | None = None,
    code_revision: str | None = None,
    *,
    hf_overrides: HfOverrides | None = None,
) -> PretrainedConfig:
    """The checkpoint's config with `hf_overrides` applied.

    `model` is a local directory or a hub name. Raises `VLLMValidationError` when there is no
    readable config, the type is unknown, or the checkpoint is a speculators draft model.
    """
    raw = read_config_dict(model, revision=revision)
    _refuse_speculators(str(model), raw)
    config = _parse(str(model), raw, trust_remote_code, revision, code_revision)
    _settle_rope(config)
    _adopt_compression(config)
    if getattr(config, "quantization_config", None) is None:
        _add_modelopt(config, str(model), revision)
    if callable(hf_overrides):
        return _checked(hf_overrides(config))
    _override(config, hf_overrides or {})
    return config


def _settle_rope(config: PretrainedConfig) -> None:
    """Put the length that a scaled rotation was trained with into `rope_parameters`, where the
    config has it beside them: transformers does so when it builds the model."""
    text = config.get_text_config(decoder=True)
    if text.to_dict().get("original_max_position_embeddings") is not None:
        text.standardize_rope_params()


def _adopt_compression(config: PretrainedConfig) -> None:
    """`compression_config`, the other name that compressed-tensors has for what it writes, is read
    where there is no `quantization_config`; transformers leaves it as it is."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "compression_config", None)
        if isinstance(found, Mapping) and getattr(part, "quantization_config", None) is None:
            part.quantization_config = {"quant_method": "compressed-tensors", **found}


def _add_modelopt(config: PretrainedConfig, model: str, revision: str | None) -> None:
    """The `quantization_config` of older ModelOpt checkpoints, which have it in another file."""
    from transformers.utils import cached_file

    try:
        path = cached_file(model, _MODELOPT_FILE, revision=revision)
    except OSError:
        path = None
    if path is None:
        return
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))["quantization"]
        if found["quant_algo"] is not None:  # of keys and values alone
            config.quantization_config = {"quant_method": "modelopt", **found}
    except (ValueError, KeyError, TypeError) as error:
        raise _model_error(f"{model}/{_MODELOPT_FILE} cannot be used: {error!r}", model) from None


def _refuse_speculators(model: str, raw: Mapping[str, Any]) -> None:
    """Raise `VLLMValidationError` when `raw` is the config of a speculators draft model."""
    kind = raw.get("speculators_model_type")
    if kind is None:
        return
    instead = verifier_of(raw) or "its own config names none"
    supported = "" if kind in METHODS else f"drafting with {kind} is not supported; "
    raise _model_error(
        f"{model!r} is a speculators draft checkpoint ({kind}), which is no model by itself; "
        f"{supported}serve the verifier instead: {instead}",
        model,
    )


def _override(config: PretrainedConfig, overrides: Mapping[str, Any]) -> None:
    from huggingface_hub.errors import StrictDataclassError

    try:
        apply_overrides(config, overrides)
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        raise VLLMValidationError(f"--hf-overrides: {reason}", "hf_overrides") from None


def _checked(config: Any) -> PretrainedConfig:
    from transformers import PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        raise VLLMValidationError(
            f"hf_overrides: the callable must return the config, got {config!r}", "hf_overrides"
        )
    return config


def read_config_dict(model: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """`config.json` as a dict; a local directory is read without any network access."""
    from transformers.utils import cached_file

    if Path(model).is_file():
        raise _model_error(
            f"{model} is a file; give the directory that holds config.json and the weights", model
        )
    try:
        path = cached_file(str(model), "config.json", revision=revision)
        if path is None:
            raise FileNotFoundError("it has no config.json")
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _model_error(f"{model}/config.json is not valid JSON: {error}", model) from None
    except OSError as error:
        reason = "is neither a local directory nor a model that can be fetched: "
        reason += str(error).strip().splitlines()[0]
        if _is_path(str(model)):
            reason = (
                "is neither a local directory nor the name of a model (owner/name): give the "
                "directory that holds config.json and the weights"
            )
        if Path(model).is_dir():
            reason = f"holds no config.json that can be read, so it is not a checkpoint: {error}"
        raise _model_error(f"{str(model)!r} {reason}", model) from None
    if not isinstance(raw, dict):
        raise _model_error(f"{model}/config.json must hold a JSON object", model)
    return raw


def _is_path(model: str) -> bool:
    """Whether this cannot be a name on the hub, which is `name` or `owner/name`."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1


def _parse(
    model: str,
    raw: dict[str, Any],
    trust_remote_code: bool,
    revision: str | None,
    code_revision: str | None,
) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = raw.get("model_type")
    known = _known_config(model_type)
    if known is not None:
        return known.from_pretrained(model, revision=revision or "main")
    # Remote code may well import model classes.
    lean = nullcontext() if trust_remote_code else without_model_classes()
    try:
        with lean:
            return AutoConfig.from_pretrained(
                model,
                trust_remote_code=trust_remote_code,
                revision=revision,
                code_revision=code_revision,
            )
    except (
        *(ValueError, KeyError, TypeError, AttributeError, OSError),
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())
        hint = "" if trust_remote_code else _remote_code_hint(raw)
        if isinstance(model_type, str) and model_type not in CONFIG_MAPPING and not hint:
            reason = (
                f"transformers {transformers.__version__} does not know this type; a newer one "
                "may, or a plugin can register it (docs/adding_a_model.md)"
            )
        raise _model_error(
            f"config.json of {model!r} (model_type {model_type!r}) cannot be used: {reason}{hint}",
            model,
        ) from None


def _known_config(model_type: Any) -> type[PretrainedConfig] | None:
    """The config class of a type that transformers does not have; it goes before remote code."""
    if model_type not in _CONFIG_REGISTRY and model_type in _OWN_CONFIGS:
        _CONFIG_REGISTRY[model_type] = resolve_class(_OWN_CONFIGS[model_type])
    return _CONFIG_REGISTRY.get(model_type)


def _remote_code_hint(raw: dict[str, Any]) -> str:
    return "; it needs --trust-remote-code" if "auto_map" in raw else ""


def _model_error(message: str, model: str | Path) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="model", value=str(model))


def get_hf_text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the text decoder: `config` itself unless it wraps several parts."""
    return config.get_text_config(decoder=True)


def get_generation_config(
    model: str, *, revision: str | None = None, required: bool = False
) -> dict[str, Any]:
    """The generation settings of `model` that differ from transformers' defaults.

    Empty when there are none and they are not `required`. Raises `VLLMValidationError` when the
    file is broken, or absent though required, and for end-of-sequence ids that are no numbers.
    """
    from transformers import GenerationConfig

    path = Path(model)
    absent = path.is_dir() and not (path / "generation_config.json").is_file()
    if absent and not required:
        return {}
    try:
        found = GenerationConfig.from_pretrained(model, revision=revision or "main").to_diff_dict()
        _check_eos(found.get("eos_token_id"))
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, OSError) and not path.is_dir() and not required:
            return {}
        reason = str(error).strip().splitlines()[0]
        raise VLLMValidationError(
            f"generation_config.json of {model!r} cannot be used: {reason}",
            parameter="generation_config",
            value=model,
        ) from None
    return found


def _check_eos(ids: Any) -> None:
    """Raises ValueError for other things than a token id, or several."""
    each = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(one, int) for one in each):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {ids!r}")
