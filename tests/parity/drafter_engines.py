# SPDX-License-Identifier: Apache-2.0
"""Engines whose drafters have layers of their own, and the offline runs that say what they have to
propose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import Block, DFlashReference, dflash_tensors, write_dflash
from draft_models import (
    TINY,
    Eagle3Reference,
    HeadReference,
    MtpReference,
    Shape,
    eagle3_tensors,
    gen,
    mtp_tensors,
    target_streams,
    with_mtp,
    write_eagle3,
)
from parity_checks import MakeEngine
from safetensors.torch import load_file, save_file
from tiny_models import hf_model, hf_reference_logits, make_tiny, tiny_model

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.draft_policy import DraftPolicy

DRAFTS = 3
#: fp32 logits of a target and a head, against transformers and fp64
MARGIN = 2e-3
LAYER_IDS = (1, 2, 3)


@dataclass
class Method:
    """A drafter of a target: the engine's settings and the offline run."""

    target: Path
    config: dict[str, Any]
    reference: HeadReference
    layer_ids: tuple[int, ...] = ()

    def proposals(self, tokens: list[int], after: list[int]) -> dict[int, tuple[list[int], float]]:
        """By number of computed tokens: the drafts, and the smallest distance of a best logit from
        the next."""
        *aux, hidden = target_streams(self.target, tokens, self.layer_ids)
        dtype = self.reference.dtype
        fused = self.reference.fuse(hidden.to(dtype), [x.to(dtype) for x in aux])
        following = torch.tensor(tokens[1:])
        found = self.reference.chains(fused[:-1], following, DRAFTS, after)
        return {n: (drafts, _margin(logits)) for n, (drafts, logits) in found.items()}


@dataclass
class SmallModel:
    """A draft model; offline it is transformers'."""

    target: Path
    config: dict[str, Any]
    draft: Path

    def proposals(self, tokens: list[int], after: list[int]) -> dict[int, tuple[list[int], float]]:
        found = {}
        for computed in after:
            known, logits = tokens[: computed + 1], []
            for _ in range(DRAFTS):
                logits.append(hf_reference_logits(self.draft, known)[-1])
                known = [*known, int(logits[-1].argmax())]
            found[computed] = known[computed + 1 :], _margin(logits)
        return found


def _margin(logits: list[torch.Tensor]) -> float:
    best = torch.stack(logits).topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


#: the drafter of a name, with its target
Methods = Callable[[str], Method | SmallModel]


def make_methods(root: Path) -> Methods:
    """Drafters of tiny targets by name; checkpoints are written under `root`, once each."""
    made: dict[str, Method | SmallModel] = {}

    def mtp() -> Method:
        target = with_mtp(tiny_model("qwen3_5"), root / "mtp", mtp_tensors(TINY))
        model = hf_model(target)
        weights = [m.weight.detach().double() for m in (model.model.embed_tokens, model.lm_head)]
        reference = MtpReference(mtp_tensors(TINY), TINY, *weights, rotary_dim=8, theta=1e7)
        return Method(target, {"method": "mtp"}, reference)

    def eagle3(family: str, window: int | None = None) -> Method:
        target = tiny_model(family)
        flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        layers: dict[str, Any] = {}
        if window is not None:
            layers = {"layer_types": ["sliding_attention"], "sliding_window": window}
            layers["model_type"] = "qwen3"
        tensors = eagle3_tensors(TINY, flags)
        if window is not None:
            names = [f"layers.0.self_attn.{n}_norm.weight" for n in "qk"]
            tensors |= {name: gen(name, [TINY.head_dim], 0.25, 1.0) for name in names}
        path = root / f"eagle3-{family}-{window}"
        draft = write_eagle3(path, target, TINY, flags, tensors=tensors, **layers)
        reference = Eagle3Reference(tensors, TINY, flags, window=window)
        config = {"method": "eagle3", "model": str(draft)}
        return Method(target, config, reference, LAYER_IDS)

    def dflash(family: str, block: Block) -> Method:
        target, tensors = tiny_model(family), dflash_tensors(TINY, block)
        draft = write_dflash(root / f"dflash-{family}", target, TINY, block, layer_ids=LAYER_IDS)
        model = hf_model(target)
        weights = [m.weight.detach().double() for m in (model.model.embed_tokens, model.lm_head)]
        reference = DFlashReference(tensors, TINY, block, *weights)
        return Method(target, {"method": "dflash", "model": str(draft)}, reference, LAYER_IDS)

    def draft_model(family: str, draft: str) -> Method:
        config = {"method": "draft_model", "model": str(tiny_model(draft))}
        return SmallModel(tiny_model(family), config, tiny_model(draft))

    makers: dict[str, Callable[[], Method | SmallModel]] = {
        "mtp": mtp,
        "eagle3": lambda: eagle3("qwen3_5"),
        "eagle3-llama": lambda: eagle3("llama"),
        "eagle3-window": lambda: eagle3("qwen3_sliding", 24),
        # Blocks of one place more than is verified, and of as many.
        "dflash": lambda: dflash("qwen3_5", Block(size=5, windows=(None, 24))),
        "dflash-llama": lambda: dflash("llama", Block(size=4)),
        "draft_model-hybrid": lambda: draft_model("llama", "qwen3_5"),
        "draft_model-hybrid-itself": lambda: draft_model("qwen3_5", "qwen3_5"),
        "draft_model-itself": lambda: draft_model("llama", "llama"),
    }

    def get(name: str) -> Method | SmallModel:
        if name not in made:
            made[name] = makers[name]()
        return made[name]

    return get


