# SPDX-License-Identifier: Apache-2.0
"""Replicas that share experts give the tokens of one engine, whatever each of them has to do."""

from __future__ import annotations

import collections
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_replicas import FAMILY, Traffic, forked_replicas
from parity_checks import assert_equals_reference, generate, on_cpus, prompts
from safetensors.torch import load_file, save_file
from tiny_models import hf_reference_logits, make_tiny, tiny_model

from tests.extraction_options import extraction
from tests.nightly import nightly
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.moe import mixtures_of
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.reader import Counter
from vllm.v1.worker.async_output import StepOutput
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import Replay, StepGraphs
from vllm.v1.worker.step_inputs import StepInputs
from vllm.v1.worker.worker import Worker

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    on_cpus,
]

NGRAM = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
}
#: a routed and a shared expert in one layer or apart, latent experts, biases, experts by token
FAMILIES = ("mixtral", FAMILY, "nemotron_h_moe", "gpt_oss", "deepseek_v4")


step_of_padding = ModelRunner._step_of_padding
#: those of this process
counted = [0]


def count_and_step(runner: ModelRunner, *args: Any) -> StepOutput:
    counted[0] += 1
    return step_of_padding(runner, *args)


@pytest.fixture
def engine() -> Iterator[Callable[..., LLM]]:
    with forked_replicas() as make:
        yield make


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    """Its processes count their steps of padding."""
    with pytest.MonkeyPatch.context() as patch, forked_replicas() as make:
        patch.setattr(ModelRunner, "_step_of_padding", count_and_step)
        yield make(enable_prefix_caching=True, enable_sleep_mode=True)


def counter(llm: LLM, name: str) -> int:
    """Of all replicas."""
    found = [one for one in llm.get_metrics() if isinstance(one, Counter) and one.name == name]
    return sum(one.value for one in found)


def padding_steps(_: Worker) -> int:
    return sys.modules[__name__].counted[0]


def expert_counts(worker: Worker) -> list[int]:
    return [len(one.experts.gate_up_proj) for one in mixtures_of(worker.model_runner.model)]


@pytest.mark.parametrize("family", [*FAMILIES[:2], *nightly(*FAMILIES[2:])])
def test_greedy_text_equals_transformers(family: str, engine: Callable[..., LLM]) -> None:
    """Chunked prefills and decodes of all lengths, on both replicas and then on one alone."""
    llm = engine(family)
    for output in generate(llm, prompts((1, 17, 63, 300, 5, 90)), 24):
        assert_equals_reference(output, tiny_model(family), 24)
    alone = Traffic(llm)
    alone.add(1, prompts((70,))[0], 12)
    alone.run()
    alone.check(family)


def test_each_rank_has_a_part_of_the_experts(pair: LLM) -> None:
    first, second = pair.collective_rpc(expert_counts)
    total = pair.llm_engine.vllm_config.model_config.hf_config.num_experts
    assert all(a + b == total and abs(a - b) <= 1 for a, b in zip(first, second, strict=True))


def test_a_replica_without_requests_steps_only_for_others(pair: LLM) -> None:
    before = pair.collective_rpc(padding_steps)
    traffic = Traffic(pair)
    traffic.add(0, prompts((150,), seed=1)[0], 10)
    traffic.run()
    traffic.check()
    first, second = pair.collective_rpc(padding_steps)
    # Three pieces of the prompt, nine decodes, and at most one of a token that is dropped.
    assert first == before[0] and 12 <= second - before[1] <= 13
    time.sleep(0.5)
    assert pair.collective_rpc(padding_steps) == [first, second]


def test_arrivals_aborts_and_prefixes(pair: LLM) -> None:
    """Requests come and go while others run; a turn later both replicas have their prefixes."""
    traffic = Traffic(pair)
    asked = prompts((40, 3, 130, 64, 9, 200), seed=2)
    traffic.add(0, asked[0], 30)
    traffic.run(3)
    traffic.add(1, asked[1], 5)
    gone = traffic.add(1, asked[2], 40)
    traffic.run(6)
    traffic.abort(gone)
    traffic.add(0, asked[3], 17)
    traffic.run(4)
    traffic.add(1, asked[5], 9)
    traffic.run()
    traffic.check()
    turn = Traffic(pair)
    for rank, prompt in ((0, asked[3]), (1, asked[5])):
        turn.add(rank, [*prompt, *asked[4]], 12)
    turn.run()
    turn.check()
    assert all((one.num_cached_tokens or 0) > 0 for one in turn.outputs.values())


