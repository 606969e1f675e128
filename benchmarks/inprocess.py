# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine that runs in this process."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine


def core_of(engine: LLMEngine) -> EngineCore:
    client = engine.engine_core
    assert isinstance(client, InprocClient)
    return client.engine_core


def scheduler_of(engine: LLMEngine) -> Scheduler:
    scheduler = core_of(engine).scheduler
    assert isinstance(scheduler, Scheduler)
    return scheduler
