# SPDX-License-Identifier: Apache-2.0
"""Two processes, each with half of a model, give the logits of one."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from tests.model_executor.harness import Chunk, Harness, naive_kernels
from tests.ports import free_port
from tests.tiny_models import tiny_model
from vllm.distributed import parallel_state

PROMPT = list(range(40, 70))


def _logits(path: Path) -> torch.Tensor:
    with naive_kernels():
        harness = Harness(path, num_seqs=1)
        prefill = harness.logits([Chunk(0, 0, PROMPT[:-1])])
        return torch.cat([prefill, harness.logits([Chunk(0, len(PROMPT) - 1, PROMPT[-1:])])])


def _rank(rank: int, port: int, paths: list[Path], out: Path) -> None:
    torch.set_num_threads(1)
    parallel_state.init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", backend="gloo")
    parallel_state.initialize_model_parallel(2)
    torch.save([_logits(path) for path in paths], out / f"{rank}.pt")
    parallel_state.destroy_distributed_environment()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU processes")
def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    """Attention, gated delta net, biases, tied and untied heads, all sharded."""
    paths = [tiny_model(family) for family in ("llama3_rope", "qwen3", "qwen3_5")]
    # Each computes with one thread: it needs none of those that a fork leaves behind.
    fork = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [fork.Process(target=_rank, args=(r, port, paths, tmp_path)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    for path, half, other in zip(paths, first, second, strict=True):
        whole = _logits(path)
        assert torch.equal(half, other)
        assert float((half - whole).abs().max() / whole.std()) < 5e-5
