# SPDX-License-Identifier: Apache-2.0
"""What is inside of an engine whose core and worker are in the test's process."""

from __future__ import annotations

from typing import Any

from vllm import LLM
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.worker import Worker


def worker_of(llm: LLM) -> Worker:
    core: Any = llm.llm_engine.engine_core
    worker: Worker = core.engine_core.executor.worker
    return worker


def runner_of(llm: LLM) -> ModelRunner:
    return worker_of(llm).model_runner
