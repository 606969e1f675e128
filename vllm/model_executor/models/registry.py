# SPDX-License-Identifier: Apache-2.0
"""Architecture names to model classes; classes are imported on first use."""

import importlib
from collections.abc import Iterable

from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.models import interfaces

logger = init_logger(__name__)

#: architecture -> file of this package and class; multimodal checkpoints of a family that has no
#: class for them are served as text, without their other parts
_MODELS: dict[str, str] = {
    "Apriel2ForCausalLM": "apriel2:Apriel2ForCausalLM",
    "Apriel2ForConditionalGeneration": "apriel2:Apriel2ForCausalLM",
    "DeepseekV2ForCausalLM": "deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "deepseek_v3:DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM": "deepseek_v4:DeepseekV4ForCausalLM",
    "KimiLinearForCausalLM": "kimi_linear:KimiLinearForCausalLM",
    "BambaForCausalLM": "bamba:BambaForCausalLM",
    "FalconH1ForCausalLM": "falcon_h1:FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM": "granite_moe_hybrid:GraniteMoeHybridForCausalLM",
    "NemotronHForCausalLM": "nemotron_h:NemotronHForCausalLM",
    "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3ForConditionalGeneration",
    "GptOssForCausalLM": "gpt_oss:GptOssForCausalLM",
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MistralForCausalLM": "mistral:MistralForCausalLM",
    "MixtralForCausalLM": "mixtral:MixtralForCausalLM",
    "OlmoHybridForCausalLM": "olmo_hybrid:OlmoHybridForCausalLM",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe:Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe:Qwen3_5MoeForCausalLM",
    "ExtractHiddenStatesModel": "extract_hidden_states:ExtractHiddenStatesModel",
}

ModelClass = type[nn.Module]


class _ModelRegistry:
    """The table of models; plugins add theirs with `register_model`."""

    def __init__(self, models: dict[str, str]) -> None:
        self._models: dict[str, str | ModelClass] = dict(models)

    def register_model(self, model_arch: str, model_cls: ModelClass | str) -> None:
        """Serve `model_arch` by a class or a lazy "module:Class"; a later call wins.

        Raises ValueError for a string of another form, TypeError for anything but a model class.
        """
        if isinstance(model_cls, str):
            if model_cls.count(":") != 1:
                raise ValueError(f'expected "module:Class", got {model_cls!r}')
        elif not (isinstance(model_cls, type) and issubclass(model_cls, nn.Module)):
            raise TypeError(f"expected a torch.nn.Module class or a string, got {model_cls!r}")
        known = self._models.get(model_arch)
        if known is not None and known != model_cls:
            logger.warning("model %s: %s replaces %s", model_arch, model_cls, known)
        self._models[model_arch] = model_cls

    def get_supported_archs(self) -> set[str]:
        return set(self._models)

    def load_model_cls(self, model_arch: str) -> ModelClass:
        """The class of one architecture.

        Raises ValueError for an unknown one, ImportError and TypeError for one whose registered
        name cannot be imported, or is that of no model class.
        """
        entry = self._models.get(model_arch)
        if entry is None:
            raise self._unknown([model_arch])
        if isinstance(entry, str):
            entry = self._models[model_arch] = self._imported(model_arch, entry)
        return entry

    @staticmethod
    def _imported(model_arch: str, path: str) -> ModelClass:
        module, name = path.split(":")
        where = f"{model_arch} is registered as {path!r}"
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise ImportError(f"{where}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise TypeError(f"{where}, which is no torch.nn.Module class but {found!r}")
        return found

    def resolve_model_cls(self, architectures: str | Iterable[str]) -> tuple[ModelClass, str]:
        """`(class, name)` of the first supported name; raises ValueError listing what is."""
        names = [architectures] if isinstance(architectures, str) else list(architectures)
        for name in names:
            if name in self._models:
                return self.load_model_cls(name), name
        raise self._unknown(names)

    def is_hybrid_model(self, architectures: str | Iterable[str]) -> bool:
        """Whether the model mixes attention with recurrent layers."""
        return issubclass(self.resolve_model_cls(architectures)[0], interfaces.IsHybrid)

    def has_placements(self, architectures: str | Iterable[str]) -> bool:
        """Whether a model's layers may have several token mixers each."""
        return issubclass(self.resolve_model_cls(architectures)[0], interfaces.HasPlacements)

    def _unknown(self, names: list[str]) -> ValueError:
        return ValueError(
            f"no model implements the architecture(s) {names}; supported: "
            f"{', '.join(sorted(self._models))}; others can be added with "
            "ModelRegistry.register_model"
        )


ModelRegistry = _ModelRegistry({arch: f"{__package__}.{path}" for arch, path in _MODELS.items()})