def test_new_weights_while_requests_run(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """One replica hears of them later than the other: still every token is that of the old weights
    or, from one on, of the new ones."""
    old, new = tiny_model(FAMILY), tmp_path / "new"
    shutil.copytree(old, new)
    tensors = load_file(old / "model.safetensors")
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name] * 0.7
    llm = engine(model=str(shutil.copytree(old, tmp_path / "served")))
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(new / "model.safetensors", tmp_path / "served" / "model.safetensors.new")
    os.replace(
        tmp_path / "served" / "model.safetensors.new", tmp_path / "served" / "model.safetensors"
    )
    traffic, length = Traffic(llm), 300
    names = [traffic.add(i % 2, ids, length) for i, ids in enumerate(prompts((60, 20, 150, 7)))]
    traffic.run(20)
    call = ("collective_rpc", "reload_weights", None, (), None)
    answers = []
    for link in llm.llm_engine.engine_core.links:
        answers.append(link.call(*call))
        time.sleep(0.1)
    assert [answer.result() for answer in answers] == [[None], [None]]
    traffic.run()
    for name in names:
        output = traffic.outputs[name]
        explained = [chosen_by(model, output) for model in (old, new)]
        first_new = explained[0].index(False)
        assert 0 < first_new < length - 5 and all(explained[1][first_new:])


