# SPDX-License-Identifier: Apache-2.0
"""Runs a model step by step with hand-made caches and metadata: no scheduler, no runner.

Every sequence owns a fixed run of blocks. Caches start filled with NaN, so reading a slot that was
never written, or a state that should not have been carried over, shows up at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig
from vllm.engine.resolve import resolve
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models.interfaces import VllmModel
from vllm.model_executor.state_layers import collect_layers
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
BLOCKS_PER_SEQ = MAX_MODEL_LEN // BLOCK_SIZE


@contextmanager
def naive_kernels() -> Iterator[None]:
    """Make the reference kernels the platform's for the block."""
    attributes = vars(current_platform)
    previous = attributes.get("kernels")
    attributes["kernels"] = NaiveKernels()
    try:
        yield
    finally:
        del attributes["kernels"]
        if previous is not None:
            attributes["kernels"] = previous


def make_config(path: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> VllmConfig:
    """An engine configuration of a checkpoint; `fields` are the `LoadConfig`'s."""
    model = ModelConfig(
        model=str(path), dtype=dtype, max_model_len=MAX_MODEL_LEN, enforce_eager=True
    )
    cache = CacheConfig(block_size=BLOCK_SIZE)
    return resolve(
        VllmConfig(model_config=model, cache_config=cache, load_config=LoadConfig(**fields))
    )


def get_model(config: VllmConfig) -> nn.Module:
    """The model with its weights, as a worker makes it."""
    loader = get_model_loader(config.load_config)
    model = loader.build_model(config, config.model_config)
    with torch.no_grad():
        loader.fill(model, config.model_config)
    return model


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in one step: `token_ids` from position `start` on."""

    seq: int
    start: int
    token_ids: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Harness:
    """A loaded model with caches for `num_seqs` sequences."""

    def __init__(self, path: Path, num_seqs: int = 3, config: VllmConfig | None = None) -> None:
        self.config = config or make_config(path)
        self.model: nn.Module = get_model(self.config)
        self.device = torch.device(self.config.device_config.device)
        self.num_seqs = num_seqs
        self.layers = collect_layers(self.config, self.model)
        for layer in self.layers.values():
            layer.kv_cache = self._new_cache(layer)

    def _new_cache(self, layer: AttentionLayerBase) -> Tensor | tuple[Tensor, ...]:
        spec = layer.get_kv_cache_spec(self.config)
        if isinstance(spec, MambaSpec):
            return tuple(
                torch.full((self.num_seqs + 1, *shape), torch.nan, dtype=dtype, device=self.device)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
        assert isinstance(spec, AttentionSpec)
        shape = (1 + self.num_seqs * BLOCKS_PER_SEQ, *spec.views[0].shape)
        return torch.full(shape, torch.nan, dtype=spec.dtype, device=self.device)

    def _common(self, chunks: list[Chunk], recurrent: bool) -> CommonAttentionMetadata:
        lengths = [len(c.token_ids) for c in chunks]
        decodes = sum(c.start > 0 and len(c.token_ids) == 1 for c in chunks)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ends = np.array([c.end for c in chunks], dtype=np.int32)
        prefill_starts = starts[decodes:] - starts[decodes]
        table = self._block_table(chunks, recurrent)
        slots = self._slots(chunks, table, recurrent)
        return CommonAttentionMetadata(
            num_reqs=len(chunks),
            num_tokens=int(starts[-1]),
            num_decodes=decodes,
            max_query_len=max(lengths),
            max_seq_len=int(ends.max()),
            query_start_loc=self._upload(starts),
            query_start_loc_cpu=starts,
            seq_lens=self._upload(ends),
            seq_lens_cpu=ends,
            num_computed_tokens_cpu=np.array([c.start for c in chunks], dtype=np.int32),
            prefill_query_start_loc=self._upload(prefill_starts),
            prefill_query_start_loc_cpu=prefill_starts,
            block_table=self._upload(table),
            prefill_seq_lens=self._upload(ends[decodes:]),
            prefill_block_table=self._upload(table[decodes:]),
            slot_mapping=self._upload(slots),
            block_table_cpu=table,
        )

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @staticmethod
    def _block_table(chunks: list[Chunk], recurrent: bool) -> np.ndarray:
        if recurrent:
            return np.array([[1 + c.seq] for c in chunks], dtype=np.int32)
        first = np.array([[1 + c.seq * BLOCKS_PER_SEQ] for c in chunks], dtype=np.int32)
        return first + np.arange(BLOCKS_PER_SEQ, dtype=np.int32)

    @staticmethod
    def _slots(chunks: list[Chunk], table: np.ndarray, recurrent: bool) -> np.ndarray:
        slots = [
            int(row[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for c, row in zip(chunks, table, strict=True)
            for p in range(c.start, c.end)
            if not recurrent
        ]
        return np.array(slots, dtype=np.int64)

    @torch.inference_mode()
    def step(self, chunks: list[Chunk]) -> Any:
        """The model's output over the chunks' tokens; single-token continuations must come first.

        Hidden states `[tokens, hidden]`, or `(hidden, aux)`.
        """
        is_decode = [c.start > 0 and len(c.token_ids) == 1 for c in chunks]
        assert is_decode == sorted(is_decode, reverse=True), "decodes come first"
        metadata, slots, decodes = {}, {}, {}
        for name, layer in self.layers.items():
            spec = layer.get_kv_cache_spec(self.config)
            common = self._common(chunks, isinstance(spec, MambaSpec))
            builder = layer.get_attn_backend().get_builder_cls()(
                spec, [name], self.config, self.device
            )
            metadata[name] = builder.build(common)
            slots[name] = common.slot_mapping
            decodes[name] = common.block_table[: common.num_decodes, 0].contiguous()
        ids = self._upload(np.array([t for c in chunks for t in c.token_ids], dtype=np.int64))
        positions = self._upload(
            np.array([p for c in chunks for p in range(c.start, c.end)], dtype=np.int64)
        )
        context = ForwardContext(self.layers, metadata, slots, decodes, num_tokens=len(ids))
        context.exchange_rows = len(ids)
        with set_forward_context(context):
            return self.model(ids, positions)

    @torch.inference_mode()
    def logits(self, chunks: list[Chunk]) -> Tensor:
        """`[tokens, vocab]` of one step."""
        hidden = self.step(chunks)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        logits: Tensor = cast(VllmModel, self.model).compute_logits(hidden)
        return logits.cpu()

    def generate(
        self, prompt: list[int], max_tokens: int, chunk_size: int | None = None, seq: int = 0
    ) -> list[int]:
        """Greedy tokens; the prompt is computed in chunks of `chunk_size`."""
        size = chunk_size or len(prompt)
        last: Tensor | None = None
        for start in range(0, len(prompt), size):
            last = self.logits([Chunk(seq, start, prompt[start : start + size])])[-1]
        assert last is not None
        out = [int(last.argmax())]
        while len(out) < max_tokens:
            position = len(prompt) + len(out) - 1
            self.before_decode(seq)
            out.append(int(self.logits([Chunk(seq, position, out[-1:])])[-1].argmax()))
        return out

    def before_decode(self, seq: int) -> None:
        """Called before every decode step; tests override it to damage state."""
