# SPDX-License-Identifier: Apache-2.0
"""Dummy steps at start-up: measuring the activation peak and compiling every kernel once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm import decisions
from vllm.distributed.parallel_state import get_tp_group, without_communication
from vllm.kernels.chunks import CHUNK
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import WORTH_CUTTING
from vllm.model_executor.layers.moe import forget_counts, has_mixtures
from vllm.model_executor.models.interfaces import HasPlacements
from vllm.sampling_params import SamplingParams
from vllm.utils.startup_phases import startup_phase
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.placed_arena import placed_config
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import gather_logprobs, sample
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from vllm.kernels.triton.compile_ahead import Variant
    from vllm.kernels.triton.kernel_plan import KernelPlan
    from vllm.v1.worker.model_runner import ModelRunner
    from vllm.v1.worker.step_graphs import StepGraphs

#: sequences that occupy every multiprocessor of any supported GPU
_MANY = 64
#: sequences for which decode attention takes its other tiles, with 4 or 8 key heads
_COUNTS = (16, 32, 256)
#: queries per request that attention treats as short; each power of two is a tile height
_SHORT = (1, 2, 4, 8, 16, 32, 64)
#: tokens whose shares per expert differ by as much as blocks of them do, from few on
_SHARED_OUT = (128, 256, 512, 1024, 2048, 4096)
#: a context that is worth splitting
_CONTEXT = 2048

_GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
_FILTERED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=0, max_tokens=2)
_ROWS = 2
_TOP_K, _TOP_P, _MIN_P = 20, 0.9, 0.1
_COMMON = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.0, seed=0, top_k=_TOP_K, top_p=_TOP_P),
    SamplingParams(temperature=1.0, seed=0, top_k=_TOP_K, top_p=_TOP_P, min_p=_MIN_P),
    SamplingParams(temperature=1.0, seed=0, top_p=_TOP_P),
)


@dataclass(frozen=True)
class DummyBatch:
    """Requests that each prefill `length` tokens after `context` computed ones, then decode: one
    token, and as many as steps of each width verify."""

    count: int
    length: int
    context: int
    params: SamplingParams
    decode: bool = True


def profile_peak_bytes(runner: ModelRunner) -> int:
    """Device bytes in use at the worst step, without the arena (CUDA only).

    Runs the largest prefill against a two-page arena whose blocks are all null.
    """
    bind_small_arena(runner)
    # What libraries allocate once, at first use, is there to stay: it is no activation.
    run_batch(runner, DummyBatch(1, 1, 0, _GREEDY))
    torch.cuda.reset_peak_memory_stats(runner.device)
    resident = torch.cuda.memory_allocated(runner.device)
    longest = _longest(runner)
    count = max(1, min(runner.max_tokens // longest, runner.max_rows))
    run_batch(runner, DummyBatch(count, longest, 0, _GREEDY, decode=False))
    _sample_full_batch(runner)
    torch.cuda.synchronize(runner.device)
    runner.activation_bytes = torch.cuda.max_memory_allocated(runner.device) - resident
    runner.release_kv_cache()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.device)
    return total - free + runner.activation_bytes


@torch.inference_mode()
def _sample_full_batch(runner: ModelRunner) -> None:
    """With every filter on: the sampler's buffers grow with the batch."""
    if not runner.samples:
        return
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.1, seed=0, logprobs=1)
    rows, model = runner.max_rows, runner.model_config
    hidden = torch.zeros(rows, model.get_hidden_size(), dtype=model.dtype, device=runner.device)
    logits = runner.step_logits(hidden)
    metadata = SamplingMetadata.build([params] * rows, runner.vocab_size, runner.device)
    positions = torch.zeros(rows, dtype=torch.int64, device=runner.device)
    masks = TokenMasks.dummy(logits, runner.vocab_size)
    sample(logits, metadata, positions, None, masks, runner.sampler.shard)


