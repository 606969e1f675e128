# SPDX-License-Identifier: Apache-2.0
"""Which replicas a server runs, and what each starts from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.v1.engine.fakes import make_vllm_config
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import cuda
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.placements import MemorySize, PlacementChange
from vllm.v1.engine.replicas import (
    adopt_starts,
    combined,
    forgets_prefixes,
    replica_configs,
    undo,
)
from vllm.v1.metrics.expert_metrics import total_counts

#: what is said of four replicas, and which of them run here
LOCAL: list[tuple[dict[str, Any], range]] = [
    ({}, range(4)),
    ({"data_parallel_size_local": 4}, range(4)),
    ({"asked_data_parallel_rank": 3}, range(3, 4)),
    ({"asked_data_parallel_rank": 0, "data_parallel_external_lb": True}, range(1)),
    ({"asked_data_parallel_rank": 1, "data_parallel_size_local": 1}, range(1, 2)),
    ({"data_parallel_start_rank": 2, "data_parallel_size_local": 2}, range(2, 4)),
    ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}, range(2)),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data_parallel_size_local": 2}, "other hosts; start a server for each part with"),
    ({"data_parallel_size_local": 5}, "-local 5 is more than all replicas, --data-parallel-size 4"),
    ({"data_parallel_size_local": 5, "data_parallel_start_rank": 0}, "5 is more than all replicas"),
    ({"asked_data_parallel_rank": 4}, "--data-parallel-rank 4 with 1 replicas.*0 to"),
    ({"asked_data_parallel_rank": -1}, "--data-parallel-rank -1"),
    ({"data_parallel_external_lb": True}, "needs --data-parallel-rank"),
    ({"asked_data_parallel_rank": 1, "data_parallel_hybrid_lb": True}, "use one of them"),
    ({"asked_data_parallel_rank": 1, "data_parallel_start_rank": 1}, "use one of them"),
    ({"asked_data_parallel_rank": 1, "data_parallel_size_local": 2}, "for several; use"),
    ({"data_parallel_hybrid_lb": True}, "need --data-parallel-size-local"),
    ({"data_parallel_start_rank": 3, "data_parallel_size_local": 2}, "rank 3 with 2 replicas"),
]


@pytest.mark.parametrize(("flags", "ranks"), LOCAL)
def test_replicas_of_a_server(flags: dict[str, Any], ranks: range) -> None:
    assert ParallelConfig(data_parallel_size=4, **flags).local_ranks == ranks


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_flags_that_contradict_each_other(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        ParallelConfig(data_parallel_size=4, **flags)


def test_each_replica_has_its_own_configuration() -> None:
    transfer = KVTransferConfig(kv_connector="C", kv_role="kv_both", engine_id="e")
    config = make_vllm_config(kv_transfer_config=transfer)
    assert replica_configs(config) == [config]
    config.parallel_config = ParallelConfig(
        data_parallel_size=4, data_parallel_start_rank=1, data_parallel_size_local=2
    )
    with config.decisions.current():
        config.decisions.record("colour", "red", "a test")
    replicas = replica_configs(config)
    assert [one.parallel_config.data_parallel_rank for one in replicas] == [1, 2]
    ids = [one.kv_transfer_config.engine_id for one in replicas if one.kv_transfer_config]
    assert ids == ["e_dp1", "e_dp2"] and transfer.engine_id == "e"
    for rank, (one, tokens) in enumerate(zip(replicas, (320, 160), strict=True)):
        assert one.model_config is not None
        one.cache_config.capacity_tokens = one.model_config.max_model_len = tokens
        one.cache_config.num_gpu_blocks = 10 + rank
        one.decisions.record("both", "x", "a test")
        one.decisions.record("memory", tokens, "a test")
    adopt_starts(config, replicas)
    assert config.model_config is not None
    assert config.cache_config.capacity_tokens == 480 and config.cache_config.num_gpu_blocks == 21
    assert config.model_config.max_model_len == config.scheduler_config.max_model_len == 160
    made = {one.what: one.chosen for one in config.decisions.decisions()}
    assert made["both"] == "x" and made["colour"] == "red" and "both of replica 2" not in made
    assert (made["memory"], made["memory of replica 2"]) == ("320", "160")


@pytest.mark.parametrize(
    ("visible", "first", "expected"), [(None, 2, "2,3"), ("GPU-a, GPU-b,7,5", 0, "GPU-a,GPU-b")]
)
def test_gpus_of_a_replica(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, first: int, expected: str
) -> None:
    monkeypatch.setattr(cuda, "count_devices", lambda: 4)
    assert cuda.visible_part(visible, first, 2) == {"CUDA_VISIBLE_DEVICES": expected}
    with pytest.raises(VLLMValidationError, match="6 GPUs are needed.*4 are visible"):
        cuda.visible_part(visible, 4, 2)


def test_expert_counts_of_all_replicas_add_up() -> None:
    ranks = [{"a": [1, 2]}, {"a": [1, 2]}, {"a": [10, 20]}, {"a": [10, 20]}]
    assert total_counts(ranks, 2) == {"a": [11, 22]}
    assert total_counts(ranks[:1], 1) == {"a": [1, 2]}
    stages = [{"a": [1, 2]}, {"b": [3, 0]}, {"a": [10, 20]}, {"b": [0, 30]}]
    assert total_counts(stages, 2) == {"a": [11, 22], "b": [3, 30]}


def test_answers_of_all_replicas_as_one() -> None:
    ranks = [0, 1]
    assert combined("collective_rpc", ranks, [[1, 2], [3]]) == [1, 2, 3]
    assert combined("reset_prefix_cache", ranks, [True, False]) is False
    assert combined("admit_placement", ranks, ["a", "a"]) == "a"
    sizes = [MemorySize(5, 80), MemorySize(7, 112)]
    changes = [PlacementChange(False, [{0: "x"}], sizes[:1]), PlacementChange(True, [], sizes[1:])]
    assert combined("change_placement", ranks, changes) == PlacementChange(True, [{0: "x"}], sizes)
    wrong = [VLLMValidationError("bad level", "level")] * 2
    with pytest.raises(VLLMValidationError, match="bad level"):
        combined("sleep", ranks, wrong)
    with pytest.raises(EngineGenerateError, match="replica 1: full; the others have done it"):
        combined("collective_rpc", ranks, [[1], RuntimeError("full")])
    with pytest.raises(EngineGenerateError, match="on replica 1: full$"):  # and is taken back
        combined("change_placement", ranks, [changes[0], RuntimeError("full")])
    with pytest.raises(EngineDeadError):
        combined("sleep", ranks, [RuntimeError("x"), EngineDeadError("gone")])
    assert undo("sleep", [None, RuntimeError("x"), None])[0] == [0, 2]
    assert undo("sleep", [None, None])[0] == [] and undo("wake_up", [None, wrong[0]])[0] == []
    assert forgets_prefixes("collective_rpc", ("reload_weights", None, (), None))
    assert not forgets_prefixes("collective_rpc", ("expert_counts", None, (), None))
