# SPDX-License-Identifier: Apache-2.0
"""Drafters whose vocabulary two ranks share: they propose what one rank proposes, and tell each
other no more than their best tokens.

The text never shows a wrong draft, so proposals are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import Block, dflash_tensors, write_dflash
from draft_models import TINY, Shape, eagle3_tensors, gen, mtp_tensors, with_mtp, write_eagle3
from parity_checks import MakeEngine, in_this_process, on_cpus, prompts
from tiny_models import tiny_model

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.models import draft_logits
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.sample.vocab_shard import VocabShard
from vllm.v1.spec_decode.drafter import DraftStep
from vllm.v1.spec_decode.layer_drafter import LayerDrafter
from vllm.v1.worker.step_sampler import StepSampler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parity,
    pytest.mark.usefixtures("noting"),
    on_cpus,
    in_this_process,
]

DRAFTS, LENGTHS = 3, (5, 33, 90)
#: a token's score and its id, both fp64
TOLD_BYTES = 16
WHOLE = Shape(**vars(TINY) | {"draft_vocab": TINY.vocab})


@dataclass
class Notes:
    """Of one rank: its drafts by request and number of computed tokens; the bytes that it told
    the other per draft, step by step; and those per row that was sampled or verified."""

    drafts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    draft_bytes: set[float] = field(default_factory=set)
    sample_bytes: set[float] = field(default_factory=set)


@pytest.fixture
def noting(forking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker notes; drafts are verified although these heads are random."""
    monkeypatch.setattr(DraftPolicy, "choose", lambda policy, count: policy.num_drafts)
    gather, propose, sample = GroupCoordinator.all_gather, LayerDrafter.propose, StepSampler.sample
    told = 0

    def counted(group: GroupCoordinator, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        nonlocal told
        told += x.nbytes * (group.world_size - 1)
        return gather(group, x, dim)

    def noted_drafts(drafter: Any, step: DraftStep) -> None:
        before, order = told, step.order
        propose(drafter, step)
        if step.sampled is None or not step.num_drafts:
            return
        notes = drafter.__dict__.setdefault("notes", Notes())
        notes.draft_bytes.add((told - before) / (order.num_reqs * step.num_drafts))
        for state in order.sampled.states:
            computed = int(drafter.progress.computed[state.row])
            key = int(state.req_id.partition("-")[0]), computed
            notes.drafts[key] = drafter.progress.tokens[state.row, 1:].tolist()

    def noted_sample(sampler: Any, order: Any, logits: torch.Tensor, *rest: Any) -> Any:
        before = told
        output = sample(sampler, order, logits, *rest)
        if len(logits):
            notes = sampler.__dict__.setdefault("notes", Notes())
            notes.sample_bytes.add((told - before) / len(logits))
        return output

    monkeypatch.setattr(GroupCoordinator, "all_gather", counted)
    monkeypatch.setattr(LayerDrafter, "propose", noted_drafts)
    monkeypatch.setattr(StepSampler, "sample", noted_sample)


@dataclass
class Run:
    """An engine whose workers note what they do; `accepted`: drafts of its requests."""

    llm: LLM
    accepted: int = 0

    def clear(self) -> None:
        def forget(worker: Any) -> None:
            runner = worker.model_runner
            for one in (runner.drafter, runner.sampler):
                if one is not None:
                    one.__dict__.pop("notes", None)

        self.llm.collective_rpc(forget)

    def tokens(self, **fields: Any) -> list[list[int]]:
        params = [
            SamplingParams(**{"temperature": 0, "max_tokens": 12 + i, "ignore_eos": True} | fields)
            for i in range(len(LENGTHS))
        ]
        batch = [TokensPrompt(prompt_token_ids=ids) for ids in prompts(LENGTHS)]
        outputs = self.llm.generate(batch, params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        self.accepted += sum((one.num_drafts or (0, 0))[0] for one in completions)
        return [list(one.token_ids) for one in completions]

    def notes(self) -> list[Notes]:
        """Of every rank."""

        def get(worker: Any) -> Any:
            runner = worker.model_runner
            return [getattr(one, "notes", None) for one in (runner.drafter, runner.sampler)]

        both = self.llm.collective_rpc(get)
        return [Notes(d.drafts, d.draft_bytes, s.sample_bytes) for d, s in both]


# ---- the methods ---------------------------------------------------------------------------------

Settings = tuple[Path, dict[str, Any]]


def mtp(root: Path) -> Settings:
    return with_mtp(tiny_model("qwen3_5"), root, mtp_tensors(TINY)), {"method": "mtp"}


def eagle3(root: Path, shape: Shape = TINY) -> Settings:
    target, tensors = tiny_model("qwen3_5"), eagle3_tensors(shape, {})
    if shape is WHOLE:
        del tensors["lm_head.weight"]
    path = write_eagle3(root, target, shape, tensors=tensors)
    return target, {"method": "eagle3", "model": str(path)}


def dflash(
    root: Path, shape: Shape = TINY, markov_rank: int = 0, family: str = "llama"
) -> Settings:
    target, block, more = tiny_model(family), Block(size=4), {}
    tensors = dflash_tensors(shape, block)
    if markov_rank:
        more = {"speculators_model_type": "dspark", "markov_rank": markov_rank}
        more |= {"markov_head_type": "vanilla", "enable_confidence_head": False}
        for i, rows in ((1, shape.vocab), (2, shape.draft_vocab)):
            name = f"markov_head.markov_w{i}.weight"
            tensors[name] = gen(name, [rows, markov_rank], 1.0)
    path = write_dflash(root, target, shape, block, tensors=tensors, **more)
    return target, {"method": "dflash", "model": str(path)}


def draft_model(root: Path) -> Settings:
    return tiny_model("llama"), {"method": "draft_model", "model": str(tiny_model("llama"))}


METHODS: dict[str, Callable[[Path], Settings]] = {
    "mtp": mtp,
    "eagle3": eagle3,
    "eagle3, the target's head": lambda root: eagle3(root, WHOLE),
    "dflash": dflash,
    "dflash, the target's head": lambda root: dflash(root, WHOLE, family="qwen3_5"),
    "dspark": lambda root: dflash(root, markov_rank=8),
    "dspark, the target's head": lambda root: dflash(root, WHOLE, markov_rank=8),
    "draft_model": draft_model,
}


def run(make_engine: MakeEngine, settings: Settings, ranks: int, drafts: int = DRAFTS) -> Run:
    target, config = settings
    made = Run(
        make_engine(
            "llama",
            model=str(target),
            tensor_parallel_size=ranks,
            max_num_batched_tokens=64,
            async_scheduling=False,
            speculative_config=config | {"num_speculative_tokens": drafts} if drafts else None,
        )
    )
    made.clear()
    return made


SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "top_k": 40}


@pytest.mark.parametrize("name", METHODS)
def test_ranks_draft_what_one_does(name: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    """And tokens are those without a drafter, greedy and drawn."""
    settings = METHODS[name](tmp_path)
    plain = run(make_engine, settings, 1, drafts=0)
    one, two = (run(make_engine, settings, ranks) for ranks in (1, 2))
    texts = [[each.tokens(), each.tokens(**SEEDED)] for each in (plain, one, two)]
    assert texts[0] == texts[1] == texts[2]
    (whole,), parts = one.notes(), two.notes()
    assert whole.draft_bytes == whole.sample_bytes == {0}
    drafted = {token for drafts in whole.drafts.values() for token in drafts}
    assert len(whole.drafts) > 40 and len(drafted) > 8
    assert len(parts) == 2
    for part in parts:
        assert part.drafts == whole.drafts
        assert part.draft_bytes == {TOLD_BYTES}
        # top-k asks each rank for as many candidates.
        assert part.sample_bytes == {TOLD_BYTES, TOLD_BYTES * (1 + SEEDED["top_k"])}


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_ranks_without_a_token_of_the_drafts(
    name: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Of 120 tokens two of four ranks have 64 and 56."""
    settings = METHODS[name](tmp_path)
    one, four = (run(make_engine, settings, ranks) for ranks in (1, 4))
    assert one.tokens() == four.tokens()
    (whole,), parts = one.notes(), four.notes()
    assert len(whole.drafts) > 20 and len(parts) == 4
    for part in parts:
        assert part.drafts == whole.drafts
        assert part.draft_bytes == part.sample_bytes == {3 * TOLD_BYTES}


class Shifted(VocabShard):
    """Counts its tokens from one too late on."""

    @property
    def first(self) -> int:
        return super().first + self.group.rank_in_group


@pytest.mark.parametrize("name", ["eagle3", "dspark, the target's head", "draft_model"])
def test_a_wrong_offset_is_noticed(
    name: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not by the text: by the drafts, on the very ranks that the test above compares."""
    settings = METHODS[name](tmp_path)
    right = run(make_engine, settings, 2)
    monkeypatch.setattr(draft_logits, "VocabShard", Shifted)
    wrong = run(make_engine, settings, 2)
    assert wrong.tokens(max_tokens=6) == right.tokens(max_tokens=6)
    found, expected = wrong.notes()[0].drafts, right.notes()[0].drafts
    assert any(found[at] != expected[at] for at in found.keys() & expected.keys())


#: bytes that a rank tells per row that is sampled or verified, by what is asked of it
TOLD: list[tuple[dict[str, Any], int]] = [
    ({}, TOLD_BYTES),
    ({"temperature": 1.0, "seed": 3}, TOLD_BYTES),
    ({"presence_penalty": 0.5, "logit_bias": {7: 2.0, 250: 2.0}, "min_tokens": 5}, TOLD_BYTES),
    ({"repetition_penalty": 1.4, "bad_words": ["a", "th", "\u0120"]}, TOLD_BYTES),
    ({"structured_outputs": StructuredOutputsParams(regex="[^z]{9,16}")}, TOLD_BYTES),
    # Candidates, best draws.
    ({"temperature": 1.0, "seed": 3, "min_p": 0.01}, TOLD_BYTES + TOLD_BYTES),
    ({"temperature": 1.0, "seed": 3, "top_k": 9}, 9 * TOLD_BYTES + TOLD_BYTES),
    # The number of ties in between.
    ({"temperature": 1.0, "seed": 3, "top_k": 9, "top_p": 0.9}, 9 * TOLD_BYTES + 8 + TOLD_BYTES),
    # A row of 192 tokens in fp32, the half of a padded vocabulary.
    ({"temperature": 1.0, "seed": 3, "top_p": 0.9}, TOLD_BYTES + 192 * 4),
    # Largest logit, sum and value in fp64, a count, and candidates.
    ({"logprobs": 2}, TOLD_BYTES + 3 * 8 + 8 + 2 * TOLD_BYTES),
]


def test_ranks_verify_what_one_does(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Every row of drafts, whatever is asked for: the tokens of one rank without drafts."""
    settings = draft_model(tmp_path)
    plain, two = run(make_engine, settings, 1, drafts=0), run(make_engine, settings, 2)
    few = {"max_tokens": 9}
    for fields, told_bytes in TOLD:
        two.clear()
        assert two.tokens(**few, **fields) == plain.tokens(**few, **fields), fields
        for notes in two.notes():
            assert notes.sample_bytes == {told_bytes}, fields
    assert two.accepted > 50
