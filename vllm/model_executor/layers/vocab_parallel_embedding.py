# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output head, sharded over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.collective import Collective, Communicates
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import divide
from vllm.model_executor.parameter import WeightShapeError, empty_parameter
from vllm.model_executor.utils import set_weight_attrs

DEFAULT_VOCAB_PADDING_SIZE = 64


class VocabParallelEmbedding(nn.Module, Communicates):
    """`weight [rows, embedding_dim]`: this process's part of the vocabulary.

    The vocabulary is padded to a multiple of `padding_size * tp_size`: aligned rows keep the
    head's matmul on its fast path. Padding rows are zero.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: object | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(f"{prefix or 'embedding'}: quantized weights are not supported yet")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        group = get_tp_group()
        self.tp_rank, self.tp_size = group.rank_in_group, group.world_size
        unit = padding_size * self.tp_size
        self.num_embeddings_padded = -(-num_embeddings // unit) * unit
        self.num_embeddings_per_partition = divide(self.num_embeddings_padded, self.tp_size)
        self.first_row = self.tp_rank * self.num_embeddings_per_partition
        self.weight = empty_parameter(
            self.num_embeddings_per_partition, embedding_dim, dtype=params_dtype
        )
        set_weight_attrs(self.weight, {"weight_loader": self.weight_loader})

    def weight_loader(self, param: Tensor, loaded: Tensor) -> None:
        """Copy this process's rows of `loaded [num_embeddings, embedding_dim]`."""
        expected = (self.num_embeddings, self.embedding_dim)
        if tuple(loaded.shape) != expected:
            raise WeightShapeError(expected, loaded.shape)
        rows = loaded[self.first_row : self.first_row + self.num_embeddings_per_partition]
        param.data[: len(rows)].copy_(rows)
        param.data[len(rows) :].zero_()

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[tokens]` ids `-> [tokens, embedding_dim]`."""
        if self.tp_size == 1:
            return nn.functional.embedding(input_ids, self.weight)
        rows = input_ids - self.first_row
        outside = (rows < 0) | (rows >= self.num_embeddings_per_partition)
        part = nn.functional.embedding(rows.masked_fill(outside, 0), self.weight)
        own = part.masked_fill(outside[:, None], 0)
        return tensor_model_parallel_all_reduce(own, in_place=True)

    def collectives(self, element_bytes: int) -> list[Collective]:
        """See `Communicates`: the sum of what each rank looks up."""
        if self.tp_size == 1:
            return []
        return [Collective("all-reduce", "embedding", self.embedding_dim * element_bytes)]

    def logits_collectives(self, element_bytes: int) -> list[Collective]:
        """As an output head: each rank tells the others its best token and that one's score, both
        in fp64, where nothing but these is asked for."""
        if self.tp_size == 1:
            return []
        return [Collective("all-gather", "logits", 2 * torch.float64.itemsize)]

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp_rank}/{self.tp_size}"


class ParallelLMHead(VocabParallelEmbedding):
    """Output head; `LogitsProcessor` multiplies by its weight."""

    def collectives(self, element_bytes: int) -> list[Collective]:
        """See `Communicates`: it embeds nothing."""
        return self.logits_collectives(element_bytes)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, bias: bool = False, **options: Any
    ) -> None:
        if bias:
            where = options.get("prefix") or "lm_head"
            raise ValueError(f"{where}: an output head with bias is not supported")
        super().__init__(num_embeddings, embedding_dim, **options)

    def forward(self, input_ids: Tensor) -> Tensor:
        raise RuntimeError("an output head has no embedding lookup; use LogitsProcessor")
