# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers of their own: the text is that without them, and what they propose is what
an offline run over the whole sequence proposes, however its prefix came to be in memory.

The second is what notices a drafter with another context than its own: the text never shows it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_scenarios import a_conversation
from drafter_engines import (
    DRAFTS,
    Methods,
    Watched,
    always,
    check_proposals,
    engine,
    nearly_a_bigram_model,
)
from parity_checks import MakeEngine, in_this_process, prompts

from vllm import SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.model_executor.models.draft_head import DraftHead
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.draft_policy import LEAST_BYTES, DraftPolicy, step_cost
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.graph_set import GraphSet, Prepare
from vllm.v1.worker.step_graphs import Replay, StepGraphs
from vllm.v1.worker.step_inputs import StepInputs

pytestmark = [pytest.mark.slow, pytest.mark.parity, in_this_process]


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
    """Rules on the output, which the drafts before a token belong to, and grammars beside them."""
    batch = prompts((20, 30, 9))
    grammars = [StructuredOutputsParams(regex="[a-d]{4,12}-[é-ö]{2,9}"), None]
    run.generate(batch[:2], [20, 16], grammars)
    run.generate(batch[:2], [16, 12], presence_penalty=0.7, min_tokens=4)
    run.generate(batch, [24, 3, 18])


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
    "draft_model-itself": (a_conversation, aborts, rules),
}


@pytest.mark.parametrize(
    ("name", "scenario"),
    [(name, scenario) for name, scenarios in CASES.items() for scenario in scenarios],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_text_and_proposals(
    name: str,
    scenario: Callable[[Watched], None],
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftPolicy, "choose", always)
    method = methods(name)
    plain, drafted = engine(make_engine, method, 0), engine(make_engine, method, DRAFTS)
    scenario(plain)
    scenario(drafted)
    assert drafted.texts() == plain.texts()
    assert check_proposals(drafted, method) < 0.2


def test_every_use_of_state_is_checked(
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every use of state memory checked, too: what is read was written, by its owner."""
    monkeypatch.setattr(DraftPolicy, "choose", always)
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
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They start from copies of its state, the head's last block among them."""
    monkeypatch.setattr(DraftPolicy, "choose", always)
    method = methods(name)
    (prompt,) = prompts((65,))
    texts = []
    for drafts in (0, DRAFTS):
        run = engine(make_engine, method, drafts)
        run.generate([prompt], [20], n=3, temperature=1.0, seed=7)
        texts.append(run.texts())
    assert texts[0] == texts[1]


def test_acceptance_after_a_hit_is_acceptance_cold(
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that drafts for itself has all its drafts accepted, hit or not."""
    monkeypatch.setattr(DraftPolicy, "choose", always)
    run = engine(make_engine, methods("draft_model-itself"), DRAFTS, async_scheduling=False)
    (prompt,) = prompts((150,))
    steps = []
    for _ in range(2):
        before = len(run.proposed)
        (output,) = run.generate([prompt], [1 + 4 * 5])
        steps.append(len(run.proposed) - before)
    assert output.num_cached_tokens == 144
    assert steps[0] == steps[1] == 1 + 5


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("mtp", [0, 1, 2, 3]),
        ("eagle3-llama", [0, 1, 2, 3]),
        ("draft_model-itself", [0, 1, 2, 3]),
        ("dflash-llama", [0, 1, 1, 1]),
    ],
)
def test_the_policy_is_told_what_drafting_reads(
    name: str, passes: list[int], methods: Methods, make_engine: MakeEngine
) -> None:
    run = engine(make_engine, methods(name), DRAFTS)
    (runner,) = run.llm.collective_rpc(lambda worker: worker.model_runner)
    read, policy = runner.weights_read(), run.core.scheduler.draft_policy
    once = read.drafter[1]
    assert once > 0 and read.drafter == tuple(once * count for count in passes)
    assert read.target < LEAST_BYTES
    for drafts, count in enumerate(passes):
        reading = policy.slowdown(1, drafts) * step_cost(1) - step_cost(1 + drafts)
        assert reading == pytest.approx(count * once / LEAST_BYTES)


def test_hits_beside_a_drafter_of_blocks(
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its layers keep follows from the tokens so far: no hit ends earlier."""
    monkeypatch.setattr(DraftPolicy, "choose", always)
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
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(DraftPolicy, "choose", always)
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


def test_a_known_trace_of_acceptance(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(DraftPolicy, "choose", always)
    run = Watched(
        make_engine(
            "qwen3_5",
            model=str(nearly_a_bigram_model(tmp_path)),
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
    """Pads decodes to a size of the plan, as whole graphs do; a "replay" runs the model."""

    def __init__(self, runner: Any, plan: GraphPlan) -> None:
        super().__init__()
        self._runner, self._plan = runner, plan

    def replay_for(self, shape: StepShape) -> Replay | None:
        if not shape.decode_only:
            return None
        sizes = self._plan.decode_sizes_of(shape.width)
        size = next(size for size in sizes if size >= shape.num_reqs)
        return Replay(size, True, shape.width)

    def replay(self, chosen: Replay) -> torch.Tensor:
        hidden = self._runner._forward(self._runner.last_inputs)
        assert len(hidden) == chosen.num_tokens
        return self._runner.compute_logits(hidden)


@pytest.mark.parametrize("name", ["mtp", "eagle3", "dflash", "draft_model-hybrid"])
def test_replays_draft_the_same(
    name: str,
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes padded to a captured size, by what was made before any of them was known."""
    method, sizes = methods(name), [2, 3, 6]
    counts = itertools.cycle([DRAFTS] * 5 + [0] * 3 + [1] * 4)
    monkeypatch.setattr(DraftPolicy, "choose", lambda policy, count: next(counts))
    drafted = engine(make_engine, method, DRAFTS)
    (runner,) = drafted.llm.collective_rpc(lambda worker: worker.model_runner)
    plan = GraphPlan(sizes, [], widths=runner.widths)
    sets = runner.drafter.graph_sets(plan, Reruns)
    runner.graphs = WholeSteps(runner, plan)
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
    assert len(sets) == (2 if name == "dflash" else 3)
    assert all(graphs.replayed > 3 for graphs in sets)


# ---- the comparison notices ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mtp", "eagle3-llama"])
def test_a_row_of_another_request_is_noticed(
    name: str,
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the token after it, a block's name does not say whose last row it holds."""
    monkeypatch.setattr(DraftPolicy, "choose", always)
    monkeypatch.setattr(DraftHead, "mark_cache", lambda head: None)
    method = methods(name)
    drafted = engine(make_engine, method, DRAFTS)
    shared_beginnings(drafted)
    with pytest.raises(AssertionError, match="after .* tokens"):
        check_proposals(drafted, method)
