# SPDX-License-Identifier: Apache-2.0
"""The table of architectures."""

import subprocess
import sys

import pytest
from torch import nn

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry, _ModelRegistry

#: no model class
GIVEN = 3


class Other(nn.Module):
    """A model of a plugin."""


def test_built_in_architectures_resolve() -> None:
    for arch in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3_5ForCausalLM"):
        model_cls, name = ModelRegistry.resolve_model_cls([arch])
        assert (model_cls.__name__, name) == (arch, arch)
    assert ModelRegistry.resolve_model_cls(["Unknown", "LlamaForCausalLM"])[0] is LlamaForCausalLM


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"\['Nope'\].*LlamaForCausalLM.*register_model"):
        ModelRegistry.resolve_model_cls(["Nope"])


def test_registration_by_class_and_by_name(caplog: pytest.LogCaptureFixture) -> None:
    registry = _ModelRegistry({})
    registry.register_model("A", Other)
    registry.register_model("B", f"{__name__}:Other")
    assert registry.get_supported_archs() == {"A", "B"}
    assert registry.load_model_cls("A") is Other
    assert registry.load_model_cls("B").__name__ == "Other"
    registry.register_model("A", LlamaForCausalLM)
    assert registry.load_model_cls("A") is LlamaForCausalLM


def test_bad_registrations() -> None:
    registry = _ModelRegistry({})
    with pytest.raises(ValueError, match='"module:Class"'):
        registry.register_model("A", "module.Class")
    with pytest.raises(TypeError, match="torch.nn.Module class"):
        registry.register_model("A", int)  # type: ignore[arg-type]


def test_registering_a_name_does_not_import_it() -> None:
    registry = _ModelRegistry({})
    registry.register_model("A", "module_that_does_not_exist:Model")
    with pytest.raises(ImportError, match="A is registered as 'module_that_does_not_exist:Model'"):
        registry.load_model_cls("A")


@pytest.mark.parametrize("name", ["Missing", "GIVEN"])
def test_a_registered_name_must_be_a_model_class(name: str) -> None:
    registry = _ModelRegistry({})
    registry.register_model("A", f"{__name__}:{name}")
    with pytest.raises(TypeError, match=f"A is registered as '.*:{name}'.* no torch.nn.Module"):
        registry.load_model_cls("A")


def test_capabilities() -> None:
    assert ModelRegistry.is_hybrid_model("Qwen3_5ForConditionalGeneration")
    assert not ModelRegistry.is_hybrid_model(["Qwen3ForCausalLM"])
    assert ModelRegistry.has_placements("Apriel2ForCausalLM")
    assert not ModelRegistry.has_placements("Qwen3_5ForCausalLM")


def test_importing_the_registry_imports_no_model() -> None:
    code = (
        "import sys, vllm.model_executor.models.registry;"
        "assert not [m for m in sys.modules if m.startswith('vllm.model_executor.models.llama')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
