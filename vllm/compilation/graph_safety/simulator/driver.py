# SPDX-License-Identifier: Apache-2.0
"""Steps handed to a runner by hand: requests that come, prefill, decode, verify drafts and end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output.mask_words import FilledMasks, pack_tokens
from vllm.v1.structured_output.masks import MaskQueue
from vllm.v1.worker.input_batch import InputBatch
from vllm.v1.worker.model_runner import ModelRunner

_ENDLESS: dict[str, Any] = {"max_tokens": 2**20, "ignore_eos": True}
GREEDY = (SamplingParams(temperature=0.0, **_ENDLESS),)
#: ways to sample that differ in what is launched: filters, noise, penalties, biases, logprobs
VARIED = (
    *GREEDY,
    SamplingParams(temperature=0.7, seed=1, top_k=20, top_p=0.9, logprobs=2, **_ENDLESS),
    SamplingParams(
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={3: 2.0},
        **_ENDLESS,
    ),
    SamplingParams(temperature=1.0, seed=2, min_p=0.05, allowed_token_ids=[*range(32)], **_ENDLESS),
)
#: the longest prompt
_PROMPT = 24
#: a step in so many has a prefill beside its decodes
_MIXED = 4
#: a request in so many follows a grammar
_CONSTRAINED = 3


@dataclass
class _Request:
    """`blocks`: by group, in `pages` of its own; `length`: tokens that are computed."""

    blocks: tuple[list[int], ...]
    pages: list[int]
    prompt: list[int]
    sampling: SamplingParams
    is_constrained: bool
    length: int = 0


class Driver:
    """Every request has pages of its own for as many tokens as the model takes; steps follow from
    `seed` alone: ranks that share layers run the same ones, and a pipeline stage runs them alone,
    with streams that are made up. Requests sample as `sampling` says, in turn. The arena is made
    here, with room for all rows. `launch` runs a step to its end (None:
    `ModelRunner.execute_dummy`). `masks`: where the runner takes token masks from; some of the
    requests are then constrained."""

    def __init__(
        self,
        runner: ModelRunner,
        seed: int = 0,
        launch: Callable[[SchedulerOutput], None] | None = None,
        sampling: Sequence[SamplingParams] = GREEDY,
        masks: MaskQueue | None = None,
    ) -> None:
        self._sampling, self._masks = sampling, masks
        self.launch = runner.execute_dummy if launch is None else launch
        self._runner = runner
        self._longest = runner.model_config.max_model_len
        runner.initialize_kv_cache(_arena(runner, self._longest + runner.width))
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._live: dict[str, _Request] = {}
        self._ended: set[str] = set()
        self._count = self._steps = 0
        #: of the decodes of the next step; half the steps keep it, so that graphs of drafts replay
        self._width = self._runner.width
        self._free = list(range(self._runner.arena.plan.num_pages - 1, 0, -1))

    def restart(self, seed: int = 0) -> None:
        """All requests end, and the next steps are those of a new driver."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self._live) | self._ended
        runner = self._runner
        runner.forget(output)
        self._begin(seed)
        # Rows are then given out in the order of a new batch.
        runner.batch = InputBatch(runner.max_rows, runner.widths)
        runner.arena.buffer.zero_()
        progress = runner.inputs.progress
        for tensor in (progress.computed, progress.tokens, progress.num_drafts):
            tensor.zero_()
        if runner.journals is not None:
            runner.journals.bind(runner.block_tables)

    def newest_tokens(self) -> Tensor:
        """`[requests, width]` int64: of all requests that go on, their newest tokens and drafts, 0
        where the last step made fewer."""
        rows = [self._runner.batch.requests[name].row for name in self._live]
        progress = self._runner.inputs.progress
        ahead = torch.arange(progress.width, device=progress.tokens.device)
        made = ahead <= progress.num_drafts[rows].unsqueeze(1)
        return torch.where(made, progress.tokens[rows], 0)

    def written_blocks(self, group_id: int) -> list[int]:
        """Of the requests that go on, the blocks of a group that are written to their end; a draft
        head may be two tokens behind."""
        spec, found = self._runner.block_tables.groups[group_id].spec, []
        for request in self._live.values():
            full = 1 if spec.is_recurrent else max(request.length - 2, 0) // spec.block_size
            found += request.blocks[group_id][:full]
        return found

    def step(self) -> None:
        """Run the next step: some of the requests decode, now and then beside a prefill."""
        runner, source = self._runner, self._random
        ready = list(self._live)
        decodes = sorted(source.sample(ready, source.randint(1, len(ready)))) if ready else []
        prefills = []
        self._steps += 1
        if not ready or (self._steps % _MIXED == 3 and len(ready) < runner.max_rows):
            prefills = [self._arrive() for _ in range(1 if ready else 2)]
        width = self._width
        if source.randrange(4) < 2 and decodes:
            self._width = self._narrower(width)
        self._run(decodes, prefills, width)
        full = [n for n, r in self._live.items() if r.length + 2 * runner.width >= self._longest]
        if len(self._live) == runner.max_rows or full:
            self._end(full[0] if full else next(iter(self._live)))

    def _narrower(self, width: int) -> int:
        """The width before this one, and the largest after the least: each comes soon."""
        widths = self._runner.widths
        return widths[widths.index(width) - 1]

    def _run(self, decodes: list[str], prefills: list[str], width: int) -> None:
        runner = self._runner
        new = [self._new_data(name) for name in prefills]
        cached = CachedRequestData(
            req_ids=decodes,
            new_block_ids=[None] * len(decodes),
            num_computed_tokens=[self._live[name].length for name in decodes],
            num_output_tokens=[1] * len(decodes),
        )
        scheduled = dict.fromkeys(decodes, width)
        scheduled |= {name: len(self._live[name].prompt) for name in prefills}
        output = SchedulerOutput(
            new,
            cached,
            scheduled,
            sum(scheduled.values()),
            sampling_req_ids=set(scheduled),
            num_next_drafts=self._width - 1,
        )
        output.finished_req_ids, self._ended = self._ended, set()
        if self._masks is not None and width == 1:
            self._constrain(output, self._masks)
        if runner.stage is not None:
            runner.stage.make_up_incoming(self._steps)
        self.launch(output)
        for name in scheduled:
            row = runner.batch.requests[name].row
            self._live[name].length = int(runner.inputs.progress.computed[row])

    def _constrain(self, output: SchedulerOutput, masks: MaskQueue) -> None:
        """Every second token is barred, where a grammar would say which."""
        names = [name for name in output.num_scheduled_tokens if self._live[name].is_constrained]
        output.masked_req_ids = names
        if names:
            vocab = self._runner.vocab_size
            words = pack_tokens([*range(0, vocab, 2)], vocab)
            rows = np.repeat(words[None], len(names), axis=0)
            masks.send(FilledMasks(rows, [1] * len(names)))

    def _arrive(self) -> str:
        name = f"r{self._count}"
        self._count += 1
        tables, plan = self._runner.block_tables.groups, self._runner.arena.plan
        pages, blocks = [], []
        for table, group in zip(tables, plan.groups, strict=True):
            count = table.spec.blocks_for(self._longest + self._runner.width)
            own = [self._free.pop() for _ in range(-(-count // group.blocks_per_page))]
            pages += own
            each = range(group.blocks_per_page)
            blocks.append([page * group.blocks_per_page + i for page in own for i in each][:count])
        vocab = self._runner.vocab_size
        length = self._random.randint(1, _PROMPT)
        prompt = [self._random.randrange(vocab) for _ in range(length)]
        sampling = self._sampling[(self._count - 1) % len(self._sampling)]
        constrained = self._masks is not None and self._count % _CONSTRAINED == 0
        self._live[name] = _Request(tuple(blocks), pages, prompt, sampling, constrained)
        return name

    def _new_data(self, name: str) -> NewRequestData:
        request = self._live[name]
        return NewRequestData(
            req_id=name,
            prompt_token_ids=request.prompt,
            mm_features=[],
            sampling_params=request.sampling,
            pooling_params=None,
            block_ids=request.blocks,
            num_computed_tokens=0,
        )

    def _end(self, name: str) -> None:
        """It is gone from the next step on."""
        self._free += self._live.pop(name).pages
        self._ended.add(name)


def _arena(runner: ModelRunner, longest: int) -> KVCacheConfig:
    """Pages for all rows and the null page."""
    groups = get_kv_cache_groups(runner.vllm_config, runner.get_kv_cache_spec())
    plan = plan_arena(groups, num_pages=1)
    per_request = sum(
        -(-group.kv_cache_spec.blocks_for(longest) // part.blocks_per_page)
        for group, part in zip(groups, plan.groups, strict=True)
    )
    # A request that ends gives its pages to one that comes in the same step.
    pages = 1 + (runner.max_rows + 1) * per_request
    return KVCacheConfig(pages, [], groups, replace(plan, num_pages=pages))
