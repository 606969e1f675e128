# SPDX-License-Identifier: Apache-2.0
"""Runs one model on one device, a step at a time.

A step: apply the scheduler's changes to the persistent batch, build the inputs, one metadata
object per state group, run the model, sample, keep the tokens on the device. Nothing here reads a
device value; results reach the host through `StepOutput`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vllm import decisions
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.interfaces import VllmModel
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
    SamplerOutput,
)
from vllm.v1.sample.adjustments import Adjustments
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import sample
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
from vllm.v1.structured_output.masks import StepMasks
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.async_output import StepOutput
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.decode_graphs import DecodeGraphs, graphs_forbidden
from vllm.v1.worker.input_batch import InputBatch, StepOrder
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.prompt_logprobs import PromptScorer
from vllm.v1.worker.sanitizer import Sanitizer
from vllm.v1.worker.step_inputs import StepInputBuilder, StepInputs

logger = init_logger(__name__)


@dataclass(frozen=True)
class StateGroup:
    """One group of layers that share a spec, with its metadata builder."""

    layer_names: list[str]
    spec: KVCacheSpec
    builder: AttentionMetadataBuilder[Any]


@dataclass(frozen=True)
class Prompt:
    """What outlives a preemption: the parameters and the prompt's length."""

    sampling_params: SamplingParams
    num_tokens: int


