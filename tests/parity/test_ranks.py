# SPDX-License-Identifier: Apache-2.0
"""Engines whose layers are shared by two or four processes.

`VLLM_TEST_LAYOUT=tp2 pytest tests/parity` runs the other tests of this folder like that, too; these
are the ones that run always, and those about ranks.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import TINY, mtp_tensors, with_mtp
from parity_checks import (
    MakeEngine,
    assert_equals_reference,
    assert_ranks_extract_alike,
    generate,
    on_cpus,
    prompts,
)
from tiny_models import make_tiny, tiny_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.nightly import nightly
from tests.tiny_configs import CONFIGS
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config.speculative import DRAFTS_KEY
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import StructuredOutputsParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parity,
    pytest.mark.usefixtures("forking"),
    on_cpus,
]

MIXTURES = ("mixtral", "qwen3_next", "qwen3_5_moe", "kimi_linear")
HYBRIDS = ("qwen3_5_tied", "nemotron_h_moe", "granite_h")
FAMILIES = ("llama3_rope", "qwen3_sliding", "deepseek_v4", *HYBRIDS, *MIXTURES)
#: others run nearly every layer of these
PARTS_OF_OTHERS = (
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
    "olmo_hybrid",
    "bamba",
    "falcon_h1",
)
#: with fewer key/value heads, key heads or groups than ranks
ON_FOUR = ("qwen3_5", "kimi_linear", "nemotron_h", "granite_h")
#: its tests have a reference of their own: tests/parity/test_apriel2.py
ELSEWHERE = {"Apriel2ForCausalLM", "Apriel2ForConditionalGeneration"}
#: serves no tokens
NOT_A_MODEL = {"ExtractHiddenStatesModel"}
DEMO = Path(__file__).parents[2] / "examples/models/tiny-qwen3_5-code"


def logprobs(llm: LLM, token_ids: list[list[int]], **fields: Any) -> list[list[float]]:
    """Of every sampled token and, if asked for, every prompt position."""
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0, **fields}
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
    rows = []
    for output in llm.generate(batch, SamplingParams(**settings), use_tqdm=False):
        sampled = [row for one in output.outputs for row in one.logprobs or []]
        scored = [row for row in output.prompt_logprobs or [] if row is not None]
        rows.append([entry.logprob for row in [*sampled, *scored] for entry in row.values()])
    return rows


def tokens(llm: LLM, token_ids: list[list[int]], **fields: Any) -> list[list[int]]:
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
    outputs = llm.generate(batch, SamplingParams(**settings), use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def test_every_served_architecture_is_compared() -> None:
    """By its class, or one that it is made of: multimodal wrappers are served as text."""
    kinds = {CONFIGS[family]().model_type for family in (*FAMILIES, *PARTS_OF_OTHERS)}
    compared = {
        ModelRegistry.load_model_cls(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]) for kind in kinds
    }
    served = {
        name: ModelRegistry.load_model_cls(name)
        for name in ModelRegistry.get_supported_archs() - ELSEWHERE - NOT_A_MODEL
    }
    # Other tests register models of their own.
    own = {name: cls for name, cls in served.items() if cls.__module__.startswith("vllm.")}
    assert {name for name, cls in own.items() if compared.isdisjoint(cls.__mro__)} == set(), (
        "name a family of it (tests/tiny_configs.py) in PARTS_OF_OTHERS or FAMILIES here, or the "
        "architecture in ELSEWHERE, where transformers has no model of it"
    )


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *((family, 2) for family in FAMILIES),
        *nightly(*((family, 2) for family in PARTS_OF_OTHERS)),
        *nightly(*((family, 4) for family in ON_FOUR)),
    ],
)
def test_greedy_text_equals_transformers(family: str, ranks: int, make_engine: MakeEngine) -> None:
    """Chunked, preempted, and a second time from the prefix cache."""
    llm = make_engine(
        family,
        tensor_parallel_size=ranks,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, preempted = scheduler.schedule, 0

    def preempt_and_schedule() -> Any:
        nonlocal preempted
        if 0 < len(scheduler.running) and preempted < 3:
            scheduler._preempt_last()
            preempted += 1
        return schedule()

    scheduler.schedule = preempt_and_schedule
    for _ in range(2):
        outputs = generate(llm, prompts((1, 17, 63, 300)), 12)
        for output in outputs:
            assert_equals_reference(output, tiny_model(family), 12)
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 0
    assert preempted == 3


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss", "deepseek_v4"])
def test_ranks_with_whole_experts(family: str, make_engine: MakeEngine) -> None:
    llm = make_engine(family, tensor_parallel_size=2, enable_expert_parallel=True)
    for output in generate(llm, prompts((1, 17, 63)), 12):
        assert_equals_reference(output, tiny_model(family), 12)


def test_a_model_without_experts_has_none_to_spread(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """One whose config states some, so that only its layers tell."""
    dense = str(make_tiny("deepseek_v2", tmp_path, first_k_dense_replace=9))
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with pytest.raises(ValueError, match="enable-expert-parallel: the model has no experts"):
            make_engine("deepseek_v2", model=dense, **sizes, enable_expert_parallel=True)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 1), (4, 2)])
def test_ranks_share_key_value_heads(
    ranks: int, kv_heads: int, make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = make_tiny("qwen3", tmp_path, num_key_value_heads=kv_heads)
    llm = make_engine("qwen3", model=str(model), tensor_parallel_size=ranks)
    for output in generate(llm, prompts((3, 40)), 16):
        assert_equals_reference(output, model, 16)


def test_ranks_that_cannot_share_a_model_are_refused(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    three = make_tiny("qwen3", tmp_path, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(ValueError, match="3 key/value heads can be neither divided among 2"):
        make_engine("qwen3", model=str(three), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="4 attention heads cannot be divided among 3 tensor"):
        make_engine("llama", tensor_parallel_size=3)
    three = make_tiny(
        "qwen3_5", tmp_path / "hybrid", linear_num_key_heads=3, linear_num_value_heads=6
    )
    with pytest.raises(ValueError, match="3 recurrent key heads can be neither divided among 2"):
        make_engine("qwen3_5", model=str(three), tensor_parallel_size=2)


def test_the_demo_model_says_the_same_on_any_number_of_ranks(make_engine: MakeEngine) -> None:
    """Its two key heads and two key/value heads are copied to four ranks."""
    texts = ["def main", "class Request:\n    def __init__(self", "for i in range(", "import "]

    def said(ranks: int) -> list[list[int]]:
        llm = make_engine("qwen3_5", model=str(DEMO), tensor_parallel_size=ranks)
        greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        outputs = llm.generate(texts, greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    one = said(1)
    assert len({tuple(tokens) for tokens in one}) == len(texts)
    assert said(2) == one
    assert said(4) == one


def test_a_process_of_its_own_changes_no_bit(make_engine: MakeEngine) -> None:
    here = make_engine("qwen3_5", max_num_batched_tokens=64)
    there = make_engine("qwen3_5", max_num_batched_tokens=64, distributed_executor_backend="mp")
    batch = prompts((5, 70))
    assert logprobs(there, batch, prompt_logprobs=2) == logprobs(here, batch, prompt_logprobs=2)


def test_two_ranks_are_as_good_as_one(make_engine: MakeEngine) -> None:
    """Logprobs of samples and prompts, seeded samples, and all of these however steps are cut."""
    one = make_engine("qwen3_5", max_logprobs=-1)
    two = make_engine("qwen3_5", max_logprobs=-1, tensor_parallel_size=2)
    batch = prompts((5, 33, 70))
    for fields in ({"logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 2}):
        found, expected = logprobs(two, batch, **fields), logprobs(one, batch, **fields)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=5e-5)
    seeded = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "n": 3}
    assert tokens(two, batch, **seeded) == tokens(one, batch, **seeded)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_do_not_depend_on_the_batch(ranks: int, make_engine: MakeEngine) -> None:
    """Nor on what is computed: the second time everything but the last token is cached."""
    llm = make_engine("llama", tensor_parallel_size=ranks, enable_prefix_caching=True)
    batch = prompts((5, 17, 33))
    together = logprobs(llm, batch, max_tokens=4)
    assert logprobs(llm, batch, max_tokens=4) == together
    assert llm.reset_prefix_cache()
    assert [logprobs(llm, [prompt], max_tokens=4)[0] for prompt in batch] == together


def test_ranks_sample_what_a_grammar_allows(make_engine: MakeEngine) -> None:
    llm = make_engine("qwen3_5", tensor_parallel_size=2, max_model_len=256)
    schema = {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 3, "maxItems": 5}
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    constrained = SamplingParams(max_tokens=60, structured_outputs=constraint, seed=1)
    free = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = llm.generate(
        ["x", "y", "z"], [constrained, free, constrained.clone()], use_tqdm=False
    )
    for output in (outputs[0], outputs[2]):
        assert 3 <= len(json.loads(output.outputs[0].text)) <= 5
    assert not outputs[1].outputs[0].text.startswith("[")


def test_ranks_accept_the_same_drafts(make_engine: MakeEngine) -> None:
    """Drafts that are right, wrong or both: the text is that of decoding token by token."""
    batch = prompts((5, 33, 150))
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_batched_tokens": 64}
    expected = tokens(make_engine("qwen3_5", **settings), batch, max_tokens=24)
    drafter = {"method": "replay", "num_speculative_tokens": 3, "acceptance": 0.6}
    llm = make_engine("qwen3_5", speculative_config=drafter, disable_log_stats=False, **settings)
    params = [
        SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, extra_args={DRAFTS_KEY: drafts}
        )
        for drafts in expected
    ]
    prompted = [TokensPrompt(prompt_token_ids=ids) for ids in batch]
    outputs = llm.generate(prompted, params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    assert 0 < accepted < metrics["vllm:spec_decode_num_draft_tokens"].value


def test_ranks_draft_alike(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Each holds a part of the head, and of its keys and values."""
    target = str(with_mtp(tiny_model("qwen3_5"), tmp_path, mtp_tensors(TINY)))
    batch, settings = prompts((5, 33, 150)), {"model": target, "max_num_batched_tokens": 64}
    expected = tokens(make_engine("qwen3_5", **settings), batch, max_tokens=16)
    drafter = {"method": "mtp", "num_speculative_tokens": 3}
    settings |= {"tensor_parallel_size": 2, "speculative_config": drafter}
    assert tokens(make_engine("qwen3_5", **settings), batch, max_tokens=16) == expected


