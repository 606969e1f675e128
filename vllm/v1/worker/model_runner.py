# SPDX-License-Identifier: Apache-2.0
"""Runs one model on one device, a step at a time.

A step: apply the scheduler's changes to the persistent batch, build the inputs, one metadata
object per state group, run the model, sample, keep the tokens on the device. Nothing here reads a
device value; results reach the host through `StepOutput`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.interfaces import (
    LeavesOutLayers,
    SharesVocabulary,
    VllmModel,
)
from vllm.model_executor.utils import captured_numbers
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from vllm.v1.sample.sampler import gather_logprobs
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.spec_decode.drafter import (
    DraftStep,
)
from vllm.v1.structured_output.masks import ReceiveMasks, no_masks
from vllm.v1.worker.async_output import ProposedDrafts, StepOutput
from vllm.v1.worker.graph_plan import plan_graphs
from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.padded_steps import PaddedSteps
from vllm.v1.worker.requests_on_device import RequestsOnDevice
from vllm.v1.worker.sanitizer import Sanitizer
from vllm.v1.worker.step_graphs import Replay
from vllm.v1.worker.step_inputs import StepInputs


class ModelRunner(RequestsOnDevice, KVConnectorModelRunnerMixin):
    """Runs one device's model for its requests."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        receive_masks: ReceiveMasks = no_masks,
    ) -> None:
        super().__init__(vllm_config, device)
        self.receive_masks = receive_masks
        #: whether kernels run; see `execute_dummy`
        self._launches = True

    # ---- graphs --------------------------------------------------------------------------------

    def plan_graphs(self) -> None:
        """Decide what is captured; `self.graphs` captures it, at once or between steps."""
        present = [group for group in self.groups if group.layer_names]
        backends = [self.layers[g.layer_names[0]].get_attn_backend() for g in present]
        plan = plan_graphs(self.vllm_config, backends, self.kv_cache_config)
        graphs = self.padded_steps().graphs(plan, self.drafter)
        self.graphs = self.placed[self.placement].graphs = graphs

    def capture_graphs(self) -> None:
        """Of every placement, anew."""
        for index in reversed(self.placed):
            self.use_placement(index)
            self.plan_graphs()
            self.graphs.capture_all()

    def reload_weights(self) -> None:
        """Read the weights again, and capture the graphs again if they hold other numbers. Ranks
        that share layers find the same."""
        before = captured_numbers(self.models)
        try:
            self.load_weights()
        finally:
            if captured_numbers(self.models) != before and self.drop_graphs():
                gc.collect()
                current_platform.empty_cache()
                self.capture_graphs()

    def padded_steps(self) -> PaddedSteps:
        """Steps without a real token, as graphs record them; for the memory that there is now."""
        return PaddedSteps(
            self.inputs,
            self.metadata,
            self.block_tables,
            self.journals,
            self._forward,
            self.step_logits if self.samples else lambda hidden: hidden,
            self.brief_steps(),
        )

    def brief_steps(self) -> Callable[[], AbstractContextManager[None]]:
        """For blocks in which steps launch every kernel, but not for every layer, so that their
        results mean nothing. Holds for the present model and memory."""
        if not isinstance(self.model, LeavesOutLayers):
            return nullcontext
        return partial(self.model.leaving_out, self.model.repeated_layers())

    # ---- the step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Launch one step."""
        self.use_placement(scheduler_output.placement)
        self.update_requests(scheduler_output)
        self.before_blocks_change(scheduler_output)
        if self.sanitizer is None:
            self.arena.copy_blocks(scheduler_output.copies_before)
        else:
            self.sanitizer.begin_step(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            if scheduler_output.joint is not None:
                return self._step_of_padding(scheduler_output, scheduler_output.joint)
            return self._without_forward(scheduler_output)
        return self._step(scheduler_output, has_kv_transfer_group(), self.sanitizer)

    @torch.inference_mode()
    def execute_dummy(self, scheduler_output: SchedulerOutput, launches: bool = True) -> None:
        """A step of made-up requests (profiling, warm-up); no connector sees it.

        Without `launches` kernels are noted instead (`compile_ahead`), and what they should have
        sampled is whatever was in memory: it counts as token 0.

        Waits for the device: nobody waits for the step's output, which is what bounds how many real
        steps are in flight, and staged arrays are filled again after `depth` of them.
        """
        self.update_requests(scheduler_output)
        self._launches = launches
        try:
            with nullcontext() if self.stage is None else self.stage.alone():
                self._step(scheduler_output, False, None)
        finally:
            self._launches = True
        if self.sanitizer is not None:
            self.sanitizer.memory.clear_null_page()
        current_platform.synchronize()

    def _step(
        self, scheduler_output: SchedulerOutput, use_connector: bool, sanitizer: Sanitizer | None
    ) -> StepOutput:
        order = self.batch.order(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.sampling_req_ids,
            scheduler_output.decode_set_id,
        )
        joint = scheduler_output.joint
        if joint is not None:
            order = replace(order, width=joint.width)
            if not joint.covers(order.shape):
                raise RuntimeError(f"replicas agreed on {joint}, and this one has {order.shape}")
        if self.stage is not None and not self.samples:
            self.stage.take_sampled(order, self.inputs.accept_requests)
        journal = None
        if self.journals is not None:
            looks = use_connector and self.connector_reads_states(scheduler_output)
            journal = self.journals.begin_step(order, looks)
        replay = self.graphs.replay_for(joint or order.shape)
        size = None if replay is None else replay.num_tokens
        whole = replay is not None and replay.whole
        reqs = replay.size if replay is not None and replay.whole else None
        inputs = self.inputs.build(order, size, reqs, journals=journal is not None)
        hooked = [] if self.capture is None else list(self.capture.attn_layer_names)
        if self.drafter is not None:
            hooked += self.drafter.attn_layer_names
        context = self.metadata.of_step(order, inputs, hooked if whole else None)
        if replay is None and joint is not None:
            context.exchange_rows = joint.num_tokens
        self.inputs.prepare(order, inputs, self.block_tables.paged, journal)
        if sanitizer is not None:
            sanitizer.check_inputs(order, inputs)
        connector = (
            self.maybe_get_kv_connector_output(scheduler_output, context)
            if use_connector
            else nullcontext(None)
        )
        with set_forward_context(context), connector as kv_connector_output:
            if self.stage is not None:
                self.stage.receive(inputs.num_tokens)
            hidden, logits = self._run_model(order, inputs, replay)
            if sanitizer is not None:
                sanitizer.observe(hidden, logits)
            sampled = None
            if logits is None:
                self._hand_on(order, inputs, hidden)
            else:
                sampled = self._sample(order, inputs, logits, scheduler_output.masked_req_ids)
                self._accept(order, inputs, sampled, scheduler_output.num_next_drafts)
        if sanitizer is not None:
            sanitizer.end_step(order, inputs, kv_connector_output)
        # A graph that gives logits is of decodes, which score no prompt position.
        prompt_logprobs = (
            []
            if hidden is None or logits is None
            else self.scorer.score(order, hidden, self._score)
        )
        if self.journals is not None:
            self.journals.before_copies(scheduler_output.copies_after)
        self.arena.copy_blocks(scheduler_output.copies_after)
        self.batch.advance(order)
        progress = self.inputs.progress
        return StepOutput(
            order,
            self.vocab_size,
            sampled,
            prompt_logprobs,
            kv_connector_output,
            self.sampler.take_failed() | (self.take_failed_requests() if use_connector else {}),
            self.device,
            None if self.drafter is None else ProposedDrafts.of_constrained(self.batch, progress),
        )

    def _run_model(
        self, order: StepOrder, inputs: StepInputs, replay: Replay | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Hidden states `[tokens, hidden]` unless a whole graph ran, logits `[sampling, vocab]`.
        Without a head: what the next pipeline stage gets, `[tokens, streams, hidden]`, and None."""
        if replay is None:
            hidden = self._forward(inputs)
        else:
            with nullcontext() if self.capture is None else self.capture.layer_hooks():
                output = self.graphs.replay(replay)[: inputs.num_tokens]
            if replay.whole and self.samples:
                return None, output
            hidden = output
        if not self.samples:
            return hidden, None
        return hidden, self._logits_to_sample(order, inputs, hidden)

    def _without_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if not has_kv_transfer_group():
            return EMPTY_MODEL_RUNNER_OUTPUT
        if self.journals is not None and self.connector_reads_states(scheduler_output):
            self.journals.complete_all()
        return ModelRunnerOutput(
            req_ids=[],
            sampled_token_ids=[],
            kv_connector_output=self.kv_connector_no_forward(scheduler_output),
            failed_req_ids=self.take_failed_requests(),
        )

    def _step_of_padding(self, scheduler_output: SchedulerOutput, joint: StepShape) -> StepOutput:
        """Other replicas have tokens, and need this one's experts."""
        steps, replay = self.padded_steps(), self.graphs.replay_for(joint)
        if replay is None:
            steps.tokens(1, exchange_rows=joint.num_tokens)()
        else:
            steps.replay(self.graphs, replay)
        result = EMPTY_MODEL_RUNNER_OUTPUT
        if not scheduler_output.unscheduled:
            result = self._without_forward(scheduler_output)
        transfers, failed = result.kv_connector_output, result.failed_req_ids
        nothing = self.batch.order({}, set())
        return StepOutput(nothing, self.vocab_size, None, [], transfers, failed, self.device)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states of every token; captured ones go to their cache. Of a pipeline stage before
        the last, what the next one gets."""
        if self.stage is None:
            return self.tap.read(inputs, self.model(inputs.input_ids, inputs.positions))
        incoming = self.stage.incoming(len(inputs.input_ids))
        output = self.model(inputs.input_ids, inputs.positions, incoming)
        return self.tap.read(inputs, output) if self.samples else self.stage.packed(output)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` after the final norm -> `[rows, vocab]` in the model dtype."""
        return cast(VllmModel, self.model).compute_logits(hidden)

    def step_logits(self, hidden: Tensor) -> Tensor:
        """`compute_logits`, of which each rank that shares the vocabulary keeps its part."""
        if self.sampler.shard is None:
            return self.compute_logits(hidden)
        return cast(SharesVocabulary, self.model).own_logits(hidden)

    def _score(self, hidden: Tensor, chosen: Tensor, num_logprobs: int) -> LogprobsTensors:
        logits = self.step_logits(hidden)
        return gather_logprobs(logits, chosen, num_logprobs, self.sampler.shard)

    def _logits_to_sample(self, order: StepOrder, inputs: StepInputs, hidden: Tensor) -> Tensor:
        if not len(order.sampling):
            return hidden.new_empty(0, self.vocab_size)
        return self.step_logits(hidden.index_select(0, inputs.sample_indices))

    def _sample(
        self, order: StepOrder, inputs: StepInputs, logits: Tensor, masked_req_ids: list[str]
    ) -> SamplerOutput | None:
        masks = None
        if masked_req_ids:
            filled = self.receive_masks()
            places = order.places_of(masked_req_ids)
            masks = TokenMasks.upload(filled, order.sample_starts[places], self.device)
            if order.width > 1:
                self.inputs.limit_samples(inputs.sample_requests, places, filled.counts)
        positions = inputs.next_positions[: len(logits)]
        if not order.decode_only:
            positions = inputs.next_positions.index_select(0, inputs.sample_indices)
        return self.sampler.sample(order, logits, positions, masks)

    def _hand_on(self, order: StepOrder, inputs: StepInputs, packed: Tensor | None) -> None:
        """A pipeline stage before the last: its streams go to the next one, which lets the last
        one sample."""
        assert self.stage is not None and packed is not None
        self.stage.send(packed)
        self.stage.await_sampled(order, inputs.sample_requests, self.inputs.accept_requests)

    def _accept(
        self,
        order: StepOrder,
        inputs: StepInputs,
        sampled: SamplerOutput | None,
        num_drafts: int,
    ) -> None:
        """Advance the rows by the sampled tokens that are output; the next drafts follow them."""
        counts = tokens = None
        if sampled is not None:
            tokens = sampled.sampled_token_ids
            if not self._launches:
                tokens.zero_()
            verified = self.inputs.accept_requests(inputs.sample_requests, tokens)
            if self.stage is not None:
                self.stage.send_sampled(tokens)
            counts = verified[0]
            self.sampler.observe(tokens, counts)
            if order.width > 1:
                sampled.verified = verified
        if self.drafter is not None:
            self.drafter.propose(DraftStep(order, inputs, tokens, counts, num_drafts))
