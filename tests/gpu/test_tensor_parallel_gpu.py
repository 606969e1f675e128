# SPDX-License-Identifier: Apache-2.0
"""Workers that share layers on GPUs of their own, over NCCL: tokens, graphs, rows, ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.parity.parity_checks import (
    assert_equals_reference,
    assert_ranks_extract_alike,
    generate,
    prompts,
)
from tests.tiny_models import tiny_model
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.v1.executor.station import WorkerDiedError

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs"),
]
four_gpus = pytest.mark.skipif(NUM_GPUS < 4, reason="needs four GPUs")

#: from the fault of a rank to the end of the engine
END_S = 30.0
MakeEngine = Callable[..., LLM]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Engines in this process, their workers in others."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engines: list[LLM] = []

    def make_engine(family: str = "qwen3_5", **settings: Any) -> LLM:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 64 * 2**20,
            "tensor_parallel_size": 2,
        }
        model = settings.pop("model", None) or str(tiny_model(family, torch.float32))
        engines.append(LLM(model, **{**defaults, **settings}))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def place(worker: Any) -> tuple[str, str, list[int], list[int]]:
    """The GPU, the group's backend and the captured sizes."""
    group = worker_group()
    graphs = worker.model_runner.graphs
    uuid = str(torch.cuda.get_device_properties(worker.device).uuid)
    return uuid, group, graphs.sizes, graphs.piecewise_sizes


def worker_group() -> str:
    from vllm.distributed.parallel_state import get_tp_group

    return str(torch.distributed.get_backend(get_tp_group().device_group))


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_two_gpus_give_the_tokens_of_one(
    family: str, enforce_eager: bool, make: MakeEngine
) -> None:
    """Twice, the second time from the prefix cache, and once more after sleep."""
    batch = prompts((1, 17, 63, 300))
    one = make(family, tensor_parallel_size=1, enforce_eager=enforce_eager)
    expected = tokens(generate(one, batch, 32))
    two = make(family, enforce_eager=enforce_eager, enable_sleep_mode=True)
    (gpu, backend, sizes, pieces), other = two.collective_rpc(place)
    assert gpu != other[0] and backend == "nccl"
    assert (sizes, pieces) == other[2:]
    assert bool(sizes) is bool(pieces) is not enforce_eager
    for again in range(3):
        outputs = generate(two, batch, 32)
        assert tokens(outputs) == expected
        for output in outputs:
            assert_equals_reference(output, tiny_model(family), 32)
        if again == 1:
            two.sleep(1)
            two.wake_up()


def wide_model(folder: Path) -> str:
    """A `llama` with rows wide enough for sums with a norm, its weights made up at the load."""
    shutil.copytree(tiny_model("llama"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return str(folder)


def test_shared_memory_gives_the_bits_of_nccl(make: MakeEngine, tmp_path: Path) -> None:
    """Two ranks have one order to add in; the norm is rounded as by its own kernel. Prompts of 300
    tokens travel with NCCL either way."""
    found = []
    for disabled in (True, False):
        llm = make(
            model=wide_model(tmp_path / str(disabled)),
            dtype="bfloat16",
            load_format="dummy",
            max_num_batched_tokens=512,
            disable_custom_all_reduce=disabled,
        )
        outputs = generate(llm, prompts((1, 17, 63, 300)), 32)
        found.append([(list(one.outputs[0].token_ids), logprobs_of(one)) for one in outputs])
        choices = {
            one["what"]: one["chosen"] for one in llm.llm_engine.vllm_config.decisions.as_dicts()
        }
        shared = choices.get("all-reduce of small messages", "NCCL")
        assert shared.startswith("NCCL" if disabled else "peer memory")
    assert found[0] == found[1]


def logprobs_of(output: RequestOutput) -> list[float]:
    one = output.outputs[0]
    assert one.logprobs is not None
    return [entry[t].logprob for entry, t in zip(one.logprobs, one.token_ids, strict=True)]


def test_state_memory_is_what_the_gpus_have_left(make: MakeEngine) -> None:
    """The worst step is measured on both at once."""
    llm = make(kv_cache_memory_bytes=None, gpu_memory_utilization=0.2)
    for output in generate(llm, prompts((5, 40)), 16):
        assert_equals_reference(output, tiny_model("qwen3_5"), 16)


def test_samples_of_two_gpus_are_those_of_one(make: MakeEngine) -> None:
    """Drawn, filtered and several of a prompt; the ranks draw them apart."""
    params = SamplingParams(
        temperature=1.0, seed=3, top_p=0.9, top_k=20, n=3, max_tokens=24, ignore_eos=True
    )
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in prompts((5, 33, 70))]
    found = [
        tokens(make(tensor_parallel_size=ranks).generate(batch, params, use_tqdm=False))
        for ranks in (1, 2)
    ]
    assert found[0] == found[1]


def test_ranks_agree_on_what_is_captured_before_the_start(make: MakeEngine) -> None:
    """The clock decides how much is captured first, and the rest follows between steps."""
    llm = make(ready_in=0.0)
    pending = llm.collective_rpc("num_pending_graphs")
    assert pending[0] == pending[1] > 0
    for _ in range(2):
        for output in generate(llm, prompts((1, 17, 63)), 16):
            assert_equals_reference(output, tiny_model("qwen3_5"), 16)
        llm.collective_rpc("capture_next_graph")
    after = llm.collective_rpc("num_pending_graphs")
    assert after[0] == after[1] < pending[0]


def test_hidden_states_are_whole_and_written_once(make: MakeEngine, tmp_path: Path) -> None:
    assert_ranks_extract_alike(make, tmp_path, 1e-4)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("sent", "expected", "message"),
    [
        (signal.SIGKILL, WorkerDiedError, "rank {} died"),
        (signal.SIGSTOP, TimeoutError, "rank {} does not go on: a step has no result after 20 s"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_engine(
    sent: signal.Signals, expected: type[Exception], message: str, victim: int, make: MakeEngine
) -> None:
    llm = make()
    pids = llm.collective_rpc(lambda worker: os.getpid())
    workers = [psutil.Process(pid) for pid in pids]
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)
    engine.add_request("a request", TokensPrompt(prompt_token_ids=[1, 2, 3]), params)
    while not engine.step():
        pass
    os.kill(pids[victim], sent)
    began = time.monotonic()
    with pytest.raises(expected, match=message.format(victim)):
        while engine.has_unfinished_requests():
            engine.step()
    psutil.wait_procs(workers, timeout=max(0.0, began + END_S - time.monotonic()))
    assert not any(process.is_running() for process in workers)
    assert time.monotonic() - began < END_S


@four_gpus
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_stages_of_two_gpus_each(enforce_eager: bool, make: MakeEngine) -> None:
    llm = make(pipeline_parallel_size=2, enforce_eager=enforce_eager)
    assert len({found[0] for found in llm.collective_rpc(place)}) == 4
    for _ in range(2):
        for output in generate(llm, prompts((1, 17, 63, 300)), 32):
            assert_equals_reference(output, tiny_model("qwen3_5"), 32)


@four_gpus
def test_replicas_of_two_gpus_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    llm = LLM(
        str(tiny_model("qwen3_5")),
        dtype="float32",
        tensor_parallel_size=2,
        data_parallel_size=2,
        max_model_len=512,
        kv_cache_memory_bytes=64 * 2**20,
    )
    try:
        assert len({found[0] for found in llm.collective_rpc(place)}) == 4
        for output in generate(llm, prompts((1, 17, 63, 100)), 16):
            assert_equals_reference(output, tiny_model("qwen3_5"), 16)
    finally:
        llm.shutdown()
