# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers of their own: the text is that without them, and what they propose is what
an offline run over the whole sequence proposes, however its prefix came to be in memory.

The second is what notices a drafter with another context than its own: the text never shows it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
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
from draft_scenarios import a_conversation
from parity_checks import MakeEngine, in_this_process, prompts
from safetensors.torch import load_file, save_file
from tiny_models import hf_model, hf_reference_logits, make_tiny, tiny_model

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.model_executor.models.draft_head import DraftHead
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.graph_set import GraphSet, Prepare
from vllm.v1.worker.step_graphs import Replay, StepGraphs
from vllm.v1.worker.step_inputs import StepInputs

pytestmark = [pytest.mark.parity, in_this_process]

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


@pytest.fixture(scope="session")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Method | SmallModel]:
    root = tmp_path_factory.mktemp("drafters")
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
    """An engine whose proposals are written down: `(request's tokens so far, drafts)`."""

    llm: LLM
    proposed: list[tuple[str, int, list[int]]] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)

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
                drafts = progress.tokens[state.row, 1:].tolist()
                self.proposed.append((state.req_id, computed, drafts))

        drafter.propose = watched

    def generate(self, token_ids: list[list[int]], lengths: list[int], **fields: Any) -> list[Any]:
        params = [
            SamplingParams(max_tokens=n, **({"temperature": 0.0, "ignore_eos": True} | fields))
            for n in lengths
        ]
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


# ---- what happens to requests --------------------------------------------------------------------


def batches(run: Watched) -> None:
    """More requests than rows, prompts in chunks beside decodes."""
    lengths = (3, 17, 1, 140, 70, 5, 200, 33, 2, 64)
    run.generate(prompts(lengths), [5 + 3 * i for i in range(len(lengths))])


def shared_beginnings(run: Watched) -> None:
    """Prompts that part at every place of a block and at its edges, some of them marked."""
    (stem,) = prompts((96,))
    rng = random.Random(1)
    for cut in (96, 95, 80, 81, 79, 64, 65, 63, 48):
        tail = [rng.randrange(256) for _ in range(9)]
        run.generate([stem[:cut] + tail], [9])
    run.generate([stem + [1, 2], stem + [3, 4], stem[:80] + [5, 6]], [8, 9, 10])


def preemptions(run: Watched) -> None:
    """Running requests lose their rows and come back."""
    scheduler = run.core.scheduler
    schedule, steps = scheduler.schedule, 0

    def schedule_and_preempt() -> Any:
        nonlocal steps
        steps += 1
        if steps in (6, 9, 10):
            while scheduler.running:
                scheduler._preempt_last()
        return schedule()

    scheduler.schedule = schedule_and_preempt
    run.generate(prompts((30, 47)), [24, 30])
    assert steps > 10


def aborts(run: Watched) -> None:
    """Others leave at random; their rows and blocks are used again."""
    engine = run.llm.llm_engine
    for i, ids in enumerate(prompts((12, 50, 31), seed=5)):
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        engine.add_request(f"abandoned-{i}", TokensPrompt(prompt_token_ids=ids), params)
        for _ in range(4 + i):
            engine.step()
        engine.abort_request([f"abandoned-{i}"])
    run.generate(prompts((25, 64)), [20, 22])


def rules(run: Watched) -> None:
    """Beside requests whose rules allow no drafts, in steps of one token and of several."""
    batch = prompts((20, 30, 9))
    run.generate(batch[:2], [16, 12], presence_penalty=0.7, min_tokens=4)
    run.generate(batch, [24, 3, 18])


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
                assert drafts == offline, f"request {name} after {computed} tokens"
                compared += 1
    assert seen > 8
    return 1 - compared / seen


def _always(policy: DraftPolicy, decodes: list[Any]) -> int:
    """These heads are random: what they draft is hardly ever accepted, which never pays."""
    return policy.num_drafts


#: which of them for each kind of drafter and target
CASES = {
    "mtp": (batches, a_conversation, shared_beginnings, preemptions, aborts, rules),
    "eagle3": (batches, shared_beginnings),
    "eagle3-llama": (shared_beginnings, preemptions),
    "eagle3-window": (a_conversation,),
    "dflash": (shared_beginnings, preemptions),
    "dflash-llama": (a_conversation, aborts),
    "draft_model-hybrid": (preemptions,),
    "draft_model-hybrid-itself": (a_conversation, aborts),
    "draft_model-itself": (a_conversation, aborts),
}


