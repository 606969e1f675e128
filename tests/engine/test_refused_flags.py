# SPDX-License-Identifier: Apache-2.0
"""Flags that no engine is made of: each error names the flag and what to give instead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.checkpoints import EXTRACTION
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.unsupported_flags import UNSUPPORTED_FLAGS
from vllm.exceptions import VLLMValidationError

TWO_HOSTS = {"tensor_parallel_size": 2, "nnodes": 2}
SHARED_EXPERTS = {"data_parallel_size": 2, "enable_expert_parallel": True}
P2P = {"kv_role": "kv_both"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_eplb": True, "tensor_parallel_size": 2}, "--enable-eplb .* needs --enable-expert-p"),
    ({"enable_eplb": True, "enable_expert_parallel": True}, "-data-parallel-size above 1"),
    ({"eplb_config": {"step_interval": 9000}}, "--eplb-config has no effect without --enable-epl"),
    ({"eplb_config": {"use_async": True}}, "--eplb-config: unknown key 'use_async'; .*window_size"),
    ({"eplb_config": {"window_size": 4000}}, "window_size 4000 is more than step_interval 3000"),
    ({"distributed_executor_backend": "slurm"}, "--distributed-executor-backend slurm.*use mp"),
    ({"pipeline_parallel_size": 5}, "--pipeline-parallel-size 5: the model has 4 layers"),
    ({**TWO_HOSTS, "ready_in": 5.0}, "--ready-in with --nnodes 2"),
    (
        {**TWO_HOSTS, "kv_transfer_config": {**P2P, "kv_connector": "P2pConnector"}},
        "--nnodes 2 beside kv_connector P2pConnector",
    ),
    (
        {
            **TWO_HOSTS,
            "kv_transfer_config": {
                **P2P,
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [{**P2P, "kv_connector": "P2pConnector"}]
                },
            },
        },
        "--nnodes 2 beside kv_connector MultiConnector",
    ),
    ({"data_parallel_size": 2, "data_parallel_rank": 2}, "--data-parallel-rank 2.*0 to"),
    ({"data_parallel_address": "10.0.0.1"}, "--data-parallel-address 10.*--data-parallel-start-r"),
    ({"data_parallel_rpc_port": 5000}, "--data-parallel-rpc-port 5000.*replicas on other hosts"),
    ({"data_parallel_backend": "ray"}, "--data-parallel-backend ray.*with --data-parallel-rank"),
    ({"data_parallel_backend": "slurm"}, "--data-parallel-backend"),
    ({"all2all_backend": "deepep_low_latency"}, "--all2all-backend.*another exchange.*leave it"),
    ({**SHARED_EXPERTS, "data_parallel_rank": 1}, "one server runs all of them; leave out"),
    ({**SHARED_EXPERTS, **TWO_HOSTS}, "processes of one host; for several hosts"),
    ({**SHARED_EXPERTS, "distributed_executor_backend": "ray"}, "or Ray, use --tensor-parallel"),
    ({**SHARED_EXPERTS, "pipeline_parallel_size": 2}, "stages of several replicas do not share"),
    ({**SHARED_EXPERTS, "ready_in": 5.0}, "--ready-in with --enable-expert-parallel"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype.*got 'fp8_e5m2'"),
    ({"block_size": 20}, "--block-size"),
    ({"max_model_len": 10**6}, "--max-model-len 1000000"),
    ({"dtype": "int4"}, "--dtype"),
    ({"quantization": "awq"}, "--quantization awq"),
    ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens must be given"),
    ({"speculative_config": {"methd": "x"}}, "--speculative-config: unknown key 'methd'.*allowed"),
    (
        {"speculative_config": {**EXTRACTION, "tensor_parallel_size": 1}},
        "draft_tensor_parallel_size instead",
    ),
    ({"speculative_config": {**EXTRACTION, "quantization": "fp8"}}, "speculative_config.quantiz"),
    ({"speculative_config": {**EXTRACTION, "target_model_config": 1}}, "unknown key 'target_model"),
    ({"speculative_config": 3}, "--speculative-config must be a JSON object"),
    ({"speculative_config": {}}, "none is not supported; supported: extract"),
    ({"speculative_config": EXTRACTION}, "needs --kv-transfer-config"),
    ({"speculative_config": EXTRACTION, "spec_method": "x"}, "given both by --spec-method"),
    ({"spec_method": "medusa", "spec_tokens": 3}, "medusa is not supported; use eagle3, dflash or"),
    (
        {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 24}},
        "suffix is not supported; use ngram",
    ),
    (
        {"speculative_config": {"method": "eagle3", "model": "x", "parallel_drafting": True}},
        "parallel_drafting: peagle is not supported; use dflash",
    ),
    ({"kv_transfer_config": {"kv_rol": 1}}, "--kv-transfer-config: unknown key 'kv_rol'"),
    ({"kv_transfer_config": "x"}, "--kv-transfer-config must be a JSON object"),
    ({"compilation_config": {"cudagraf": 1}}, "--compilation-config: unknown key 'cudagraf'"),
    (
        {
            "compilation_config": {"cudagraph_capture_sizes": [1]},
            "cudagraph_capture_sizes": [1],
        },
        "given both by --cudagraph-capture-sizes",
    ),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 300}, "--max-model-len .512."),
    ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "--max-num-batched-tokens .4."),
    ({"max_num_seqs": 0}, r"\(--max-num-seqs\): input should be greater than 0"),
    ({"optimization_level": 7}, "-O 7"),
    ({"enable_lora": True}, "--enable-lora True: not supported yet: LoRA adapters; instead, merge"),
    ({"kv_offloading_size": 0}, "kv_offloading_size"),
    ({"kv_offloading_backend": "lmcache"}, "no effect without --kv-offloading-size"),
    (
        {
            "kv_offloading_size": 1,
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        },
        "as children of a MultiConnector",
    ),
    ({"mm_processor_kwargs": {"a": 1}}, "--mm-processor-kwargs"),
    ({"gdn_prefill_backend": "x"}, "--gdn-prefill-backend"),
    ({"cpu_offload_gb": 1}, "--cpu-offload-gb 1"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_refused(llama: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        EngineArgs(**{"model": llama, **given}).create_engine_config()


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FLAGS))
def test_unsupported_flags_name_themselves(name: str) -> None:
    flag = UNSUPPORTED_FLAGS[name]
    other = (not flag.default) if isinstance(flag.default, bool) else "17"
    with pytest.raises(VLLMValidationError, match=f"--{name.replace('_', '-')} ") as caught:
        EngineArgs(**{name: other})
    assert caught.value.parameter == name and flag.instead in str(caught.value)