def find_kernels(runner: ModelRunner, plan: KernelPlan | None) -> list[Variant]:
    """The kernels that `warm_up` would compile: as an earlier start found them, else by running it
    without launching them. The weights need not be loaded (CUDA only)."""
    from vllm.kernels.triton import compile_log

    if plan is None or compile_log.compilations():
        # What this process has compiled already would be missing in what is stored.
        return note_kernels(runner)
    variants = plan.load()
    if variants is None:
        variants = note_kernels(runner)
        plan.store(variants)
    return variants


def note_kernels(runner: ModelRunner) -> list[Variant]:
    """The kernels that are not compiled yet and that `warm_up` would launch."""
    from vllm.kernels.triton.compile_ahead import noted_launches

    bind_small_arena(runner)
    # Other ranks may know their kernels from an earlier start.
    with noted_launches() as variants, without_communication():
        for index in reversed(runner.placed):
            runner.use_placement(index)
            # Sampled tokens are whatever was in memory, so none of them may become an input.
            _rehearse(runner, decode_known_tokens=True)
    runner.release_kv_cache()
    return variants


def warm_up(runner: ModelRunner) -> None:
    """Run every kernel on its shapes once; capture the graphs, of every placement that requests
    choose from. CUDA only."""
    for index in reversed(runner.placed):
        runner.use_placement(index)
        rehearse_if_new(runner)
        with startup_phase("graph capture"):
            runner.plan_graphs()
            capture_until(runner.graphs, runner.vllm_config.compilation_config.ready_by_s)
            torch.cuda.synchronize(runner.device)


def capture_until(graphs: StepGraphs, deadline_s: float | None) -> None:
    """Capture sizes until `deadline_s` of `time.monotonic()`; None: all of them. Ranks that share
    layers capture the same."""
    if deadline_s is None:
        graphs.capture_all()
        return
    while get_tp_group().all_agree(time.monotonic() < deadline_s) and graphs.capture_next():
        pass
    if graphs.num_pending:
        decisions.record(
            "graph capture",
            f"{graphs.num_pending} sizes after the start",
            "--ready-in leaves no more time before it",
            "all before it",
        )


def rehearse_if_new(runner: ModelRunner) -> None:
    """Run every kernel of the placement in use once, unless earlier ones had them all."""
    if note_placement(runner):
        _rehearse(runner, decode_known_tokens=False)
    elif runner.journals is not None:
        # What writes several layers' states together may go by their number.
        runner.journals.rehearse()


def note_placement(runner: ModelRunner) -> bool:
    """Remember the placement in use; whether it has kernels that none before it had."""
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    model = runner.model
    mixers = model.get_used_mixers() if isinstance(model, HasPlacements) else {}
    return runner.rehearsals.add(specs, mixers)


def _rehearse(runner: ModelRunner, decode_known_tokens: bool) -> None:
    with runner.brief_steps()():
        for batch in _batches(runner):
            run_batch(runner, batch, decode_known_tokens=decode_known_tokens)
    if runner.journals is not None:
        runner.journals.rehearse()
    if runner.drafter is not None:
        runner.drafter.rehearse()
    if runner.samples:
        run_common_samplers(runner)


