# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts: logits of scores, or a table of token ids."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.linear import linear
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.parameter import (
    Section,
    ShardId,
    default_weight_loader,
    empty_parameter,
    load_sections,
    local_size,
    sections_loader,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.math_utils import cdiv

#: rows of the router are filled up to a multiple of it, for cuBLAS wants aligned results
_ROUTER_ROWS = 8


class Router(nn.Module):
    """`weight [rows, hidden]`: the experts' logits, then that of the shared expert's gate (shard
    ids 0 and 1), then padding. Every rank holds all of it; it is never quantised.

    `tid2eid [vocab, top_k]` int32: the experts of each token where its id chooses them.
    """

    #: names of what it fuses, for `fused_names`, without and with a gate
    CHECKPOINT_NAMES = (("router", "gate", 0),)
    GATED_CHECKPOINT_NAMES = (*CHECKPOINT_NAMES, ("router", "shared_expert_gate", 1))

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        sections = [Section(0, shape.num_experts)]
        if shape.shared == "gated":
            sections.append(Section(1, 1))
        rows = cdiv(local_size(sections), _ROUTER_ROWS) * _ROUTER_ROWS
        dtype = torch.float32 if shape.wide_router else None
        zeros = torch.zeros(rows, shape.hidden_size, dtype=dtype)
        self.weight = nn.Parameter(zeros, requires_grad=False)
        load = partial(_load_router, sections=tuple(sections))
        set_weight_attrs(self.weight, {"weight_loader": load})
        self.bias: nn.Parameter | None = None
        if shape.router_bias:
            self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False)
            set_weight_attrs(self.bias, {"weight_loader": load})
        self.e_score_correction_bias: nn.Parameter | None = None
        if shape.correction_bias:
            bias = empty_parameter(shape.num_experts, dtype=torch.float32)
            set_weight_attrs(bias, {"weight_loader": sections_loader(sections[:1])})
            self.e_score_correction_bias = bias
        self.tid2eid: nn.Parameter | None = None
        if shape.hashed_vocab:
            table = empty_parameter(shape.hashed_vocab, shape.rule.top_k, dtype=torch.int32)
            load_table = partial(_load_table, num_experts=shape.num_experts)
            attrs = {"weight_loader": load_table, "dummy_range": (0, shape.num_experts)}
            set_weight_attrs(table, attrs)
            self.tid2eid = table

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, rows]`."""
        return linear(x.to(self.weight.dtype), self.weight, self.bias)

    def chosen(self, input_ids: Tensor | None) -> Tensor | None:
        """The experts `[tokens, top_k]` that ids choose, None where scores do.

        Raises ValueError where ids would choose and there are none.
        """
        if self.tid2eid is None:
            return None
        if input_ids is None:
            raise ValueError(
                "experts chosen by token id: the layer needs token ids, not embeddings"
            )
        return self.tid2eid.index_select(0, input_ids)


def _load_table(
    param: Tensor, loaded: Tensor, shard_id: ShardId | None = None, *, num_experts: int
) -> None:
    """Raises WeightShapeError, and ValueError where an expert does not exist."""
    if loaded.numel() and not 0 <= int(loaded.min()) <= int(loaded.max()) < num_experts:
        raise ValueError(f"tid2eid names experts outside 0..{num_experts - 1}")
    default_weight_loader(param, loaded)


def _load_router(
    param: Tensor, loaded: Tensor, shard_id: ShardId, *, sections: tuple[Section, ...]
) -> None:
    load_sections(param[: local_size(sections)], loaded, shard_id, sections=sections)
