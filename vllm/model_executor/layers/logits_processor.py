# SPDX-License-Identifier: Apache-2.0
"""Hidden states to logits."""

import torch
from torch import Tensor, nn

from vllm.distributed.communication_op import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import linear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class LogitsProcessor(nn.Module):
    """Projects by an output head, gathers the shards and drops the vocabulary's padding.

    `scale` multiplies the logits; `soft_cap` bounds them: `cap * tanh(x / cap)`.
    """

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = org_vocab_size or vocab_size
        self.scale = scale
        self.soft_cap = soft_cap

    def forward(self, lm_head: VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        """`[n, hidden] -> [n, org_vocab_size]` in the model dtype, on every rank."""
        logits = self.own(lm_head, hidden_states)
        if lm_head.tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits)
        return logits[..., : self.org_vocab_size]

    def own(self, lm_head: VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        """This rank's logits, `[n, hidden] -> [n, rows of the head]`, those of padding, too."""
        logits = linear(hidden_states, lm_head.weight)
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits if self.scale == 1.0 else logits * self.scale