def _batches(runner: ModelRunner) -> Iterator[DummyBatch]:
    """Kernels differ by tile, and tiles follow from whether few or many sequences share the device,
    from whether queries are short or long, and from whether the context is worth splitting: each
    combination is a batch."""
    longest = _longest(runner)
    room = runner.model_config.max_model_len - 1
    many = min(runner.max_rows, _MANY, runner.max_tokens)
    yield DummyBatch(1, min(CHUNK, longest), 0, _GREEDY)
    yield DummyBatch(1, min(2, longest), 0, _FILTERED)
    yield DummyBatch(many, max(1, min(CHUNK, runner.max_tokens // many, longest)), 0, _GREEDY)
    yield DummyBatch(many, 1, 0, _FILTERED)
    for count in _COUNTS:
        yield DummyBatch(min(count, runner.max_rows, runner.max_tokens), 1, 0, _GREEDY)
    for length in _SHORT:
        if length <= min(longest, room):
            for context in {0, min(_CONTEXT, room - length)}:
                yield DummyBatch(1, length, context, _GREEDY, decode=length == 2)
    if has_mixtures(runner.model):
        for length in _SHARED_OUT:
            if length <= longest:
                yield DummyBatch(1, length, 0, _GREEDY, decode=False)
    if runner.vllm_config.cache_config.splits_scans and longest >= WORTH_CUTTING:
        yield DummyBatch(1, WORTH_CUTTING, 0, _GREEDY, decode=False)


def _longest(runner: ModelRunner) -> int:
    return min(runner.max_tokens, runner.model_config.max_model_len - 1)


def bind_small_arena(runner: ModelRunner) -> None:
    specs = [(name, runner.get_kv_cache_spec(name)) for name in runner.placements()]
    if specs:
        runner.initialize_kv_cache(placed_config(runner.vllm_config, specs, num_pages=2))
        return
    groups = get_kv_cache_groups(runner.vllm_config, runner.get_kv_cache_spec())
    runner.initialize_kv_cache(KVCacheConfig(0, [], groups, plan_arena(groups, num_pages=2)))


def run_batch(runner: ModelRunner, batch: DummyBatch, decode_known_tokens: bool = False) -> None:
    """Steps of made-up requests whose every block is null; nothing they write is ever read."""
    end = batch.context + batch.length
    known = end + 1 if decode_known_tokens else end
    requests = [
        NewRequestData(
            req_id=f"warm-up-{i}",
            prompt_token_ids=[1] * known,
            mm_features=[],
            sampling_params=batch.params,
            pooling_params=None,
            block_ids=tuple(
                [0] * table.spec.blocks_for(end + 1) for table in runner.block_tables.groups
            ),
            num_computed_tokens=batch.context,
        )
        for i in range(batch.count)
    ]
    req_ids = [request.req_id for request in requests]
    runner.execute_dummy(
        _step(requests, CachedRequestData.make_empty(), req_ids, batch.length, runner.width - 1),
        launches=not decode_known_tokens,
    )
    for i, width in enumerate(runner.widths if batch.decode else ()):
        cached = CachedRequestData(
            req_ids=req_ids,
            new_block_ids=[None] * len(req_ids),
            num_computed_tokens=[end + i] * len(req_ids),
            num_output_tokens=[1 + i] * len(req_ids),
        )
        runner.execute_dummy(
            _step([], cached, req_ids, width, width - 1), launches=not decode_known_tokens
        )
    forget_counts(runner.models)
    finished = SchedulerOutput.make_empty()
    finished.finished_req_ids = set(req_ids)
    runner.forget(finished)


def _step(
    new: list[NewRequestData],
    cached: CachedRequestData,
    req_ids: list[str],
    length: int,
    num_drafts: int,
) -> SchedulerOutput:
    return SchedulerOutput(
        new,
        cached,
        dict.fromkeys(req_ids, length),
        length * len(req_ids),
        sampling_req_ids=set(req_ids),
        num_next_drafts=num_drafts,
    )


@torch.inference_mode()
def run_common_samplers(runner: ModelRunner) -> None:
    """The usual combinations, on made-up logits, for each has kernels of its own: greedy, plain,
    top-k with top-p (and min-p), top-p alone; logprobs and masks. Others, and penalties or biases,
    compile theirs when they first come."""
    logits = _logits(runner)
    chosen = torch.zeros(_ROWS, dtype=torch.int64, device=logits.device)
    gather_logprobs(logits, chosen, 1, runner.sampler.shard)
    masks = TokenMasks.dummy(logits, runner.vocab_size)
    for i, params in enumerate(_COMMON):
        metadata = SamplingMetadata.build([params] * _ROWS, runner.vocab_size, logits.device)
        sample(
            logits, metadata, _positions(logits), None, None if i else masks, runner.sampler.shard
        )


def _logits(runner: ModelRunner) -> Tensor:
    model = runner.model_config
    shape = (_ROWS, model.get_hidden_size())
    return runner.step_logits(torch.zeros(shape, dtype=model.dtype, device=runner.device))


def _positions(logits: Tensor) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
