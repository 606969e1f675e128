# SPDX-License-Identifier: Apache-2.0
"""A serving engine for hybrid language models.

The public names are imported on first use, so that `import vllm` is quick and touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vllm.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from vllm.v1.engine.llm_engine import LLMEngine

#: public name -> (module, attribute)
_LAZY: dict[str, tuple[str, str]] = {
    "LLM": ("vllm.entrypoints.llm", "LLM"),
    "LLMEngine": ("vllm.v1.engine.llm_engine", "LLMEngine"),
    "AsyncLLMEngine": ("vllm.v1.engine.async_llm", "AsyncLLM"),
    "EngineArgs": ("vllm.engine.arg_utils", "EngineArgs"),
    "AsyncEngineArgs": ("vllm.engine.arg_utils", "AsyncEngineArgs"),
    "SamplingParams": ("vllm.sampling_params", "SamplingParams"),
    "PoolingParams": ("vllm.pooling_params", "PoolingParams"),
    "PromptType": ("vllm.inputs", "PromptType"),
    "TextPrompt": ("vllm.inputs", "TextPrompt"),
    "TokensPrompt": ("vllm.inputs", "TokensPrompt"),
    "RequestOutput": ("vllm.outputs", "RequestOutput"),
    "CompletionOutput": ("vllm.outputs", "CompletionOutput"),
    "ModelRegistry": ("vllm.model_executor.models.registry", "ModelRegistry"),
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "ModelRegistry",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'vllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
