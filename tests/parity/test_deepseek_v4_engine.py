# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4, served: logits and tokens are transformers', whatever happens to a request."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_logits import FAMILY, IDS, prompt_logits
from draft_models import TINY, write_eagle3
from draft_scenarios import Run, a_conversation, batches, compare, engine, preemptions
from parity_checks import LAYOUT, MakeEngine, assert_equals, one_stage, prompts
from tiny_models import hf_model, hf_reference_logits, hf_residual_streams, tiny_model
from torch import Tensor, nn

from tests.extraction_options import extraction
from tests.model_executor.models.test_deepseek_v4 import packed, quantised, stored_as, write
from tests.model_executor.models.test_fp8_parity import EXPLAINED, ROUNDINGS
from vllm import SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.kernels.fp8 import naive
from vllm.platforms import current_platform

pytestmark = [pytest.mark.slow, pytest.mark.parity, one_stage]


@pytest.mark.parametrize("chunk", [2048, 37])
def test_logits(chunk: int, make_engine: MakeEngine) -> None:
    """Past two entries of the coarsest layer, many of the others, and the window; cut or whole."""
    llm = make_engine(FAMILY, max_num_batched_tokens=chunk, max_logprobs=-1)
    expected = hf_reference_logits(tiny_model(FAMILY), IDS)[:-1].log_softmax(-1)
    found = prompt_logits(llm)
    assert found.shape == expected.shape and len(found) >= 300
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "scenario", [batches, a_conversation, preemptions], ids=lambda f: f.__name__
)
def test_tokens_in_batches_from_caches_and_after_preemptions(
    scenario: Callable[[Run], None], make_engine: MakeEngine
) -> None:
    """One token or four at a time."""
    settings: dict[str, Any] = {"family": FAMILY, "enable_prefix_caching": True}
    plain = Run(engine(make_engine, 0, **settings))
    scenario(plain)
    for output in plain.outputs:
        assert_equals(output, hf_model(tiny_model(FAMILY)))
    for method, told in (("replay", plain.tokens()), ("ngram", None)):
        drafted = Run(engine(make_engine, 3, method=method, **settings), told)
        scenario(drafted)
        compare(drafted.outputs, plain.outputs)
        accepted, rejected = drafted.drafts()
        assert rejected and (accepted or method == "ngram")


def test_a_cached_prefix_gives_the_same_bits(make_engine: MakeEngine) -> None:
    llm = make_engine(FAMILY, enable_prefix_caching=True, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=4)
    (ids,) = prompts((290,), seed=7)
    cold, warm = (
        llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)[0]
        for _ in range(2)
    )
    assert (warm.num_cached_tokens or 0) >= 256
    assert cold.outputs[0].logprobs == warm.outputs[0].logprobs


@pytest.mark.parametrize("chunk", [2048, 37])
def test_captured_rows(chunk: int, make_engine: MakeEngine, tmp_path: Path) -> None:
    """The mean of transformers' streams, and what its final norm reads: computed, and cached."""
    layers = [0, 1, 3, 5]
    settings = {"enable_prefix_caching": True, "max_num_batched_tokens": chunk}
    llm = make_engine(FAMILY, **settings, **extraction(tmp_path, layers))
    streams = hf_residual_streams(tiny_model(FAMILY), IDS)
    assert streams[3].shape == (len(IDS), 4, 64)
    expected = torch.stack([*(streams[i].mean(1) for i in layers[:-1]), streams[5]], 1)
    assert not torch.allclose(expected[:, 3], expected[:, 2], atol=0.1)
    for cached in (0, 256):
        (output,) = llm.generate(
            [TokensPrompt(prompt_token_ids=IDS)],
            SamplingParams(temperature=0, max_tokens=1),
            use_tqdm=False,
        )
        assert (output.num_cached_tokens or 0) >= cached
        assert output.kv_transfer_params is not None
        stored = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
        assert stored["token_ids"].tolist() == IDS
        found = stored["hidden_states"]
        assert found.shape == expected.shape
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    (decision,) = [
        d for d in llm.llm_engine.vllm_config.decisions.decisions() if d.what == "captured streams"
    ]
    assert decision.chosen.startswith("the mean of a token's 4")


def test_a_drafter_that_reads_streams_changes_nothing(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    head = write_eagle3(tmp_path / "head", tiny_model(FAMILY), TINY)
    plain = Run(engine(make_engine, 0, family=FAMILY))
    batches(plain)
    drafter = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    drafted = Run(engine(make_engine, 0, family=FAMILY, speculative_config=drafter))
    batches(drafted)
    compare(drafted.outputs, plain.outputs)
    assert drafted.drafts()[1]


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="stages need a GPU each")
def test_stages_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="DeepseekV4ForCausalLM is not made for them"):
        make_engine(FAMILY, pipeline_parallel_size=2)


#: transformers' projections that the release multiplies in float8
_FLOAT8 = re.compile(
    r"self_attn\.(q_a|q_b|kv|o_b)_proj$|indexer\.q_b_proj$|shared_experts\.(gate|up|down)_proj$"
)


def rounded_logits(path: Path) -> Tensor:
    """transformers' logprobs from the dequantised weights, with activations as they are rounded for
    float8 products."""

    def rounding(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        (x,) = inputs
        return ROUNDINGS["block"](x.flatten(0, -2)).view_as(x)

    modules = [module for name, module in hf_model(path).named_modules() if _FLOAT8.search(name)]
    assert len(modules) == 5 * 7 + 2
    handles = [module.register_forward_pre_hook(rounding) for module in modules]
    with torch.no_grad():
        logits: Tensor = hf_model(path)(torch.tensor([IDS])).logits[0, :-1]
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1)


@pytest.mark.skipif(LAYOUT.tp > 1, reason="ranks would cut its scale blocks, which is refused")
def test_a_quantised_checkpoint_computes_what_it_stands_for(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float8 around experts in four bits, under the release's names, which transformers reads, too:
    without quantisation as exactly as ever; with it, up to the rounding of activations.

    On a GPU products are plain torch's: tensor cores keep some 14 bits of float8 sums, which takes
    activations over the next boundary of their rounding (`tests/kernels/test_fp8.py` bounds it)."""
    kernels = current_platform.kernels
    if torch.cuda.is_available():
        monkeypatch.setattr(kernels, "linear_fp8_block", naive.linear_fp8_block)
    stored, plain = quantised(packed)
    reference = write(tmp_path / "plain", plain)
    exact = hf_reference_logits(reference, IDS)[:-1].log_softmax(-1)
    found = prompt_logits(make_engine(FAMILY, model=str(reference), max_logprobs=-1))
    assert float((found - exact).abs().max()) < 1e-5
    path = write(tmp_path / "stored", stored, **stored_as(expert_dtype="fp4"))
    found = prompt_logits(make_engine(FAMILY, model=str(path), max_logprobs=-1))
    rounded = rounded_logits(reference)
    assert (found - rounded).norm() < (1 - EXPLAINED) * (found - exact).norm()
