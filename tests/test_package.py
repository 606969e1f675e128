# SPDX-License-Identifier: Apache-2.0
"""The package level: lazy names, quick import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tiny_models import tiny_model

import vllm

NAMES = [
    *("LLM", "LLMEngine", "EngineArgs", "AsyncLLMEngine", "AsyncEngineArgs", "SamplingParams"),
    *("PoolingParams", "PromptType", "TextPrompt", "TokensPrompt", "RequestOutput"),
    *("CompletionOutput", "ModelRegistry", "__version__", "__version_tuple__"),
]


@pytest.mark.parametrize("name", NAMES)
def test_public_names(name: str) -> None:
    assert getattr(vllm, name) is not None and name in dir(vllm)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        vllm.nonsense  # noqa: B018
    with pytest.raises(ImportError):
        from vllm import nonsense  # noqa: F401


def test_import_is_light() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import vllm\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert len(set(sys.modules) - before) < 100\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def test_the_engine_class_is_light_too() -> None:
    """Its process is to start before anything heavy is imported."""
    code = (
        "import sys\n"
        "from vllm import LLM, SamplingParams\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def test_a_front_end_imports_nothing_of_the_core() -> None:
    """What it would wait for before it can hand over the configuration, and never use."""
    code = (
        "import sys\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "import vllm.v1.engine.llm_engine, vllm.v1.engine.async_llm\n"
        "import vllm.entrypoints.openai.run_server\n"
        "EngineArgs(sys.argv[1], max_model_len=32).create_engine_config()\n"
        "core = ('vllm.v1.engine.core', 'vllm.v1.worker', 'vllm.v1.core.sched', 'triton',\n"
        "        'vllm.model_executor.model_loader', 'vllm.v1.executor', 'fastapi',\n"
        "        'torch._dynamo', 'torch._inductor', 'transformers.modeling_utils',\n"
        "        'scipy', 'sklearn', 'pandas')\n"
        "found = [name for name in core if name in sys.modules]\n"
        "assert not found, found\n"
    )
    model = str(tiny_model("qwen3_5"))
    subprocess.run([sys.executable, "-c", code, model], check=True, timeout=180)


def test_the_parser_does_not_need_torch() -> None:
    code = (
        "import sys, vllm.utils.argparse_utils, vllm.sampling_params, vllm.entrypoints.llm\n"
        "import vllm.entrypoints.openai.cli_args, vllm.v1.engine.spare_process\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def test_version() -> None:
    assert vllm.__version__.startswith("0.24.0") and vllm.__version_tuple__[:3] == (0, 24, 0)


def test_refused_types() -> None:
    with pytest.raises(NotImplementedError, match="SamplingParams"):
        vllm.PoolingParams()
