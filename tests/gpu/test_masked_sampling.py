# SPDX-License-Identifier: Apache-2.0
"""Structured outputs on a GPU: decode graphs, masks uploaded without waiting for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_model
from tests.v1.structured_output.test_engine_outputs import CASES, generate, make_requests
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import sample
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.structured_output.mask_words import FilledMasks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_texts_follow_their_constraints(async_scheduling):
    engine = LLMEngine(
        EngineArgs(
            model=str(tiny_model("qwen3_5_wide", torch.bfloat16)),
            max_model_len=192,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=60,
            async_scheduling=async_scheduling,
        ).create_engine_config(),
        multiprocess=False,
    )
    try:
        texts, reasons = generate(engine, make_requests())
    finally:
        engine.shutdown()
    for (request_id, index), text in texts.items():
        if request_id != "free":
            assert reasons[request_id, index] == "stop", (request_id, text)
            assert CASES[request_id.split()[0]][1](text), (request_id, text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_sampling_never_waits_for_the_device(temperature):
    device, vocab = torch.device("cuda"), 150_001
    words = torch.randint(-(2**31), 2**31 - 1, (8, -(-vocab // 32)), dtype=torch.int32)
    params = SamplingParams(temperature=temperature, seed=1)
    metadata = SamplingMetadata.build([params] * 16, vocab, device)
    logits = torch.randn(16, vocab, device=device)
    positions = torch.arange(16, device=device)
    sample(logits.clone(), metadata, positions, None, TokenMasks.dummy(logits, logits.shape[1]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        filled = FilledMasks(words.numpy(), [1, 2, 1, 4])
        masks = TokenMasks.upload(filled, np.array([15, 13, 12, 8]), device)
        chosen = sample(logits, metadata, positions, None, masks).sampled_token_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i, row in enumerate((15, 13, 14, 12, 8, 9, 10, 11)):
        token = int(chosen[row])
        assert int(words[i, token // 32]) >> (token % 32) & 1
