# SPDX-License-Identifier: Apache-2.0
"""An executor without a model: the next token is a hash of all tokens before it.

It keeps a paged cache of what each slot should hold and checks every slot it would read, so a
wrong block table, a stale cache hit or a lost token shows as an error or as a different output.
The first group is paged; another may be recurrent and holds one state per request.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.placed_arena import BesideArena
from vllm.v1.core.sched.output import BlockCopy, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.structured_output.mask_words import FilledMasks
from vllm.v1.structured_output.masks import MaskQueue

VOCAB_SIZE = 1000
EOS = 7
BLOCK_SIZE = 16
#: what a rejected draft leaves in its slot
REJECTED = -1


def next_token(history: list[int]) -> int:
    """The "model"."""
    return zlib.crc32(np.array(history, dtype=np.int32).tobytes()) % VOCAB_SIZE


def prefix_hash(history: list[int]) -> int:
    return zlib.crc32(np.array(history, dtype=np.int32).tobytes(), 1)


def expected_tokens(
    prompt: list[int], params: SamplingParams, max_model_len: int = 512, eos: int | None = None
) -> list[int]:
    """What a request must produce, computed one token at a time."""
    history = list(prompt)
    output: list[int] = []
    while len(output) < (params.max_tokens or 10**9) and len(history) < max_model_len:
        token = next_token(history)
        history.append(token)
        output.append(token)
        if len(output) < params.min_tokens:
            continue
        if (token == eos and not params.ignore_eos) or token in (params.stop_token_ids or []):
            break
    return output


def make_vllm_config(
    *,
    max_model_len: int = 512,
    num_blocks: int = 200,
    caching: bool = True,
    kv_transfer_config: KVTransferConfig | None = None,
    model: str = "fake-model",
    skip_tokenizer_init: bool = True,
    additional_config: dict[str, Any] | None = None,
    num_drafts: int = 0,
    full_width: bool = False,
    num_stages: int = 1,
    **scheduler: Any,
) -> VllmConfig:
    hf_config = PreTrainedConfig(  # importing a family's own takes seconds in each process
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=max_model_len,
        eos_token_id=EOS,
        architectures=["LlamaForCausalLM"],
    )
    scheduler.setdefault("max_num_seqs", 16)
    scheduler.setdefault("max_num_batched_tokens", max_model_len)
    scheduler.setdefault("async_scheduling", False)
    scheduler.setdefault("enable_chunked_prefill", True)
    return VllmConfig(
        model_config=ModelConfig(
            model=model,
            hf_config=hf_config,
            dtype="float32",
            max_model_len=max_model_len,
            skip_tokenizer_init=skip_tokenizer_init,
            generation_config="vllm",
            override_generation_config={"eos_token_id": EOS},  # else the hub is asked for it
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            num_gpu_blocks_override=num_blocks,
        ),
        scheduler_config=SchedulerConfig(max_model_len=max_model_len, **scheduler),
        parallel_config=ParallelConfig(pipeline_parallel_size=num_stages),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=kv_transfer_config,
        speculative_config=(
            SpeculativeConfig(
                method="replay", num_speculative_tokens=num_drafts, full_width=full_width
            )
            if num_drafts
            else None
        ),
        additional_config=additional_config or {},
    )


@dataclass
class WorkerRequest:
    """What a worker remembers of a request."""

    params: SamplingParams
    num_prompt_tokens: int
    history: list[int]
    block_ids: list[int]
    num_computed: int
    state_block: int | None = None


@dataclass
class FakeWorker:
    """Executes scheduler outputs and checks each one for consistency."""

    slots: dict[int, int] = field(default_factory=dict)
    #: the recurrent group, if there is one, and its states by block
    state_group: int | None = None
    states: dict[int, int] = field(default_factory=dict)
    requests: dict[str, WorkerRequest] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)
    #: survive a preemption
    params: dict[str, tuple[SamplingParams, int]] = field(default_factory=dict)
    num_scored: dict[str, int] = field(default_factory=dict)
    #: drafts of each request's last step
    num_unsettled: dict[str, int] = field(default_factory=dict)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(output)
        self._update(output)
        self._copy(output.copies_before)
        result = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
        for req_id, count in output.num_scheduled_tokens.items():
            result.req_ids.append(req_id)
            result.sampled_token_ids.append(self._run(req_id, count, output, result))
            drafts = output.scheduled_spec_decode_tokens.get(req_id, [])
            result.num_verified.append(len(drafts))
        self._copy(output.copies_after)
        return result

    def _copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            if copy.group_id == self.state_group:
                self.states[copy.target] = self.states[copy.source]
            if copy.group_id:
                continue
            for offset in range(BLOCK_SIZE):
                held = self.slots.get(copy.source * BLOCK_SIZE + offset)
                if held is not None:
                    self.slots[copy.target * BLOCK_SIZE + offset] = held

    def _update(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            self.requests.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests
            assert new.sampling_params is not None
            self.requests[new.req_id] = WorkerRequest(
                new.sampling_params,
                len(new.prompt_token_ids),
                list(new.prompt_token_ids),
                list(new.block_ids[0]),
                new.num_computed_tokens,
                self._state_block(new.block_ids),
            )
            self.params[new.req_id] = (new.sampling_params, len(new.prompt_token_ids))
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert req_id not in self.requests
                assert blocks is not None
                params, num_prompt = self.params[req_id]
                self.requests[req_id] = WorkerRequest(
                    params,
                    num_prompt,
                    list(cached.all_token_ids[req_id]),
                    list(blocks[0]),
                    cached.num_computed_tokens[i],
                    self._state_block(blocks),
                )
            else:
                state = self.requests[req_id]
                # With drafts in flight the scheduler knows upper bounds.
                behind = cached.num_computed_tokens[i] - state.num_computed
                num_output = len(state.history) - state.num_prompt_tokens
                assert behind == cached.num_output_tokens[i] - num_output
                assert 0 <= behind <= self.num_unsettled.get(req_id, 0)
                if blocks is not None:
                    state.block_ids.extend(blocks[0])

    def _state_block(self, block_ids: tuple[list[int], ...]) -> int | None:
        return None if self.state_group is None else block_ids[self.state_group][0]

    def _slot(self, state: WorkerRequest, position: int) -> int:
        block = state.block_ids[position // BLOCK_SIZE]
        assert block != 0, "the null block holds nothing"
        return block * BLOCK_SIZE + position % BLOCK_SIZE

    def _run(
        self, req_id: str, count: int, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[int]:
        state = self.requests[req_id]
        drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
        self.num_unsettled[req_id] = drafts
        if drafts:
            return self._verify(state, req_id, drafts, output, result)
        end = state.num_computed + count
        assert count > 0 and end <= len(state.history)
        for position in range(state.num_computed):
            found = self.slots.get(self._slot(state, position))
            assert found == prefix_hash(state.history[: position + 1]), (req_id, position)
        if state.state_block is not None:
            if state.num_computed:
                held = self.states.get(state.state_block)
                assert held == prefix_hash(state.history[: state.num_computed]), req_id
            self.states[state.state_block] = prefix_hash(state.history[:end])
        for position in range(state.num_computed, end):
            self.slots[self._slot(state, position)] = prefix_hash(state.history[: position + 1])
        if state.params.prompt_logprobs is not None:
            self._score(req_id, state, end, result)
        state.num_computed = end
        assert (req_id in output.sampling_req_ids) == (end == len(state.history))
        if end < len(state.history):
            return []
        token = next_token(state.history)
        state.history.append(token)
        if state.params.logprobs is not None:
            result.logprobs[req_id] = fake_logprobs([token], state.params.logprobs)
        return [token]

    def _verify(
        self,
        state: WorkerRequest,
        req_id: str,
        drafts: int,
        output: SchedulerOutput,
        result: ModelRunnerOutput,
    ) -> list[int]:
        """One token at a time, as many as are accepted; rejected drafts leave garbage behind."""
        start = state.num_computed
        assert output.num_scheduled_tokens[req_id] == 1 + drafts
        assert start == len(state.history) - 1 and req_id in output.sampling_req_ids
        accepted = zlib.crc32(f"{req_id} {start}".encode()) % (drafts + 1)
        plain = replace(output, scheduled_spec_decode_tokens={})
        rows: list[LogprobsLists] = []
        tokens: list[int] = []
        for _ in range(1 + accepted):
            tokens += self._run(req_id, 1, plain, result)
            if req_id in result.logprobs:
                rows.append(result.logprobs[req_id])
        if rows:
            parts = zip(*((r.token_ids, r.logprobs, r.ranks) for r in rows), strict=True)
            result.logprobs[req_id] = LogprobsLists(*(np.concatenate(part) for part in parts))
        self.num_unsettled[req_id] = drafts
        for position in range(start + 1 + accepted, start + 1 + drafts):
            self.slots[self._slot(state, position)] = REJECTED
        return tokens

    def _score(
        self, req_id: str, state: WorkerRequest, end: int, result: ModelRunnerOutput
    ) -> None:
        first = max(state.num_computed, self.num_scored.get(req_id, 0))
        last = min(end, state.num_prompt_tokens - 1)
        if first < last:
            self.num_scored[req_id] = last
            targets = state.history[first + 1 : last + 1]
            assert state.params.prompt_logprobs is not None
            result.prompt_logprobs[req_id] = fake_logprobs(targets, state.params.prompt_logprobs)


def fake_logprobs(tokens: list[int], k: int) -> LogprobsLists:
    """Rows whose chosen token has rank `token % 5 + 1`; the top tokens are `token + 1, ...`."""
    ids = np.array([[t, *((t + 1 + j) % VOCAB_SIZE for j in range(k))] for t in tokens])
    values = np.array([[-(t % 5) - 0.5, *(-0.1 * j for j in range(k))] for t in tokens])
    ranks = np.array([t % 5 + 1 for t in tokens])
    return LogprobsLists(ids.astype(np.int32), values.astype(np.float32), ranks.astype(np.int32))


class FakeExecutor(Executor):
    """One fake worker on a thread; `additional_config` injects delays and faults.

    Keys: `step_s` (seconds per step), `fail_at_step`, `exit_at_step`, `fail_at_start` (message),
    `start_s` (seconds to start).
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.faults = {**vllm_config.additional_config}
        time.sleep(self.faults.get("start_s", 0.0))
        if "fail_at_start" in self.faults:
            raise RuntimeError(self.faults["fail_at_start"])
        self.worker = FakeWorker()
        self.masks = MaskQueue()
        self.num_steps = 0
        self.is_shut_down = False
        self._pool = ThreadPoolExecutor(1)

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        return [{"layers.0": spec}]

    def get_placed_specs(self, placement: Any = None) -> list[list[Any]]:
        return [[]]

    def get_bytes_beside(self, placement: Any = None) -> list[BesideArena]:
        return [BesideArena()]

    def determine_available_memory(self) -> list[int]:
        return [self.faults.get("memory", 1 << 30)]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self.kv_cache_config = kv_cache_configs[0]

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._pool.submit(self._execute, scheduler_output)

    def init_kv_output_aggregator(self, connector: Any) -> None:
        return None

    def send_token_masks(self, masks: FilledMasks) -> None:
        self.masks.send(masks)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        time.sleep(self.faults.get("step_s", 0.0))
        if self.num_steps == self.faults.get("fail_at_step"):
            raise RuntimeError("injected step failure")
        if self.num_steps == self.faults.get("exit_at_step"):
            os._exit(9)
        return self.worker.execute(output)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if callable(method):
            return [method(self, *args, **(kwargs or {}))]
        return [getattr(self, method)(*args, **(kwargs or {}))]

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return (threading.current_thread().name, os.getpid(), args, kwargs)

    def refuse(self) -> None:
        raise VLLMValidationError("the worker cannot", "method", "refuse")

    def pace(self, step_s: float) -> None:
        """From now on a step takes that long."""
        self.faults["step_s"] = step_s

    def step_sizes(self) -> list[int]:
        """Requests in every step so far."""
        return [len(step.num_scheduled_tokens) for step in self.worker.steps]

    def check_health(self) -> None:
        return None

    def shutdown(self, reason: str | None = None) -> None:
        self.is_shut_down = True
        self.masks.close()
        self._pool.shutdown()