def test_new_weights_beside_a_connector(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """The steps of padding that a replica takes until the other one hears of them, too, are none of
    its scheduler's, and no connector acts in them."""
    llm = engine(**extraction(tmp_path, [0, 2, 4]))
    traffic = Traffic(llm)
    names = [traffic.add(0, ids, 40) for ids in prompts((60, 20))]
    traffic.run(10)
    call = ("collective_rpc", "reload_weights", None, (), None)
    first, second = llm.llm_engine.engine_core.links
    early = second.call(*call)
    traffic.run(5)
    assert not early.done()
    assert first.call(*call).result() == early.result() == [None]
    names.append(traffic.add(1, prompts((30,))[0], 3))
    traffic.run()
    traffic.check()
    for name in names:
        output = traffic.outputs[name]
        assert output.kv_transfer_params is not None
        stored = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
        assert stored["token_ids"].tolist() == output.prompt_token_ids


def chosen_by(model: Path, output: RequestOutput) -> list[bool]:
    """Of each token, whether it is the model's choice with its probability."""
    prompt, (one,) = list(output.prompt_token_ids or []), output.outputs
    tokens = list(one.token_ids)
    logits = hf_reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    logprobs = logits.log_softmax(-1)
    return [
        int(row.argmax()) == token and abs(entry[token].logprob - float(row[token])) < 1e-4
        for row, token, entry in zip(logprobs, tokens, one.logprobs or [], strict=True)
    ]


class Replays(StepGraphs):
    """In the place of graphs: pads steps as captures do, and runs the model for a replay."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.runner, self.chosen = runner, collections.Counter[bool]()
        self._build, of_step = runner.inputs.build, runner.metadata.of_step
        vars(runner.inputs)["build"] = self.build
        # What runs inside a whole graph has its metadata in there.
        vars(runner.metadata)["of_step"] = lambda order, inputs, only: of_step(order, inputs)

    def build(self, *args: Any, **kwargs: Any) -> StepInputs:
        self.inputs = self._build(*args, **kwargs)
        return self.inputs

    def replay_for(self, shape: StepShape) -> Replay:
        whole = shape.decode_only
        size = shape.num_reqs if whole else shape.num_tokens
        return Replay(-(-size // 4) * 4, whole, shape.width)

    def replay(self, chosen: Replay) -> torch.Tensor:
        self.chosen[chosen.whole] += 1
        rows = get_forward_context().exchange_rows
        assert rows == len(self.inputs.input_ids) == chosen.num_tokens
        hidden = self.runner._forward(self.inputs)
        return self.runner.step_logits(hidden) if chosen.whole else hidden


def replay_steps(worker: Worker) -> None:
    worker.model_runner.graphs = Replays(worker.model_runner)


def replayed(worker: Worker) -> tuple[int, int]:
    graphs = worker.model_runner.graphs
    assert isinstance(graphs, Replays)
    return graphs.chosen[False], graphs.chosen[True]


@pytest.mark.parametrize("options", [{}, NGRAM], ids=["plain", "ngram"])
def test_all_replay_the_same_graphs(options: dict[str, Any], engine: Callable[..., LLM]) -> None:
    """Decodes beside another replica's prefill, and a replica without any token."""
    llm = engine(**options)
    llm.collective_rpc(replay_steps)
    traffic, asked = Traffic(llm), prompts((40, 3, 130, 64, 9), seed=6)
    for ids in asked[:2]:
        traffic.add(0, ids, 30)
    traffic.run(6)
    for ids in asked[2:]:
        traffic.add(1, ids, 9)
    traffic.run()
    traffic.check()
    first, second = llm.collective_rpc(replayed)
    assert first == second and first[0] >= 4 and first[1] >= 20


def test_sleep_and_wake_up(pair: LLM) -> None:
    pair.sleep(level=1)
    pair.wake_up()
    for output in generate(pair, prompts((30, 4), seed=4), 8):
        assert_equals_reference(output, tiny_model(FAMILY), 8)


def test_drafts(engine: Callable[..., LLM]) -> None:
    """Steps of one replica are widened by another one's drafts, some of which hold."""
    replay = {"method": "replay", "num_speculative_tokens": 3, "acceptance": 0.7}
    llm = engine(speculative_config=replay, disable_log_stats=False)
    asked = prompts((90, 20, 5, 64, 17, 33), seed=7)
    plain = generate(llm, asked, 40)
    traffic = Traffic(llm)
    for i, (ids, output) in enumerate(zip(asked, plain, strict=True)):
        drafts = list(output.outputs[0].token_ids) if i != 2 else None
        traffic.add(i % 2, ids, 40, drafts)
        traffic.run(3)
    traffic.run()
    traffic.check()
    assert counter(llm, "vllm:spec_decode_num_accepted_tokens") > 0


def test_a_drafter_with_experts_is_refused(engine: Callable[..., LLM]) -> None:
    draft = {"method": "draft_model", "model": str(tiny_model("mixtral"))}
    with pytest.raises(ValueError, match="the drafter has experts, too"):
        engine("mixtral", speculative_config={**draft, "num_speculative_tokens": 2})


def test_preemption(engine: Callable[..., LLM]) -> None:
    """Each replica begins four requests, and has room for two of them when they end."""
    memory = 9 * 2**15
    llm = engine(
        "mixtral", max_model_len=256, kv_cache_memory_bytes=memory, disable_log_stats=False
    )
    for output in generate(llm, prompts((20, 25, 30, 35, 40, 45, 22, 28), seed=5), 120):
        assert_equals_reference(output, tiny_model("mixtral"), 120)
    assert counter(llm, "vllm:num_preemptions") > 0


def test_two_workers_per_replica(engine: Callable[..., LLM]) -> None:
    """The death of one ends all."""
    llm = engine(tensor_parallel_size=2)
    for output in generate(llm, prompts((17, 300, 2)), 24):
        assert_equals_reference(output, tiny_model(FAMILY), 24)
    total = llm.llm_engine.vllm_config.model_config.hf_config.num_experts
    counts = llm.collective_rpc(expert_counts)
    assert {sum(layer) for layer in zip(*counts, strict=True)} == {total}
    traffic = Traffic(llm)
    traffic.add(0, prompts((40,))[0], 400)
    traffic.run(5)
    os.kill(llm.collective_rpc(lambda worker: os.getpid())[3], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"replica 1( ended|.*rank 1 died)"):
        traffic.run()


def test_captured_rows_are_those_of_one_engine(engine: Callable[..., LLM], tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in prompts((5, 90, 33))]
    found = []
    for replicas in (1, 2):
        storage = tmp_path / str(replicas)
        llm = engine(data_parallel_size=replicas, **extraction(storage, [0, 2, 4]))
        outputs = llm.generate(batch, params, use_tqdm=False)
        paths = [(one.kv_transfer_params or {})["hidden_states_path"] for one in outputs]
        found.append([load_hidden_states(path) for path in paths])
        assert len(list(storage.glob("*.safetensors"))) == len(batch)
    for whole, shared in zip(*found, strict=True):
        assert torch.equal(whole["token_ids"], shared["token_ids"])
        difference = (whole["hidden_states"] - shared["hidden_states"]).abs().max()
        assert float(difference) < 1e-5 * float(whole["hidden_states"].std())


def test_a_model_without_experts_is_refused(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """One whose config states some, so that only its layers tell."""
    dense = make_tiny("deepseek_v2", tmp_path, first_k_dense_replace=9)
    with pytest.raises(ValueError, match="enable-expert-parallel: the model has no experts"):
        engine("deepseek_v2", model=str(dense))
