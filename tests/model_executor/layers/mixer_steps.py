# SPDX-License-Identifier: Apache-2.0
"""One step of a recurrent layer alone, with states and metadata made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.kernels.chunks import chunk_metadata
from vllm.model_executor.layers.recurrent_mixer import RecurrentMixer
from vllm.v1.attention.backends.gdn_attn import PrefillBatch


def run(layer: RecurrentMixer, config: VllmConfig, hidden: Tensor, decodes: int) -> Tensor:
    """`decodes` sequences with one token and carried (zero) state, then one new sequence."""
    spec = layer.get_kv_cache_spec(config)
    layer.kv_cache = tuple(torch.zeros(decodes + 2, *shape) for shape in spec.shapes)
    tokens = len(hidden)
    indices, offsets = chunk_metadata([0, tokens - decodes])
    batch = PrefillBatch(
        slice(decodes, tokens),
        state_indices=torch.tensor([decodes + 1], dtype=torch.int32),
        has_initial_state=torch.tensor([False]),
        query_start_loc=torch.tensor([0, tokens - decodes], dtype=torch.int32),
        chunk_indices=indices,
        chunk_offsets=offsets,
    )
    metadata = SimpleNamespace(batch=batch)
    name = layer.layer_name
    blocks = {name: torch.arange(1, decodes + 1, dtype=torch.int32)}
    context = ForwardContext({name: layer}, {name: metadata}, decode_blocks=blocks)
    with torch.no_grad(), set_forward_context(context):
        mixed: Tensor = layer(hidden)
    return mixed