@pytest.mark.parametrize(
    ("name", "scenario"),
    [(name, scenario) for name, scenarios in CASES.items() for scenario in scenarios],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_text_and_proposals(
    name: str,
    scenario: Callable[[Watched], None],
    methods: Callable[[str], Method | SmallModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftPolicy, "choose", _always)
    method = methods(name)
    plain, drafted = engine(make_engine, method, 0), engine(make_engine, method, DRAFTS)
    scenario(plain)
    scenario(drafted)
    assert drafted.texts() == plain.texts()
    assert check_proposals(drafted, method) < 0.2


def test_every_use_of_state_is_checked(
    methods: Callable[[str], Method | SmallModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every use of state memory checked, too: what is read was written, by its owner."""
    monkeypatch.setattr(DraftPolicy, "choose", _always)
    method = methods("eagle3")
    settings: dict[str, Any] = {"sanitize": True, "async_scheduling": False}
    plain, drafted = engine(make_engine, method, 0), engine(make_engine, method, DRAFTS, **settings)
    for run in (plain, drafted):
        shared_beginnings(run)
    assert drafted.texts() == plain.texts()
    assert check_proposals(drafted, method) < 0.2


@pytest.mark.parametrize("name", ["mtp", "dflash"])
def test_completions_of_one_prompt(
    name: str,
    methods: Callable[[str], Method | SmallModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They start from copies of its state, the head's last block among them."""
    monkeypatch.setattr(DraftPolicy, "choose", _always)
    method = methods(name)
    (prompt,) = prompts((65,))
    texts = []
    for drafts in (0, DRAFTS):
        run = engine(make_engine, method, drafts)
        run.generate([prompt], [20], n=3, temperature=1.0, seed=7)
        texts.append(run.texts())
    assert texts[0] == texts[1]


def test_acceptance_after_a_hit_is_acceptance_cold(
    methods: Callable[[str], Method | SmallModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that drafts for itself has all its drafts accepted, hit or not."""
    monkeypatch.setattr(DraftPolicy, "choose", _always)
    run = engine(make_engine, methods("draft_model-itself"), DRAFTS, async_scheduling=False)
    (prompt,) = prompts((150,))
    steps = []
    for _ in range(2):
        before = len(run.proposed)
        (output,) = run.generate([prompt], [1 + 4 * 5])
        steps.append(len(run.proposed) - before)
    assert output.num_cached_tokens == 144
    assert steps[0] == steps[1] == 1 + 5


def test_hits_beside_a_drafter_of_blocks(
    methods: Callable[[str], Method | SmallModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its layers keep follows from the tokens so far: no hit ends earlier."""
    monkeypatch.setattr(DraftPolicy, "choose", _always)
    method = methods("dflash-llama")
    (stem,) = prompts((96,))
    hits = []
    for drafts in (0, DRAFTS):
        run = engine(make_engine, method, drafts)
        run.generate([stem], [3])
        outputs = run.generate([stem[:64] + [7] * 9, stem[:41] + [8], stem], [2, 2, 2])
        hits.append([output.num_cached_tokens for output in outputs])
    assert hits[0] == hits[1] and hits[0][:2] == [64, 32]


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
def test_hidden_states_beside_a_head(
    name: str,
    methods: Callable[[str], Method | SmallModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(DraftPolicy, "choose", _always)
    method, rows = methods(name), []
    for drafter in (None, method.config | {"num_speculative_tokens": DRAFTS}):
        where = str(tmp_path / str(drafter is None))
        run = engine(
            make_engine,
            method,
            0,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 4]}},
                "drafter": drafter,
            },
            kv_transfer_config={
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": where},
            },
        )
        extra = {"kv_transfer_params": {"include_output_tokens": True}}
        outputs = run.generate(prompts((20, 130)), [17, 9], extra_args=extra)
        paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
        rows.append([load_hidden_states(path) for path in paths])
    assert len(run.proposed) > 8
    for plain, drafted in zip(*rows, strict=True):
        assert torch.equal(plain["token_ids"], drafted["token_ids"])
        torch.testing.assert_close(
            plain["hidden_states"], drafted["hidden_states"], rtol=0, atol=1e-4
        )


#: how many drafts each step accepts, by an independent implementation of target and head
KNOWN_TRACE = [1, 0, 1, 1, 0, 1, 1, 0, 2, 3, 0, 3, 2, 0, 1, 1, 0, 2, 3, 0, 3, 2]


def _nearly_a_bigram_model(root: Path) -> Path:
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


def test_a_known_trace_of_acceptance(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(DraftPolicy, "choose", _always)
    run = Watched(
        make_engine(
            "qwen3_5",
            model=str(_nearly_a_bigram_model(tmp_path)),
            speculative_config={"method": "mtp", "num_speculative_tokens": DRAFTS},
            async_scheduling=False,
        )
    )
    prompt = [(37 * i * i + 11 * i + 5) % 256 for i in range(12)]
    (output,) = run.generate([prompt], [60])
    known = [175, 163, 42, 93, 244, 139, 233, 107, 141, 225, 139, 233, 107, 51, 23, 120]
    assert list(output.outputs[0].token_ids)[:16] == known
    computed = [count for _, count, _ in run.proposed]
    accepted = [after - before - 1 for before, after in itertools.pairwise(computed)]
    assert accepted[: len(KNOWN_TRACE)] == KNOWN_TRACE


# ---- as graphs run it ----------------------------------------------------------------------------


class Reruns(GraphSet):
    """A "graph" runs its padded step again: it reads no more than a captured one could."""

    def __init__(self, sizes: list[int], prepare: Prepare) -> None:
        self.sizes, self.replayed = sizes, 0
        self._runs = {size: prepare(size) for size in sizes}

    def replay(self, size: int) -> torch.Tensor:
        self.replayed += 1
        return self._runs[size]()


class WholeSteps(StepGraphs):
    """Pads decodes to one of `sizes`, as whole graphs do; a "replay" runs the model."""

    def __init__(self, runner: Any, sizes: list[int]) -> None:
        super().__init__()
        self._runner, self._sizes = runner, sizes

    def replay_for(self, shape: StepShape) -> Replay | None:
        if not shape.decode_only:
            return None
        size = next(size for size in self._sizes if size >= shape.num_reqs)
        return Replay(size, True, shape.width)

    def replay(self, chosen: Replay) -> torch.Tensor:
        hidden = self._runner._forward(self._runner.last_inputs)
        assert len(hidden) == chosen.num_tokens
        return self._runner.compute_logits(hidden)


@pytest.mark.parametrize("name", ["mtp", "eagle3", "dflash", "draft_model-hybrid"])
def test_replays_draft_the_same(
    name: str,
    methods: Callable[[str], Method | SmallModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes padded to a captured size, by what was made before any of them was known."""
    method, sizes = methods(name), [2, 3, 6]
    counts = itertools.cycle([DRAFTS] * 5 + [0] * 3)
    monkeypatch.setattr(DraftPolicy, "choose", lambda policy, decodes: next(counts))
    drafted = engine(make_engine, method, DRAFTS)
    (runner,) = drafted.llm.collective_rpc(lambda worker: worker.model_runner)
    plan = GraphPlan(sizes, [], widths=(1, 1 + DRAFTS))
    sets = runner.drafter.graph_sets(plan, Reruns)
    runner.graphs = WholeSteps(runner, sizes)
    build, of_step = runner.inputs.build, runner.metadata.of_step

    def remember(*args: Any, **kwargs: Any) -> StepInputs:
        runner.last_inputs = build(*args, **kwargs)
        return runner.last_inputs

    monkeypatch.setattr(runner.inputs, "build", remember)
    monkeypatch.setattr(runner.metadata, "of_step", lambda o, inputs, only: of_step(o, inputs))
    lengths = (3, 17, 40, 5, 33, 64, 1)
    plain = engine(make_engine, method, 0)
    for run in (drafted, plain):
        run.generate(prompts(lengths), [6 + 3 * i for i in range(len(lengths))])
    assert drafted.texts() == plain.texts()
    assert check_proposals(drafted, method) < 0.2
    # What dflash keeps is written within the target's pass.
    assert len(sets) == (1 if name == "dflash" else 2)
    assert all(graphs.replayed > 3 for graphs in sets)


# ---- the comparison notices ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mtp", "eagle3-llama"])
def test_a_row_of_another_request_is_noticed(
    name: str,
    methods: Callable[[str], Method | SmallModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the token after it, a block's name does not say whose last row it holds."""
    monkeypatch.setattr(DraftPolicy, "choose", _always)
    monkeypatch.setattr(DraftHead, "mark_cache", lambda head: None)
    method = methods(name)
    drafted = engine(make_engine, method, DRAFTS)
    shared_beginnings(drafted)
    with pytest.raises(AssertionError, match="after .* tokens"):
        check_proposals(drafted, method)
