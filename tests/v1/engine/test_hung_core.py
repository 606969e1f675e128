# SPDX-License-Identifier: Apache-2.0
"""Engine cores in processes that are stopped, for good or for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from tests.v1.executor.fake_worker import gone
from tests.v1.executor.hangs import END_S, descendants, end_cores, engines
from tests.v1.executor.quick_clock import LIMIT_S, use_quick_clock
from vllm import LLM, SamplingParams
from vllm.utils import silence
from vllm.v1.engine.exceptions import EngineDeadError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forking"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="replicas on CPUs"),
]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[LLM, list[Any]]]]:
    """An engine, and its cores in the order of their replicas."""
    use_quick_clock(monkeypatch)
    monkeypatch.setattr(silence, "LIMIT_S", LIMIT_S)
    with engines("llama") as make:

        def start(**options: Any) -> tuple[LLM, list[Any]]:
            llm = make(**options)
            links = llm.llm_engine.engine_core.links  # type: ignore[attr-defined]
            return llm, [psutil.Process(link.core.process.pid) for link in links]

        yield start


def ask(llm: LLM, num_prompts: int = 1) -> int:
    """The number of tokens that come."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(num_prompts)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)  # type: ignore[arg-type]
    return sum(len(one.outputs[0].token_ids) for one in outputs)


@pytest.mark.parametrize(
    ("options", "who"),
    [({"tensor_parallel_size": 2}, ""), ({"data_parallel_size": 2}, "replica 1")],
)
def test_a_core_that_is_stopped_ends_the_engine(
    start: Any, options: dict[str, int], who: str
) -> None:
    before = descendants()
    llm, cores = start(**options)
    own = list(descendants() - before)
    assert ask(llm) == 8
    cores[-1].suspend()
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"{who}.* says nothing and does nothing for 3 s"):
        ask(llm, num_prompts=4)
    end_cores(llm)
    assert gone(own) and time.monotonic() - began < END_S


def test_a_core_that_goes_on_early_is_not_ended(start: Any) -> None:
    llm, (core,) = start()
    core.suspend()
    time.sleep(LIMIT_S / 2)
    core.resume()
    assert ask(llm) == 8
