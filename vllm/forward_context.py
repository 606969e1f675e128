# SPDX-License-Identifier: Apache-2.0
"""What the layers of one forward pass can see: metadata, slots and each other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class ForwardContext:
    """State of one step.

    `no_compile_layers`: layer name -> layer, each with `.kv_cache`. `attn_metadata`: layer name ->
    its group's metadata (one object shared by all layers of a group). `slot_mapping`: layer name
    -> `[tokens]` int64 slots of that layer's group (paged groups only). `decode_blocks`: layer name
    -> `[rows]` int32 state blocks of the first requests that are decodes, `decode_width` tokens
    each, -1 for others (recurrent groups only). Slots and decode blocks lie at fixed addresses.
    """

    no_compile_layers: Mapping[str, Any]
    attn_metadata: dict[str, Any]
    slot_mapping: dict[str, Tensor] = field(default_factory=dict)
    decode_blocks: dict[str, Tensor] = field(default_factory=dict)
    virtual_engine: int = 0
    num_tokens: int = 0
    #: whether no step that this context is for has a prefill
    only_decodes: bool = False
    decode_width: int = 1
    #: rows that each replica has in the mixtures of this step, where replicas share experts
    exchange_rows: int = 0


#: engines of one process may run their steps at the same time, on threads of their own
_context: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


def get_forward_context() -> ForwardContext:
    """The context of the running step; raises outside a step."""
    context = _context.get()
    if context is None:
        raise RuntimeError("no forward context is set; layers run inside set_forward_context()")
    return context


def is_forward_context_available() -> bool:
    return _context.get() is not None


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` visible to the layers for the duration of the block."""
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)