def test_ranks_sleep_and_reload(make_engine: MakeEngine) -> None:
    llm = make_engine("qwen3_5", tensor_parallel_size=2, enable_sleep_mode=True)
    batch = prompts((5, 33))
    expected = tokens(llm, batch)
    assert llm.collective_rpc(lambda worker: worker.rank) == [0, 1]
    parts = llm.collective_rpc(
        lambda worker: [p.data_ptr() == 0 for p in worker.get_model().parameters()]
    )
    assert not any(map(any, parts))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm, batch) == expected
    llm.collective_rpc(lambda worker: worker.get_model().lm_head.weight.data.zero_())
    assert tokens(llm, batch) != expected
    llm.collective_rpc("reload_weights")
    assert tokens(llm, batch) == expected


def test_a_connector_stores_and_loads_every_part(make_engine: MakeEngine, tmp_path: Path) -> None:
    """What both ranks have stored, the next engine's ranks load; with a part lost, neither does."""
    (prompt,) = prompts((70,))
    for stored in (0, 64, 0):
        llm = make_engine(
            "llama",
            tensor_parallel_size=2,
            kv_transfer_config={
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
            },
        )
        (output,) = generate(llm, [prompt], 16)
        assert_equals_reference(output, tiny_model("llama"), 16)
        assert output.num_cached_tokens == stored
        if stored:
            shutil.rmtree(next(tmp_path.glob("*.1of2")))
    assert len(list(tmp_path.glob("*.?of2"))) == 2


@pytest.mark.parametrize("layout", ["tp2", "tp4", "tp2pp2"])
def test_hidden_states_are_whole_and_written_once(
    layout: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    make = partial(make_engine, "qwen3_5", max_num_batched_tokens=64, enable_prefix_caching=True)
    assert_ranks_extract_alike(make, tmp_path, 1e-5, layout)