@dataclass
class Watched:
    """An engine whose proposals are written down: `(request's tokens so far, drafts)`.

    `told`: a sequence whose tokens become the drafts, whatever was proposed, of requests that begin
    like it; at every fifth position one that is wrong. Heads of random weights are never right.
    """

    llm: LLM
    proposed: list[tuple[str, int, list[int]]] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    told: list[int] | None = None
    #: by request, where its last proposal was made: after its end there are none to check
    _last: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = self.llm.llm_engine.engine_core.engine_core
        (runner,) = self.llm.collective_rpc(lambda worker: worker.model_runner)
        drafter = runner.drafter
        if drafter is None:
            return
        propose, progress = drafter.propose, runner.inputs.progress

        def watched(step: Any) -> None:
            propose(step)
            if not step.num_drafts:
                return
            for state in step.order.sampled.states:
                computed = int(progress.computed[state.row])
                if self._last.get(state.req_id) == computed and progress.ended[state.row] > 0:
                    continue
                self._last[state.req_id] = computed
                drafts = progress.tokens[state.row, 1 : 1 + step.num_drafts].tolist()
                self.proposed.append((state.req_id, computed, drafts))
                if self.told is not None:
                    self._tell(progress, state.row, computed + 1, step.num_drafts)

        drafter.propose = watched

    def _tell(self, progress: Any, row: int, position: int, count: int) -> None:
        assert self.told is not None
        drafts = self.told[position : position + count]
        drafts = [t ^ (n % 5 == 0) for n, t in enumerate(drafts, position)]
        progress.tokens[row, 1 : 1 + len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        progress.num_drafts[row] = len(drafts)

    def generate(
        self,
        token_ids: list[list[int]],
        lengths: list[int],
        grammars: Sequence[StructuredOutputsParams | None] = (),
        **fields: Any,
    ) -> list[Any]:
        given = {"temperature": 0.0, "ignore_eos": True} | fields
        params = [SamplingParams(max_tokens=n, **given) for n in lengths]
        for one, grammar in zip(params, grammars, strict=False):
            one.structured_outputs = grammar
        batch = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
        outputs = self.llm.generate(batch, params, use_tqdm=False)
        for output in outputs:
            for part in output.outputs:
                # Completions of one prompt are requests of their own in the core.
                name = output.request_id if len(output.outputs) == 1 else part.index
                self.outputs[f"{name}"] = [*output.prompt_token_ids, *part.token_ids]
        return outputs

    def texts(self) -> list[list[int]]:
        return list(self.outputs.values())


def engine(
    make_engine: MakeEngine, method: Method | SmallModel, drafts: int, **settings: Any
) -> Watched:
    if drafts:
        settings["speculative_config"] = method.config | {"num_speculative_tokens": drafts}
    defaults = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "enable_prefix_caching": True}
    return Watched(make_engine("qwen3_5", **(defaults | {"model": str(method.target)} | settings)))


def check_proposals(run: Watched, method: Method | SmallModel) -> float:
    """Every proposal is the offline run's; the part of them that two close logits leave open."""
    compared = seen = 0
    for name, tokens in run.outputs.items():
        mine = [
            (n, drafts)
            for request, n, drafts in run.proposed
            if request.rpartition("-")[0] == name and n < len(tokens)
        ]
        expected = method.proposals(tokens, sorted({n for n, _ in mine})) if mine else {}
        for computed, drafts in mine:
            offline, margin = expected[computed]
            seen += 1
            if margin > MARGIN:
                assert drafts == offline[: len(drafts)], f"request {name} after {computed} tokens"
                compared += 1
    assert seen > 8
    return 1 - compared / seen


def always(policy: DraftPolicy, count: int) -> int:
    """These heads are random: what they draft is hardly ever accepted, which never pays."""
    return policy.num_drafts


@dataclass
class Changes:
    """In place of `DraftPolicy.choose`: numbers of its ladder at random, another after one to three
    steps, of the changes that there are those before the others that were made less often. `made`:
    how often two numbers followed each other."""

    seed: int = 0
    made: Counter[tuple[int, int]] = field(default_factory=Counter)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Changes:
        source, left, drafts = random.Random(self.seed), 0, 0

        def choose(policy: DraftPolicy, count: int) -> int:
            nonlocal left, drafts
            if not left:
                before, left = drafts, source.randint(1, 3)
                others = [k for k in policy.ladder if k != before]
                drafts = min(others, key=lambda k: (self.made[before, k], source.random()))
                self.made[before, drafts] += 1
            left -= 1
            return drafts

        monkeypatch.setattr(DraftPolicy, "choose", choose)
        return self


def nearly_a_bigram_model(root: Path) -> Path:
    """A target whose tokens follow mostly from the one before, and a head that knows it."""
    sizes = {"vocab_size": 256, "head_dim": 16, "intermediate_size": 128}
    heads = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    ends = {"eos_token_id": 2, "pad_token_id": 3}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    path = make_tiny("qwen3_5", root / "plain", rope_parameters=rope, **sizes, **heads, **ends)
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        amp = 0.25 if tensor.dim() == 1 else 0.2
        if name.endswith("embed_tokens.weight"):
            amp = 1.0
        elif any(part in name for part in ("A_log", "dt_bias", "conv1d")):
            amp = 0.5
        elif any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            amp = 0.02
        center = 1.0 if "linear_attn.norm" in name else 0.0
        tensors[name] = gen(name, tensor.shape, amp, center).float()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    head = mtp_tensors(Shape())
    for name in head:
        if "o_proj" in name or "down_proj" in name:
            head[name] = gen(name, head[name].shape, 0.02)
    head["mtp.fc.weight"] = torch.eye(64, 128).double() + gen("mtp.fc.noise", [64, 128], 0.02)
    head["mtp.norm.weight"] = tensors["model.norm.weight"].double()
    return with_mtp(path, root / "drafting", head)