class ModelRunner(KVConnectorModelRunnerMixin):
    """Owns the model, its state arena and the requests of one device."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        assert vllm_config.model_config is not None
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.device = device
        scheduler = vllm_config.scheduler_config
        self.max_rows = scheduler.max_num_seqs
        self.max_tokens = scheduler.max_num_batched_tokens
        self.vocab_size = self.model_config.get_vocab_size()
        #: steps whose staged arrays may still be in use
        self.depth = 3 if scheduler.async_scheduling else 2
        self.batch = InputBatch(self.max_rows)
        self.inputs = StepInputBuilder(self.max_rows, self.max_tokens, device, self.depth)
        self.scorer = PromptScorer(self.vocab_size)
        self._prompts: dict[str, Prompt] = {}
        self.adjustments: dict[str, Adjustments] = {}
        self.groups: list[StateGroup] = []
        self.graphs = DecodeGraphs([], self.max_rows)
        self.model: nn.Module
        self.proposer: ExtractHiddenStatesProposer | None = None
        self.sanitizer: Sanitizer | None = None
        self._sampling_key: list[str] | None = None
        self._sampling: SamplingMetadata | None = None

    # ---- start-up ------------------------------------------------------------------------------

    def load_model(self) -> None:
        self.model = get_model(self.vllm_config)
        speculative = self.vllm_config.speculative_config
        if speculative is not None and speculative.uses_extract_hidden_states():
            self.proposer = ExtractHiddenStatesProposer(self.vllm_config, self.device)
            self.proposer.load_model(self.model)

    @property
    def layers(self) -> dict[str, AttentionLayerBase]:
        """Every layer that keeps state, by name."""
        return self.vllm_config.compilation_config.static_forward_context

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {
            name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in self.layers.items()
        }

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the arena, bind each layer's view of it and make the metadata builders."""
        self.arena = Arena(config, self.device)
        self.kv_cache_config = config
        for name, view in self.arena.layers.items():
            self.layers[name].kv_cache = view
        self.block_tables = BlockTables(
            config,
            self.max_rows,
            self.model_config.max_model_len,
            self.max_tokens,
            self.device,
            self.depth,
        )
        if self.vllm_config.cache_config.sanitize:
            self.sanitizer = Sanitizer(config, self.arena, self.block_tables, self.batch)
        self.groups = []
        for group in config.kv_cache_groups:
            backend = self.layers[group.layer_names[0]].get_attn_backend()
            builder = backend.get_builder_cls()(
                group.kv_cache_spec, group.layer_names, self.vllm_config, self.device
            )
            self.groups.append(StateGroup(group.layer_names, group.kv_cache_spec, builder))

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture decode steps of the configured sizes, unless a backend or connector forbids."""
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        backends = [self.layers[g.layer_names[0]].get_attn_backend() for g in self.groups]
        reason = graphs_forbidden(self.vllm_config, backends)
        if sizes and reason is not None:
            decisions.record("decode graphs", "none", reason, f"{len(sizes)} sizes")
            return
        self.graphs = DecodeGraphs(sizes, self.max_rows)
        self.graphs.capture(self._decode_of_padding)

    def _decode_of_padding(self, size: int) -> Callable[[], tuple[Tensor, list[Tensor]]]:
        """The decode step of `size` requests as a graph records it: every row is padding."""
        inputs = self.inputs.padding(size)
        context = ForwardContext(no_compile_layers=self.layers, attn_metadata={}, num_tokens=size)
        empty = np.zeros(0, dtype=np.int64)
        for group, table in zip(self.groups, self.block_tables.groups, strict=True):
            block_table, block_table_cpu = table.padding(size)
            metadata = group.builder.build(
                CommonAttentionMetadata(
                    num_reqs=size,
                    num_tokens=size,
                    num_decodes=size,
                    max_query_len=1,
                    max_seq_len=self.model_config.max_model_len,
                    query_start_loc=inputs.query_start_loc,
                    query_start_loc_cpu=inputs.query_start_loc_cpu,
                    seq_lens=inputs.seq_lens,
                    seq_lens_cpu=inputs.seq_lens_cpu,
                    num_computed_tokens_cpu=empty,
                    prefill_query_start_loc=inputs.prefill_query_start_loc,
                    prefill_query_start_loc_cpu=inputs.prefill_query_start_loc_cpu,
                    block_table=block_table,
                    slot_mapping=table.slot_mapping(empty, empty, size),
                    block_table_cpu=block_table_cpu,
                )
            )
            for name in group.layer_names:
                context.attn_metadata[name] = metadata

        def run() -> tuple[Tensor, list[Tensor]]:
            with set_forward_context(context):
                hidden, aux = self._forward(inputs.input_ids, inputs.positions)
            return self.compute_logits(hidden), aux

        return run

    def release_kv_cache(self) -> None:
        """Drop the arena (after a profiling run)."""
        for layer in self.layers.values():
            layer.kv_cache = torch.empty(0)
        del self.arena, self.block_tables
        self.sanitizer = None
        self.groups = []

    @torch.inference_mode()
    def sample_dummy(self) -> None:
        """Sample a full batch with every filter on (profiling: its buffers grow with the batch)."""
        params = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.1, seed=0, logprobs=1)
        hidden = torch.zeros(
            self.max_rows,
            self.model_config.get_hidden_size(),
            dtype=self.model_config.dtype,
            device=self.device,
        )
        logits = self.compute_logits(hidden)
        metadata = SamplingMetadata.build([params] * self.max_rows, self.vocab_size, self.device)
        positions = torch.zeros(self.max_rows, dtype=torch.int64, device=self.device)
        sample(logits, metadata, positions, [], TokenMasks.dummy(logits))

    def close(self) -> None:
        """Drop the model, its state and every request."""
        for layer in self.layers.values():
            layer.kv_cache = torch.empty(0)
        self.layers.clear()
        self.graphs = DecodeGraphs([], self.max_rows)
        self.sanitizer = None
        for name in ("model", "arena", "block_tables", "proposer"):
            self.__dict__.pop(name, None)

    # ---- the step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Launch one step."""
        self._update_states(scheduler_output)
        if self.sanitizer is None:
            self.arena.copy_blocks(scheduler_output.copies_before)
        else:
            self.sanitizer.begin_step(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return self._without_forward(scheduler_output)
        return self._step(scheduler_output, has_kv_transfer_group(), self.sanitizer)

    @torch.inference_mode()
    def execute_dummy(self, scheduler_output: SchedulerOutput) -> None:
        """A step of made-up requests (profiling, warm-up); no connector sees it."""
        self._update_states(scheduler_output)
        self._step(scheduler_output, False, None)
        if self.sanitizer is not None:
            self.sanitizer.clear_null_page()

    def forget(self, scheduler_output: SchedulerOutput) -> None:
        """Drop finished requests without running anything."""
        self._update_states(scheduler_output)

    def _step(
        self, scheduler_output: SchedulerOutput, use_connector: bool, sanitizer: Sanitizer | None
    ) -> StepOutput:
        order = self.batch.order(
            scheduler_output.num_scheduled_tokens, scheduler_output.sampling_req_ids
        )
        size = self.graphs.size_for(order.num_reqs) if order.decode_only else None
        inputs = self.inputs.build(order, size)
        context = self._forward_context(order, inputs, replayed=size is not None)
        if sanitizer is not None:
            sanitizer.check_inputs(order, inputs)
        connector = (
            self.maybe_get_kv_connector_output(scheduler_output, context)
            if use_connector
            else nullcontext(None)
        )
        hidden: Tensor | None = None
        with set_forward_context(context), connector as kv_connector_output:
            if size is None:
                hidden, aux = self._forward(inputs.input_ids, inputs.positions)
                logits = self._logits_to_sample(order, inputs, hidden)
            else:
                replayed = self.graphs.replay(size)
                aux = [stream[: inputs.num_tokens] for stream in replayed.aux]
                logits = replayed.logits[: inputs.num_tokens]
            if sanitizer is not None:
                sanitizer.observe(hidden, logits)
            sampled = self._sample(order, inputs, logits, scheduler_output.token_masks)
            if self.proposer is not None:
                self._propose(sampled, aux)
        if sanitizer is not None:
            sanitizer.end_step(order, inputs, kv_connector_output)
        # A replayed step samples for every request, so it scores no prompt position.
        prompt_logprobs = (
            [] if hidden is None else self.scorer.score(order, hidden, self.compute_logits)
        )
        self.arena.copy_blocks(scheduler_output.copies_after)
        for state, count in zip(order.states, order.num_scheduled.tolist(), strict=True):
            state.num_computed_tokens += count
        sampling = order.sampling.tolist()
        return StepOutput(
            order.req_ids,
            sampling,
            [self._num_logprobs(order, i) for i in sampling],
            sampled,
            prompt_logprobs,
            kv_connector_output,
            self.take_failed_requests() if use_connector else {},
            self.device,
        )

    def _propose(self, sampled: SamplerOutput | None, aux: list[Tensor]) -> None:
        """Cache the captured rows of this step, whether or not it sampled anything."""
        assert self.proposer is not None
        if sampled is None:
            drafts = torch.empty(0, 1, dtype=torch.int64, device=self.device)
        else:
            drafts = sampled.sampled_token_ids.unsqueeze(1)
        self.proposer.propose(drafts, aux)

    def _without_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if not has_kv_transfer_group():
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput(
            req_ids=[],
            sampled_token_ids=[],
            kv_connector_output=self.kv_connector_no_forward(scheduler_output),
            failed_req_ids=self.take_failed_requests(),
        )

    def _num_logprobs(self, order: StepOrder, i: int) -> int | None:
        asked = order.states[i].sampling_params.logprobs
        return self.vocab_size if asked == -1 else asked

    def _forward(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        result = self.model(input_ids, positions)
        return (result, []) if isinstance(result, Tensor) else result

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` after the final norm -> `[rows, vocab]` in the model dtype."""
        return cast(VllmModel, self.model).compute_logits(hidden)

    def _logits_to_sample(self, order: StepOrder, inputs: StepInputs, hidden: Tensor) -> Tensor:
        if not len(order.sampling):
            return hidden.new_empty(0, self.vocab_size)
        return self.compute_logits(hidden.index_select(0, inputs.sample_indices))

    def _sample(
        self, order: StepOrder, inputs: StepInputs, logits: Tensor, step_masks: StepMasks | None
    ) -> SamplerOutput | None:
        if not len(order.sampling):
            return None
        chosen = [order.states[i] for i in order.sampling.tolist()]
        adjusted = [
            (row, self.adjustments[state.req_id], state.num_output_tokens)
            for row, state in enumerate(chosen)
            if state.req_id in self.adjustments
        ]
        metadata = self._sampling_metadata(order)
        masks = None
        if step_masks is not None:
            masks = TokenMasks.upload(step_masks, [s.req_id for s in chosen], self.device)
        sampled = sample(logits, metadata, inputs.sample_positions, adjusted, masks)
        self.inputs.remember(inputs.sample_rows, sampled.sampled_token_ids)
        for state in chosen:
            state.num_output_tokens += 1
        return sampled

    def _sampling_metadata(self, order: StepOrder) -> SamplingMetadata:
        key = [order.req_ids[i] for i in order.sampling.tolist()]
        if self._sampling is None or key != self._sampling_key:
            params = [order.states[i].sampling_params for i in order.sampling.tolist()]
            self._sampling = SamplingMetadata.build(params, self.vocab_size, self.device)
            self._sampling_key = key
        return self._sampling

    def _forward_context(
        self, order: StepOrder, inputs: StepInputs, replayed: bool
    ) -> ForwardContext:
        """Upload every group's tables; metadata only for layers that run outside a graph."""
        context = ForwardContext(
            no_compile_layers=self.layers, attn_metadata={}, num_tokens=inputs.num_tokens
        )
        padded_reqs = len(inputs.seq_lens)
        outside = set(self.proposer.attn_layer_names) if self.proposer is not None else set()
        max_query_len = int(order.num_scheduled.max())
        max_seq_len = int(inputs.seq_lens_cpu.max())
        for group, table in zip(self.groups, self.block_tables.groups, strict=True):
            block_table, block_table_cpu = table.gather(order.rows, padded_reqs)
            slots = table.slot_mapping(
                inputs.token_rows_cpu, inputs.positions_cpu, inputs.num_padded
            )
            if replayed and outside.isdisjoint(group.layer_names):
                continue
            metadata = group.builder.build(
                CommonAttentionMetadata(
                    num_reqs=order.num_reqs,
                    num_tokens=inputs.num_tokens,
                    num_decodes=order.num_decodes,
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                    query_start_loc=inputs.query_start_loc,
                    query_start_loc_cpu=inputs.query_start_loc_cpu,
                    seq_lens=inputs.seq_lens,
                    seq_lens_cpu=inputs.seq_lens_cpu,
                    num_computed_tokens_cpu=order.num_computed,
                    prefill_query_start_loc=inputs.prefill_query_start_loc,
                    prefill_query_start_loc_cpu=inputs.prefill_query_start_loc_cpu,
                    block_table=block_table,
                    slot_mapping=slots,
                    block_table_cpu=block_table_cpu,
                )
            )
            for name in group.layer_names:
                context.attn_metadata[name] = metadata
                if not isinstance(group.spec, MambaSpec):
                    context.slot_mapping[name] = slots
        return context

    # ---- the persistent batch ------------------------------------------------------------------

    def _update_states(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            self._remove(req_id)
            self.scorer.forget(req_id)
            self._prompts.pop(req_id, None)
        for req_id in output.preempted_req_ids:
            self._remove(req_id)
        for new in output.scheduled_new_reqs:
            assert new.sampling_params is not None
            prompt = Prompt(new.sampling_params, len(new.prompt_token_ids))
            self._prompts[new.req_id] = prompt
            self._add(
                new.req_id, new.prompt_token_ids, prompt, new.num_computed_tokens, new.block_ids
            )
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert block_ids is not None
                self._add(
                    req_id,
                    cached.all_token_ids[req_id],
                    self._prompts[req_id],
                    cached.num_computed_tokens[i],
                    block_ids,
                )
            elif block_ids is not None:
                self.block_tables.append_row(self.batch.requests[req_id].row, block_ids)

    def _add(
        self,
        req_id: str,
        token_ids: list[int],
        prompt: Prompt,
        num_computed_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> None:
        params = prompt.sampling_params
        state = self.batch.add(req_id, token_ids, prompt.num_tokens, params, num_computed_tokens)
        self.block_tables.set_row(state.row, block_ids)
        if Adjustments.needed(params):
            self.adjustments[req_id] = Adjustments(
                params, state.token_ids, prompt.num_tokens, self.vocab_size, self.device
            )

    def _remove(self, req_id: str) -> None:
        self.batch.remove(req_id)
        self.adjustments.pop(req_id, None)
        self._sampling_key = None
