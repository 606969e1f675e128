# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen and likeliest tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.v1.outputs import LogprobsTensors

#: more top logprobs than this are found by ordering the whole vocabulary
_MANY = 256


def gather_logprobs(logits: Tensor, chosen: Tensor, num_logprobs: int) -> LogprobsTensors:
    """`logits [n, vocab]` (unprocessed), `chosen [n]` int64 -> rows of chosen + top k."""
    if logits.device.type == "cuda" and num_logprobs <= min(_MANY, logits.shape[1] // _MANY):
        from vllm.kernels.triton.token_logprobs import ranked_logprobs

        return LogprobsTensors(*ranked_logprobs(logits, chosen, num_logprobs))
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    chosen_logprob = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = (logits > logits.gather(1, chosen.unsqueeze(1))).sum(dim=-1) + 1
    if num_logprobs == 0:
        return LogprobsTensors(chosen.unsqueeze(1).int(), chosen_logprob, ranks.int())
    top, ids = logprobs.topk(num_logprobs, dim=-1)
    return LogprobsTensors(
        torch.cat([chosen.unsqueeze(1), ids], dim=1).int(),
        torch.cat([chosen_logprob, top], dim=1),
        ranks.int(),
    )
