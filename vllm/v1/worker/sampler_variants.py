# SPDX-License-Identifier: Apache-2.0
"""The usual combinations of sampling features, run once on made-up logits: each has kernels of its
own. Other combinations, and requests with penalties or biases, compile theirs when they first come.

No token that is drawn here is used for anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import gather_logprobs, sample
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.worker.model_runner import ModelRunner

_ROWS = 2
_TOP_K, _TOP_P, _MIN_P = 20, 0.9, 0.1
_COMMON = (
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.0, seed=0, top_k=_TOP_K, top_p=_TOP_P),
    SamplingParams(temperature=1.0, seed=0, top_k=_TOP_K, top_p=_TOP_P, min_p=_MIN_P),
    SamplingParams(temperature=1.0, seed=0, top_p=_TOP_P),
)


@torch.inference_mode()
def run_common_samplers(runner: ModelRunner) -> None:
    """Greedy, plain, top-k with top-p (and min-p), top-p alone; logprobs and masks."""
    logits = _logits(runner)
    chosen = torch.zeros(_ROWS, dtype=torch.int64, device=logits.device)
    gather_logprobs(logits, chosen, 1)
    TokenMasks.dummy(logits).apply(logits)
    current_platform.kernels.argmax_rows(logits)
    for params in _COMMON:
        _draw(logits, SamplingMetadata.build([params] * _ROWS, logits.shape[1], logits.device))


def _logits(runner: ModelRunner) -> Tensor:
    model = runner.model_config
    shape = (_ROWS, model.get_hidden_size())
    return runner.compute_logits(torch.zeros(shape, dtype=model.dtype, device=runner.device))


def _positions(logits: Tensor) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)


def _draw(logits: Tensor, metadata: SamplingMetadata) -> None:
    sample(logits, metadata, _positions(logits))
